"""Measure recipe after recipe, each in its own process, beside a baseline that stays loaded.

Rounds of baseline and recipe alternate, so that a machine that slows down slows both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from featherweight import machine
from featherweight.measure.child import Child, ChildError, InputError
from featherweight.measure.figures import Round
from featherweight.measure.pace import Pace, Progress
from featherweight.measure.plan import Plan, plan
from featherweight.measure.result import Row
from featherweight.measure.side import NO_TOKENIZER, Request, Side
from featherweight.measure.stats import noise
from featherweight.measure.workload import Workload

QUALITY_PART = 0.4  # most of a recipe's time that its quality may take
LEAST_QUALITY = 512  # tokens
FP32_BYTES = 4
BUDGET = "to keep within the budget"
DEFAULT_BATCH_SIZES = {"decoder": (1,), "encoder": (16,)}
APART = (
    "memory does not hold two such models: recipes were measured after the baseline, not beside it,"
    " so that ratios include what the machine did in between"
)


class Runner:
    """Fills `rows`; whatever stops it, the rows that are there are true."""

    def __init__(
        self, request: Request, folder: Path, bandwidth: float, progress: Progress
    ) -> None:
        self.request = request
        self.work = request.workload
        self.rows: list[Row] = []
        self.model: dict[str, Any] = {}  # provenance, once something was loaded
        self.measured: dict[str, Any] = {}  # what quality was measured on
        self.in_full = True
        self._folder = folder
        self._bandwidth = bandwidth  # GB/s
        self._pace = Pace(request.seconds, progress)
        self._baseline: Side | None = None
        self._tolerance: float | None = None  # of the baseline's outputs, once stored
        self._apart = False  # the baseline was measured before the recipes, not beside them

    def run(self, recipes: Sequence[str | None], more: Callable[[str], Sequence[str]]) -> None:
        """Measure the recipes, the first being the baseline (None: the checkpoint's own dtype).

        `more(dtype)` names further recipes once the baseline is loaded. Raises InputError if the
        baseline shows that no recipe can be measured.
        """
        todo = list(recipes)
        with ExitStack() as last, ExitStack() as stack:
            last.callback(self._finish)
            first = self._begin(todo, 0)
            self._try(first, lambda: self._open_baseline(stack, first, todo[0]))
            if first.status != "ok":
                stack.close()  # nothing is measured beside it: its memory is for the others
            todo += more(self.model.get("dtype", "float32")) if todo[0] is None else []
            if len(todo) > 1:
                self._pace.begin(first.recipe, len(todo) - 1)
                self._try(first, self._make_room)
            for index in range(1, len(todo)):
                row = self._begin(todo, index)
                self._try(row, partial(self._measure, row))
                self._pace.finish()
            if not self._apart:
                self._pace.begin(first.recipe, 0)
                self._try(first, self._baseline_alone)

    def _begin(self, todo: Sequence[str | None], index: int) -> Row:
        name = todo[index] or "the checkpoint as it is"
        place = f"{index + 1}/{len(todo)} " if len(todo) > 1 else ""
        self._pace.begin(f"{place}{name}", len(todo) - 1 - index)
        self.rows.append(Row(name, baseline=index == 0))
        return self.rows[-1]

    def _finish(self) -> None:
        """Figures of the baseline, which every recipe added to; and what disturbed them."""
        if self._baseline:
            self._baseline.fill(self.work, [], self._bandwidth)
        for row in self.rows:
            row.notes += noise(row.figures)

    def _try(self, row: Row, measure: Callable[[], None]) -> None:
        """Run it; a child's failure becomes the row's reason, and the rest goes on."""
        try:
            measure()
        except ChildError as error:
            if isinstance(error, InputError) and len(self.rows) == 1:
                raise
            row.status = "partial" if row.load_s is not None else "failed"
            row.reason = str(error)
        except KeyboardInterrupt:
            row.status = "partial" if row.load_s is not None else "failed"
            row.reason = "interrupted"
            raise

    # --- one side ---------------------------------------------------------------------------

    def _open(self, stack: ExitStack, row: Row, recipe: str | None) -> Side:
        """Start a child and load the model with the recipe."""
        left = self._pace.left()
        if left is not None and left <= 0:
            self.in_full = False
            raise ChildError("no time was left; give a larger --budget or fewer recipes")
        child = stack.enter_context(Child(self.request.threads, self.request.seed))
        side = Side(child, row, self.request, self._folder)
        self._pace.say("loading")
        provenance = side.load(recipe)
        if not self.model:
            self.model = provenance
            if not self.work.batch_sizes:
                sizes = DEFAULT_BATCH_SIZES[self.model["kind"]]
                self.work = replace(self.work, batch_sizes=sizes)
        return side

    def _look(self, side: Side) -> None:
        """Memory and cost of one pass, then quality and prompts."""
        self._pace.say("memory")
        side.warm_up(self.work)
        if not side.has_text:
            side.row.notes.append(NO_TOKENIZER)
        else:
            if self.request.quality_tokens and (side is self._baseline or self.measured):
                self._pace.say("quality")
                self._quality(side)
            if self.request.prompts:
                self._prompts(side)
        side.warm_generate(self.work)

    def _prompts(self, side: Side) -> None:
        left = self._pace.left()
        if left is not None and left <= 0:
            self.in_full = False
            side.row.notes.append(f"prompts left out, {BUDGET}")
            return
        self._pace.say("prompts")
        side.prompts(self.work.new_tokens)

    def _quality(self, side: Side) -> None:
        """On all of the baseline's tokens, or on as many as a slow recipe has time for."""
        asked, write = self.request.quality_tokens, side is self._baseline
        share = self._pace.share()
        cost = side.costs[str(self.work.batch_sizes[0])]
        tokens = asked
        if share is not None and "prefill" in cost:
            affordable = QUALITY_PART * share * self.work.prompt_tokens / cost["prefill"]
            whole = int(affordable) // LEAST_QUALITY * LEAST_QUALITY
            tokens = min(asked, max(LEAST_QUALITY, whole))
        measured = side.quality(self.work, tokens, write)
        if write:
            self.measured = measured
            if tokens < asked:
                self.in_full = False
                side.row.notes.append(f"quality from {tokens} of {asked} tokens of text, {BUDGET}")
        elif measured != self.measured:
            self.in_full = False
            few, all_ = measured["scored_tokens"], self.measured["scored_tokens"]
            side.row.notes.append(f"quality on {few} of {all_} tokens, {BUDGET}")

    # --- the baseline -----------------------------------------------------------------------

    def _open_baseline(self, stack: ExitStack, row: Row, recipe: str | None) -> None:
        side = self._open(stack, row, recipe)
        self._baseline = side
        self._tolerance = side.write_reference()
        self._look(side)

    def _make_room(self) -> None:
        """Where memory does not hold two models, measure the baseline now and let it go."""
        side = self._baseline
        if side is None or memory_for_two(self.model["parameters"], self.request.device):
            return
        self._baseline_alone()
        side.child.close()
        self._apart = True
        side.row.notes.append(APART)

    def _baseline_alone(self) -> None:
        """Rounds of the baseline by itself, as many as are missing."""
        side = self._baseline
        if side is None or side.row.status != "ok" or len(side.rounds) >= self.request.runs:
            return
        todo = self._plan([side])
        for number in range(len(side.rounds), todo.rounds):
            self._pace.say(f"round {number + 1} of {todo.rounds}")
            side.rounds.append(self._round([side], todo.workload)[side])

    # --- the recipes ------------------------------------------------------------------------

    def _measure(self, row: Row) -> None:
        with ExitStack() as stack:
            side = self._open(stack, row, row.recipe)
            if self._tolerance is not None:
                self._pace.say("verifying")
                side.verify(self._tolerance)
            self._look(side)
            beside = self._baseline.rounds if self._baseline and self._apart else []
            try:
                self._rounds(side, beside)
            finally:
                side.fill(self.work, beside, self._bandwidth)

    def _rounds(self, side: Side, beside: list[Round]) -> None:
        """Rounds of the recipe and of the baseline, taking turns to be first.

        The baseline's go to `beside`, unless it was measured before.
        """
        base = self._baseline
        if self._apart or (base is not None and base.row.status != "ok"):
            base = None
        sides = [side] if base is None else [base, side]
        todo = self._plan(sides)
        for number in range(todo.rounds):
            self._pace.say(f"round {number + 1} of {todo.rounds}")
            done = self._round(sides if number % 2 == 0 else sides[::-1], todo.workload)
            side.rounds.append(done[side])
            if base is not None and base in done:
                beside.append(done[base])
                base.rounds.append(done[base])
            else:
                sides = [side]

    def _round(self, sides: list[Side], work: Workload) -> dict[Side, Round]:
        """One round of each side, part by part in turn; without a baseline that dies meanwhile."""
        seconds: dict[Side, dict[str, float]] = {side: {} for side in sides}
        for part in sides[0].parts:
            for side in list(seconds):
                try:
                    seconds[side] |= side.sample(work, part)
                except ChildError as error:
                    if side is not self._baseline or len(sides) == 1:
                        raise
                    side.row.status, side.row.reason = "partial", str(error)
                    del seconds[side]
        return {side: Round(work, parts) for side, parts in seconds.items()}

    def _plan(self, sides: list[Side]) -> Plan:
        """Rounds that fit; what the last of `sides` does not get is said."""
        runs = self.request.runs
        todo = plan(self.work, runs, [side.costs for side in sides], self._pace.share())
        self._pace.expect(todo.seconds)
        self.in_full &= todo.workload == self.work and todo.rounds == runs
        if todo.rounds < runs:
            sides[-1].row.notes.append(f"{todo.rounds} of {runs} rounds, {BUDGET}")
        return todo


def memory_for_two(parameters: int, device: str | None) -> bool:
    """Whether a second model, at most in float32, fits beside the baseline."""
    if device is not None and device.startswith("cuda"):
        available = torch.cuda.mem_get_info(torch.device(device))[0]
    else:
        available = machine.describe().memory_available
    return available > 1.2 * FP32_BYTES * parameters
