"""What fits of training: a setting, its largest micro-batch, and what would let more rows fit."""

from __future__ import annotations

from dataclasses import replace

from featherweight.anatomy import candidates
from featherweight.anatomy.candidates import Candidate
from featherweight.anatomy.result import Memory
from featherweight.anatomy.work import Work
from featherweight.errors import FeatherweightError
from featherweight.fitting.commands import training_code
from featherweight.fitting.dry_runs import DryRuns
from featherweight.fitting.facts import Facts
from featherweight.fitting.result import Gain, TrainingFit, Tried
from featherweight.fitting.search import MOST, largest_batch, largest_divisor
from featherweight.recipe import Recipe

GAINS = 2  # changes that are looked for
GIB = 1 << 30


def fit_training(
    runs: DryRuns,
    limit: int,
    source: str,
    recipe: Recipe | None,
    work: Work,
    batch_size: int | None,
) -> TrainingFit:
    """See `featherweight.fit`; `work` says all but the batch.

    With `batch_size`, the first setting is taken whose micro-batches can add up to it. Without, the
    largest micro-batch is looked for: of the recipe, or of the first setting of which a row fits.
    """
    return _Training(runs, limit, source, work).fit(recipe, batch_size)


class _Training:
    def __init__(self, runs: DryRuns, limit: int, source: str, work: Work) -> None:
        self.runs, self.limit, self.source, self.work = runs, limit, source, work
        self.facts = Facts(runs.asked)
        self.tried: list[Tried] = []
        self.notes: list[str] = []

    def fit(self, recipe: Recipe | None, batch: int | None) -> TrainingFit:
        chosen, fits = self._first_that_fits(self._settings(recipe), batch or 1)
        gains: list[Gain] = []
        if batch is None:
            rows = self._most(chosen) if fits else 0
            beyond = rows + 1 if fits and rows < MOST else None
            gains = self._gains(chosen, rows)
        elif fits:
            rows = largest_divisor(
                lambda n: self._try(chosen, n, batch // n).peak.process, self.limit, batch
            )
            beyond = min((n for n in range(rows + 1, batch + 1) if batch % n == 0), default=None)
        else:
            rows, beyond = 0, None
        return self._result(chosen, rows, batch or rows, beyond, gains)

    def _settings(self, recipe: Recipe | None) -> list[Candidate]:
        if recipe is not None:
            return [Candidate("as asked", recipe, self.work, "")]
        return candidates.training(
            self.work,
            self.runs.on_gpu,
            half=self.runs.asked.half,
            has_sdpa=self.runs.asked.has_sdpa,
        )

    def _first_that_fits(self, settings: list[Candidate], batch: int) -> tuple[Candidate, bool]:
        """The first setting of which one row fits; else the one that comes nearest, and False."""
        seen: list[tuple[Candidate, Memory]] = []
        refused: FeatherweightError | None = None
        for setting in settings:
            least = max((_least(setting, *other) for other in seen), default=0)
            if least + self.runs.asked.base > self.limit:
                what = f"at least {(least + self.runs.asked.base) / GIB:.1f} GiB"
                self._note(setting, 1, batch, None, what)
                continue
            try:
                found = self._try(setting, 1, batch)
            except FeatherweightError as error:
                refused = refused or error
                self._note(setting, 1, batch, None, error.message)
                continue
            seen.append((setting, found))
            if found.peak.process <= self.limit and self._loading(setting) <= self.limit:
                return setting, True
        if not seen and refused:
            raise refused
        if not seen:
            raise FeatherweightError(
                f"nothing can fit into {self.limit / 2**20:,.0f} MiB: the process takes"
                f" {self.runs.asked.base / 2**20:,.0f} MiB before it has a tensor",
                hint="allow more with --memory",
            )
        return min(seen, key=lambda pair: pair[1].peak.process)[0], False

    def _loading(self, setting: Candidate) -> int:
        """Bytes of the process while loading."""
        weights = self.facts.weights(setting.recipe, 1)[0]
        return self.runs.asked.base + weights + self.facts.loading(setting.recipe)

    def _run(self, setting: Candidate, rows: int, accumulate: int = 1) -> Memory:
        steps = min(accumulate, 2)  # all further ones are like the second
        work = replace(setting.work, batch_size=rows, accumulate=steps)
        return self.runs(setting.recipe, work)

    def _try(self, setting: Candidate, rows: int, accumulate: int) -> Memory:
        """Run it, and remember that."""
        found = self._run(setting, rows, accumulate)
        self._note(setting, rows, accumulate, found.peak.process)
        return found

    def _note(
        self, setting: Candidate, rows: int, steps: int, peak: int | None, reason: str | None = None
    ) -> None:
        fits = peak is not None and peak <= self.limit
        recipe, optimizer = str(setting.recipe), setting.work.optimizer
        self.tried.append(
            Tried(setting.label, recipe, optimizer, rows, steps, peak, fits, setting.cost, reason)
        )

    def _most(self, setting: Candidate, start: int = 1) -> int:
        return largest_batch(lambda rows: self._run(setting, rows).peak.process, self.limit, start)

    def _gains(self, chosen: Candidate, rows: int) -> list[Gain]:
        """The first changes that let more rows fit, with how many."""
        found: list[Gain] = []
        for change in candidates.changes(
            chosen.recipe,
            chosen.work,
            self.runs.asked.config,
            self.runs.on_gpu,
            half=self.runs.asked.half,
            has_sdpa=self.runs.asked.has_sdpa,
        ):
            if len(found) == GAINS or rows == MOST:
                break
            try:
                most = self._most(change, rows + 1)
                if not most or self._loading(change) > self.limit:
                    continue
            except FeatherweightError as error:
                self.notes.append(f"{change.label} was not tried: {error.message}")
                continue
            work = replace(change.work, batch_size=most)
            peak = self._run(change, most).peak.process
            found.append(
                Gain(
                    change.label,
                    str(change.recipe),
                    work.optimizer,
                    work.described(),
                    change.cost,
                    most,
                    peak,
                )
            )
        return found

    def _result(
        self, chosen: Candidate, rows: int, batch: int, beyond: int | None, gains: list[Gain]
    ) -> TrainingFit:
        steps = batch // rows if rows else max(1, batch)
        found = self._run(chosen, rows or 1, steps)
        more = self._run(chosen, beyond, batch // beyond or 1) if beyond else None
        work = replace(chosen.work, batch_size=rows or 1, accumulate=steps)
        setting = replace(chosen, work=work)
        asked = self.runs.asked
        return TrainingFit(
            model=asked.model,
            device=found.device,
            memory=self.limit,
            memory_source=self.source,
            recipe=str(chosen.recipe),
            optimizer=work.optimizer,
            workload=work.described(),
            cost=chosen.cost,
            seq_len=work.seq_len,
            batch_size=rows,
            accumulate=steps,
            peak=found.peak.process,
            load_peak=self._loading(chosen),
            more=beyond,
            more_peak=more.peak.process if more else None,
            categories=found.categories,
            base=found.base,
            reserved=found.peak.reserved - found.peak.allocated,
            tried=self.tried,
            gains=gains,
            code=training_code(self.runs, setting, self.facts) if rows else None,
            notes=[*self.runs.notes, *self.facts.notes, *self.notes],
            versions=found.versions,
            dry_runs=self.runs.count,
        )


def _least(setting: Candidate, other: Candidate, found: Memory) -> int:
    """Bytes that `setting` needs at least, by what the other one was seen to hold.

    Another optimizer changes states, and what its own step needs; checkpointing all that is neither
    weights, nor gradients, nor states. Nothing is known of other weights.
    """
    one, two = (
        [candidates.has(each.recipe, slot) for slot in ("dtype", "weights", "adapter")]
        for each in (setting, other)
    )
    if one != two:
        return 0
    kept = set(found.categories)
    if setting.recipe != other.recipe:
        kept &= {"weights", "gradients", "optimizer state"}
    if setting.work.optimizer != other.work.optimizer:
        kept -= {"optimizer state"} | ({"temporaries"} if found.phase == "optimizer" else set())
    return sum(found.categories[kind] for kind in kept)
