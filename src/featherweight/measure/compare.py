"""`compare`: what each recipe costs and saves on this machine, and whether the output holds."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from featherweight import machine
from featherweight.errors import FeatherweightError
from featherweight.measure.child import scratch_folder
from featherweight.measure.pace import Progress
from featherweight.measure.result import Report, Row
from featherweight.measure.runner import Runner
from featherweight.measure.side import Request
from featherweight.measure.text import read_prompts, read_text
from featherweight.measure.workload import Workload
from featherweight.models import locate
from featherweight.paths import cache_dir
from featherweight.recipe import Recipe
from featherweight.report.words import verdict
from featherweight.versions import versions


def compare(
    model: str | os.PathLike[str],
    recipes: Sequence[str | Recipe] = (),
    *,
    prompt_tokens: int = 512,
    new_tokens: int = 64,
    batch_sizes: Sequence[int] = (),
    runs: int = 5,
    threads: int | None = None,
    budget_s: float | None = None,
    quality_tokens: int = 2048,
    text: str | Path | None = None,
    prompts: str | Path | None = None,
    device: str | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    revision: str | None = None,
    max_kld: float | None = None,
    max_ppl_ratio: float | None = None,
    progress: Progress = lambda doing, left: None,
) -> Report:
    """Measure recipes side by side, each in a process of its own.

    Args:
        model: as for `featherweight.load`.
        recipes: the first is the baseline. Without any: the checkpoint's own dtype, and what is
            installed and worth knowing beside it.
        prompt_tokens, new_tokens: P and N of `ppP` and `tgN`.
        batch_sizes: sequences at once, each measured; 1, or 16 for encoders, by default.
        runs: rounds of baseline and recipe in turn.
        threads: of torch, in every process; as torch sets them by default.
        budget_s: seconds for everything after downloads; rounds, then tokens, are cut to fit.
        quality_tokens: tokens of text read to compare outputs; 0 leaves quality out.
        text: a UTF-8 file; CPython's help topics by default.
        prompts: a JSONL file; greedy outputs are put side by side.
        max_kld, max_ppl_ratio: gates; what breaks them is listed in `report.gates`.
        progress: called with what is being done and the seconds left, None if unknown.

    Returns:
        The report. A recipe that failed is a row with its reason. After Ctrl-C the report holds
        what was measured until then, with `interrupted` set.

    Raises:
        RecipeError and FeatherweightError for input that cannot be used: recipes and files before
        anything is run, a model or text that no recipe could be measured with once it is tried.
    """
    recipes = [recipes] if isinstance(recipes, (str, Recipe)) else recipes
    parsed: list[str | None] = [str(Recipe.parse(recipe)) for recipe in recipes]
    if len(parsed) == 1 and (max_kld is not None or max_ppl_ratio is not None):
        raise FeatherweightError(
            f"a gate compares recipes with a baseline, and only '{parsed[0]}' is named",
            hint="name the baseline first, then the recipes, such as 'bf16 bnb-nf4'",
        )
    threads = torch.get_num_threads() if threads is None else threads
    numbers = {"prompt_tokens": prompt_tokens, "new_tokens": new_tokens, "runs": runs}
    numbers["threads"] = threads
    _check(numbers | {f"batch_sizes: {b}": b for b in batch_sizes}, quality_tokens, budget_s)
    started = time.monotonic()
    body = read_text(text)
    asked_prompts = read_prompts(prompts) if prompts is not None else None
    workload = Workload(prompt_tokens, new_tokens, tuple(batch_sizes))
    report = Report(
        model={"name": str(model)},
        machine={},
        versions=versions(),
        settings={
            "threads": threads,
            "runs": runs,
            **workload.to_json(),
            "budget_s": budget_s,
            "seed": seed,
            "device": device or "cpu",
            "max_kld": max_kld,
            "max_ppl_ratio": max_ppl_ratio,
            "text": body.to_json(),
        },
        prompts=[_shown(prompt) for prompt in asked_prompts] if asked_prompts else None,
    )
    # Before any clock runs: a download or conversion is not the model's load time.
    progress(f"looking for {model}", None)
    source, notes = locate(os.fspath(model), revision, trust_remote_code)
    progress("measuring this machine", None)
    here, rates = machine.describe(), machine.probe()
    report.machine = here.to_json() | {"cores": here.usable_cores, "rates": rates.to_json()}
    with scratch_folder(cache_dir()) as folder:
        request = Request(
            model=str(source),
            workload=workload,
            runs=runs,
            threads=threads,
            seed=seed,
            seconds=budget_s,  # of measuring; a download is not
            quality_tokens=quality_tokens,
            text=None if text is None else str(text),
            prompts=asked_prompts,
            device=device,
            trust_remote_code=trust_remote_code,
        )
        runner = Runner(request, Path(folder), rates.peak_bandwidth.value, progress)
        try:
            runner.run(parsed or [None], default_recipes)
        except KeyboardInterrupt:
            report.interrupted = True
    report.rows = runner.rows
    report.model = runner.model | {
        "name": str(model),
        "notes": notes + runner.model.get("notes", []),
    }
    report.settings |= {"quality": runner.measured, "batch_sizes": list(runner.work.batch_sizes)}
    in_full = runner.in_full and not report.interrupted
    report.complete = in_full and all(row.status != "partial" for row in report.rows)
    _finish(report, max_kld, max_ppl_ratio)
    report.elapsed_s = time.monotonic() - started
    return report


def default_recipes(dtype: str) -> list[str]:
    """What to set beside a checkpoint of this dtype when the user names nothing."""
    found = ["bf16"] if dtype == "float32" else ["fp32"]
    found += ["int8", "nf4:double", "nf4:double:head=int8+fastpath"]
    if find_spec("bitsandbytes"):
        found += ["bnb-int8", "bnb-nf4:double"]
    return found


def _check(numbers: dict[str, int], quality_tokens: int, budget_s: float | None) -> None:
    for name, value in numbers.items():
        least = 2 if name == "new_tokens" else 1
        if value < least:
            raise FeatherweightError(f"{name} is {value}", hint=f"give {least} or more")
    if quality_tokens < 0:
        raise FeatherweightError(f"quality_tokens is {quality_tokens}", hint="give 0 or more")
    if budget_s is not None and budget_s <= 0:
        raise FeatherweightError(f"the budget is {budget_s} s", hint="give more than none")


def _shown(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", prompt[-1]))


def _finish(report: Report, max_kld: float | None, max_ppl_ratio: float | None) -> None:
    """Verdicts, differences of outputs, and gates: what needs the baseline's row beside it."""
    if not report.rows:
        return
    baseline = report.rows[0]
    for row in report.rows:
        row.verdict = verdict(row, baseline)
        for mine, theirs in zip(row.outputs or (), baseline.outputs or (), strict=False):
            mine["first_difference"] = _first_difference(mine["ids"], theirs["ids"])
            mine["tokens"] = len(mine["ids"])
        if row is not baseline:
            report.gates += _broken(row, "kld", "KLD", "--max-kld", max_kld)
            report.gates += _broken(row, "ppl_ratio", "PPL ratio", "--max-ppl-ratio", max_ppl_ratio)


def _first_difference(mine: list[int], theirs: list[int]) -> int | None:
    """How many tokens are the same before the first that differs; None if none does."""
    if mine == theirs:
        return None
    same = (one == other for one, other in zip(mine, theirs, strict=False))
    return next((i for i, equal in enumerate(same) if not equal), min(len(mine), len(theirs)))


def _broken(row: Row, key: str, name: str, option: str, most: float | None) -> list[str]:
    """The gate's line if it does not hold; what was not measured does not hold."""
    if most is None:
        return []
    if key not in row.quality:
        return [f"{row.recipe}: {name} was not measured, so that {option} {most:g} is not shown"]
    value = row.quality[key].value
    return [] if value <= most else [f"{row.recipe}: {name} {value:.4g} is above {option} {most:g}"]
