"""Where the time of a model goes: its operations, measured, under this machine's roofline."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from featherweight import machine
from featherweight.errors import FeatherweightError, ModelError
from featherweight.ledger import apply
from featherweight.models import load
from featherweight.profiling import roofline
from featherweight.profiling.counting import DECODER_LAYERS, Call, Counter, Timer, watching
from featherweight.profiling.operations import UNKNOWN
from featherweight.profiling.passes import check, mode, prepare
from featherweight.profiling.profiled import Operation, Profile, Work, total
from featherweight.profiling.roofline import Roofline
from featherweight.profiling.scores import LENGTHS, heads_of, scores
from featherweight.recipe import Recipe
from featherweight.versions import versions

Progress = Callable[[str, float | None], None]


def profile(
    model: nn.Module | str | os.PathLike[str],
    recipe: str | Recipe | None = None,
    *,
    train: bool = False,
    decode: bool = False,
    batch_size: int = 1,
    seq_len: int = 512,
    lengths: Sequence[int] = LENGTHS,
    runs: int = 5,
    seed: int = 0,
    device: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    progress: Progress = lambda doing, left: None,
) -> Profile:
    """Run a model and say where its time goes, operation by operation.

    The pass runs once to warm up, once to be counted (FLOPs and bytes of every op), then `runs`
    times alone and `runs` times with each op timed, in turns. A model object is put back as it was.

    Args:
        model: a transformers model, or a name as `featherweight.load` takes it.
        recipe: applied for the length of the profile; without one the model stays as it is.
        train: a forward and a backward pass (no optimizer step), on the loss of a language model,
            or on the mean square of what an encoder says.
        decode: one token after a prompt, instead of the prompt.
        batch_size: sequences at once.
        seq_len: tokens of each, random; with `decode`, of the prompt.
        lengths: tokens at which attention's score matrix is reckoned.
        runs: samples of each time.
        seed: of the tokens.
        device, trust_remote_code, revision: as `featherweight.load` takes them, for a name.

    Raises:
        FeatherweightError for settings that contradict one another or the model, and what `load`
        and `apply` raise. A model is run for real: a config alone is not enough.
    """
    if train and decode:
        raise FeatherweightError(
            "train and decode exclude each other", hint="decoding has no backward pass: choose one"
        )
    recipe = Recipe.parse(recipe) if recipe is not None else None
    settings: dict[str, Any] = {
        "recipe": str(recipe) if recipe is not None else None,
        "pass": "train" if train else "decode" if decode else "forward",
        "batch_size": batch_size,
        "seq_len": seq_len,
        "runs": runs,
        "threads": torch.get_num_threads(),
        "seed": seed,
        "loss": None,
    }
    for setting in ("batch_size", "seq_len", "runs"):
        if settings[setting] < 1:
            raise FeatherweightError(
                f"{setting} is {settings[setting]}", hint="give a whole number from 1 upwards"
            )
    if isinstance(model, nn.Module):
        if recipe is None:
            return _profile(model, type(model).__name__, settings, lengths, progress)
        with apply(model, recipe):
            return _profile(model, type(model).__name__, settings, lengths, progress)
    progress("load", None)
    try:
        loaded = load(
            model, recipe, device=device, trust_remote_code=trust_remote_code, revision=revision
        )
    except ModelError as error:
        why = "a profile runs the model for real, so that a config alone is not enough"
        hint = f"{error.hint}; {why}" if error.hint else why
        raise ModelError(error.message, hint=hint) from error
    return _profile(loaded.model, os.fspath(model), settings, lengths, progress)


def _profile(
    model: Any, name: str, settings: dict[str, Any], lengths: Sequence[int], progress: Progress
) -> Profile:
    check(model, settings)
    device = next(model.parameters()).device
    with mode(model, settings["pass"] == "train"):
        run = prepare(model, settings, device)
        progress("warm up", None)
        run(None)
        progress("count", None)
        counter = Counter()
        with watching(counter):
            run(counter)
        progress("roofline", None)
        roof = roofline.measure(device, {call.cost.arithmetic for call in counter.calls})
        wall: list[float] = []
        timed = []
        for i in range(settings["runs"]):
            left = sum(wall) / len(wall) * 2 * (settings["runs"] - i) if wall else None
            progress(f"run {i + 1} of {settings['runs']}", left)
            start = time.perf_counter()
            run(None)
            wall.append(time.perf_counter() - start)
            timer = Timer(device)
            with watching(timer):
                run(timer)
            timed.append(timer.seconds)
    found = _operations(counter.calls, timed, roof)
    config = model.config
    heads = heads_of(config)
    rows = scores(*heads, model.dtype.itemsize, lengths, settings["batch_size"]) if heads else []
    about = {
        "name": name,
        "architecture": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": model.num_parameters(),
        "attention": config._attn_implementation,
        "heads": heads[0] if heads else None,
        "head_dim": heads[1] if heads else None,
    }
    here = machine.describe().to_json()
    made = Profile(about, here, versions(), settings, roof, found, tuple(wall), rows)
    made.notes.extend(_notes(made, device))
    return made


def _operations(
    calls: list[Call], timed: list[dict[tuple[str, str], float]], roof: Roofline
) -> list[Operation]:
    """Calls and times of the same phase and name put together; the longest first."""
    found: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        found[call.phase, call.name].append(call)
    rows = []
    for (phase, name), these in found.items():
        work = total([_work(call, roof) for call in these])
        samples = tuple(seconds.get((phase, name), 0.0) for seconds in timed)
        work = replace(work, samples=samples, seconds=statistics.median(samples))
        rows.append(Operation(phase, these[0].cost.group, name, work))
    return sorted(rows, key=lambda row: -row.work.seconds)


def _work(call: Call, roof: Roofline) -> Work:
    """One call, its time still unknown."""
    cost = call.cost
    least, bound = roof.seconds(cost.flops, cost.read + cost.written, cost.arithmetic)
    return Work(1, cost.flops, cost.read, cost.written, least, bound, 0.0, ())


def _notes(made: Profile, device: torch.device) -> list[str]:
    """What must be said beside the figures."""
    notes = []
    unknown = [o for o in made.operations if o.group == UNKNOWN]
    if unknown:
        names = ", ".join(sorted({o.name for o in unknown}))
        notes.append(f"not classified, FLOPs not counted: {names}")
    if any(o.name == DECODER_LAYERS for o in made.operations):
        notes.append(
            "fast path: norms, rotary embedding and activations of its layers are made in the same"
            " native call, and their time is in that row"
        )
    wall = statistics.median(made.wall)
    if made.operations_s > wall:
        excess = 100 * (made.operations_s / wall - 1)
        notes.append(
            f"the operations, timed one by one, take {excess:.0f} % longer than the pass alone:"
            " none of its time is seen outside of them"
        )
    if device.type == "cuda":
        notes.append("each operation was waited for: its time includes the launch")
    return notes
