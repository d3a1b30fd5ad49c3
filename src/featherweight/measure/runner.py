"""Measure recipe after recipe, each in its own process, beside a baseline that stays loaded.

Rounds of baseline and recipe alternate, so that a machine that slows down slows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from featherweight.measure.child import Child, ChildError
from featherweight.measure.figures import Round, figures
from featherweight.measure.plan import Costs, plan
from featherweight.measure.result import Estimate, PeakMemory, Row
from featherweight.measure.stats import noise
from featherweight.measure.workload import Workload

QUALITY_PART = 0.4  # most of a recipe's time that its quality may take
FP32_BYTES = 4
LEAST_QUALITY = 512  # tokens
DEFAULT_BATCH_SIZES = {"decoder": (1,), "encoder": (16,)}

Progress = Callable[[str, float | None], None]  # what is being done, seconds left if known


@dataclass(frozen=True)
class Request:
    """What to measure, and with what."""

    model: str
    workload: Workload
    runs: int
    threads: int
    seed: int
    seconds: float | None  # for the whole run
    quality_tokens: int
    text: str | None
    prompts: Sequence[Any] | None
    device: str | None
    trust_remote_code: bool
    revision: str | None


class Side:
    """A child process, its row and what its rounds cost."""

    def __init__(self, child: Child, row: Row) -> None:
        self.child = child
        self.row = row
        self.costs: Costs = {}
        self.rounds: list[Round] = []
        self.info: dict[str, Any] = {}

    def round(self, work: Workload, text: str | None) -> Round:
        """Run one round."""
        return Round(work, self.child.ask("round", workload=work.to_json(), text=text))


class Runner:
    """Fills `rows`; whatever stops it, the rows that are there are true."""

    def __init__(
        self, request: Request, folder: Path, bandwidth: float, progress: Progress
    ) -> None:
        self.request = request
        self.rows: list[Row] = []
        self.model: dict[str, Any] = {}  # provenance, once something was loaded
        self.measured: dict[str, Any] = {}  # what quality was measured on
        self.in_full = True
        self.work = request.workload
        self._folder = folder
        self._bandwidth = bandwidth  # GB/s
        self._progress = progress
        self._start = time.monotonic()
        self._baseline: Side | None = None
        self._tolerance = 0.0
        self._apart = False  # the baseline was measured before the recipes, not beside them

    def run(self, recipes: Sequence[str | None], more: Callable[[str], Sequence[str]]) -> None:
        """Measure the recipes, the first being the baseline (None: the checkpoint's own dtype).

        `more(dtype)` names further recipes once the baseline is loaded.
        """
        todo = list(recipes)
        with ExitStack() as stack:
            self._label = todo[0] or "the checkpoint as it is"
            first = Row(self._label, baseline=True)
            self.rows.append(first)
            self._try(first, lambda: self._open_baseline(stack, first, todo[0]))
            todo += more(self.model.get("dtype", "float32")) if todo[0] is None else []
            if len(todo) > 1:
                self._try(first, lambda: self._make_room(self._share(len(todo))))
            for number, recipe in enumerate(todo[1:], 2):
                self._label = f"{number}/{len(todo)} {recipe}"
                row = Row(str(recipe))
                self.rows.append(row)
                share = self._share(len(todo) + 1 - number)
                self._try(row, lambda row=row, share=share: self._measure(row, share))  # type: ignore[misc]
            if not self._apart:
                self._try(first, lambda: self._baseline_alone(self._left()))
            if self._baseline:
                self._fill(self._baseline, [])
            for row in self.rows:
                row.notes += noise(row.figures)

    # --- time -------------------------------------------------------------------------------

    def _left(self) -> float | None:
        if self.request.seconds is None:
            return None
        return self.request.seconds - (time.monotonic() - self._start)

    def _share(self, recipes_left: int) -> float | None:
        left = self._left()
        return None if left is None else left / recipes_left

    def _say(self, doing: str) -> None:
        self._progress(f"{self._label}: {doing}", self._left())

    # --- one side ---------------------------------------------------------------------------

    def _try(self, row: Row, measure: Callable[[], None]) -> None:
        """Run it; a child's failure becomes the row's reason, and the rest goes on."""
        try:
            measure()
        except ChildError as error:
            row.status = "partial" if row.load_s is not None else "failed"
            row.reason = str(error)
        except KeyboardInterrupt:
            row.status = "partial" if row.load_s is not None else "failed"
            row.reason = "interrupted"
            raise

    def _open(self, stack: ExitStack, row: Row, recipe: str | None) -> Side:
        """Start a child and load the model with the recipe."""
        request, left = self.request, self._left()
        if left is not None and left <= 0:
            raise ChildError("no time was left; give a larger --budget or fewer recipes")
        child = stack.enter_context(Child(request.threads, request.seed))
        side = Side(child, row)
        self._say("loading")
        info = child.ask(
            "load",
            model=request.model,
            recipe=recipe,
            device=request.device,
            trust_remote_code=request.trust_remote_code,
            revision=request.revision,
        )
        side.info = info
        row.recipe = info["recipe"]
        row.load_s = info["load_s"]
        row.load_memory = PeakMemory(**info["load_memory"])
        row.weights, row.weights_mapped = info["weights"], info["weights_mapped"]
        row.receipt = info["receipt"]
        row.notes += info["notes"]
        if not self.model:
            self.model = info["provenance"]
            if not self.work.batch_sizes:
                sizes = DEFAULT_BATCH_SIZES[self.model["kind"]]
                self.work = replace(self.work, batch_sizes=sizes)
        return side

    def _look(self, side: Side, share: float | None, started: float) -> None:
        """Memory and cost of one pass, then quality and prompts."""
        request, row = self.request, side.row
        write = side is self._baseline
        self._say("memory")
        warm = side.child.ask("warm_up", workload=self.work.to_json(), text=request.text)
        row.run_memory, row.kv_cache = PeakMemory(**warm["run_memory"]), warm["kv_cache"]
        side.costs = warm["costs"]
        if row.kv_cache is not None and side.info["bytes_per_token"] is not None:
            work = self.work  # decode starts from an empty cache: half of it on average
            of_cache = row.kv_cache / (work.prompt_tokens + work.new_tokens) * work.new_tokens / 2
            row.bytes_per_token = int(side.info["bytes_per_token"] + of_cache)
        if not side.info["has_text"]:
            row.notes.append("the checkpoint has no tokenizer: quality was not measured")
            return
        if request.quality_tokens and (write or self._baseline):
            self._quality(side, share, started, write)
        if request.prompts:
            self._say("prompts")
            row.outputs = side.child.ask(
                "prompts", prompts=request.prompts, new_tokens=self.work.new_tokens
            )

    def _quality(self, side: Side, share: float | None, started: float, write: bool) -> None:
        self._say("quality")
        tokens = self.request.quality_tokens
        first = side.costs[str(self.work.batch_sizes[0])]
        if share is not None and "prefill" in first and not write:
            rate = self.work.prompt_tokens / first["prefill"]
            left = QUALITY_PART * (share - (time.monotonic() - started))
            affordable = int(left * rate) // LEAST_QUALITY * LEAST_QUALITY
            tokens = max(LEAST_QUALITY, min(tokens, affordable))
        answer = side.child.ask(
            "quality",
            text=self.request.text,
            tokens=tokens,
            texts=self.work.texts,
            folder=str(self._folder),
            write=write,
        )
        side.row.quality = {key: Estimate(**value) for key, value in answer["quality"].items()}
        if write:
            self.measured = answer["measured"]
        elif answer["measured"] != self.measured:
            self.in_full = False
            few, all_ = (m["scored_tokens"] for m in (answer["measured"], self.measured))
            side.row.notes.append(f"quality on {few} of {all_} tokens, to keep within the budget")

    # --- the baseline -----------------------------------------------------------------------

    def _open_baseline(self, stack: ExitStack, row: Row, recipe: str | None) -> None:
        started = time.monotonic()
        side = self._open(stack, row, recipe)
        self._baseline = side
        folder = str(self._folder)
        self._tolerance = side.child.ask("write_reference", folder=folder)["tolerance"]
        self._look(side, None, started)
        self._warm_generate(side)

    def _baseline_alone(self, seconds: float | None) -> None:
        """Rounds of the baseline by itself, as many as are missing."""
        side = self._baseline
        if side is None or side.row.status != "ok":
            return
        todo = plan(self.work, self.request.runs, [side.costs], seconds)
        self._label = side.row.recipe
        for number in range(len(side.rounds), todo.rounds):
            self._say(f"round {number + 1} of {todo.rounds}")
            side.rounds.append(side.round(todo.workload, self.request.text))

    def _make_room(self, seconds: float | None) -> None:
        """Where memory does not hold two models, measure the baseline now and let it go."""
        side = self._baseline
        if side is None or memory_for_two(self.model["parameters"]):
            return
        self._baseline_alone(seconds)
        side.child.close()
        self._apart = True
        side.row.notes.append(
            "memory does not hold two such models: recipes were measured after the baseline, not"
            " beside it, so that ratios include what the machine did in between"
        )

    # --- the recipes ------------------------------------------------------------------------

    def _measure(self, row: Row, share: float | None) -> None:
        started = time.monotonic()
        with ExitStack() as stack:
            side = self._open(stack, row, row.recipe)
            if self._baseline:
                self._say("verifying")
                verified = side.child.ask(
                    "verify", folder=str(self._folder), tolerance=self._tolerance
                )
                assert row.receipt is not None
                row.receipt["verified"] = verified
            self._look(side, share, started)
            self._warm_generate(side)
            left = None if share is None else share - (time.monotonic() - started)
            beside = self._baseline.rounds if self._baseline and self._apart else []
            try:
                self._rounds(side, beside, left)
            finally:
                self._fill(side, beside)

    def _rounds(self, side: Side, beside: list[Round], seconds: float | None) -> None:
        """Rounds of the recipe and of the baseline, taking turns to be first.

        The baseline's go to `beside`, unless it was measured before.
        """
        base = self._baseline
        if self._apart or (base is not None and base.row.status != "ok"):
            base = None
        sides = [side] if base is None else [base, side]
        todo = plan(self.work, self.request.runs, [s.costs for s in sides], seconds)
        self.in_full &= todo.workload == self.work
        for number in range(todo.rounds):
            self._say(f"round {number + 1} of {todo.rounds}")
            done = {}
            for one in sides if number % 2 == 0 else sides[::-1]:
                try:
                    done[one] = one.round(todo.workload, self.request.text)
                except ChildError as error:
                    if one is side:
                        raise
                    one.row.status, one.row.reason = "partial", str(error)
                    base, sides = None, [side]
                    beside.clear()
            side.rounds.append(done[side])
            if base is not None:
                beside.append(done[base])
                base.rounds.append(done[base])

    def _warm_generate(self, side: Side) -> None:
        """The first call of `generate()` imports and builds things: not for the clock."""
        work = self.work
        if "encode" not in side.costs[str(work.batch_sizes[0])]:
            side.round(work.shorter(min(work.prompt_tokens, 8), 2), self.request.text)

    def _fill(self, side: Side, beside: list[Round]) -> None:
        work, row = self.work, side.row
        row.figures = figures(work, side.rounds, beside)
        decode = row.figures.get(work.keys(work.batch_sizes[0])["decode"])
        if decode and row.bytes_per_token and self.request.device in (None, "cpu"):
            batch = work.batch_sizes[0]
            steps = decode.value / batch  # a step of the whole batch reads the weights once
            row.bandwidth_share = row.bytes_per_token * steps / (self._bandwidth * 1e9)


def memory_for_two(parameters: int) -> bool:
    """Whether a second model, at most in float32, fits beside the baseline."""
    return psutil.virtual_memory().available > 1.2 * FP32_BYTES * parameters
