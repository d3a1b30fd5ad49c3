"""`fw.fit`: which recipes fit into a memory, with how long a context, and what runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from featherweight.anatomy import candidates
from featherweight.anatomy.asked import ask
from featherweight.anatomy.result import Memory
from featherweight.anatomy.work import Work
from featherweight.errors import FeatherweightError
from featherweight.fitting.commands import command
from featherweight.fitting.dry_runs import DryRuns, Progress
from featherweight.fitting.dry_runs import limit as allowed
from featherweight.fitting.facts import Facts
from featherweight.fitting.result import Fit, Row, TrainingFit
from featherweight.fitting.search import longest
from featherweight.recipe import Recipe

DEFAULT_CONTEXT = 4096  # tokens, where the model can hold as many
NEW_TOKENS = 128  # of a context; the rest is the prompt, whose pass needs the most memory


def fit(
    model: Any,
    *,
    memory: int | str | None = None,
    ctx: int | None = None,
    batch_size: int | None = None,
    train: bool = False,
    seq_len: int | None = None,
    recipe: str | Recipe | None = None,
    task: str | None = None,
    optimizer: str | None = None,
    mixed_precision: str | None = None,
    gpu: str | None = None,
    cuda_context: int | None = None,
    torch_version: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Fit | TrainingFit:
    """Find what fits into a memory, by dry runs.

    Args:
        model: a name or folder (only its config is read), a config, or a model.
        memory: bytes, or a size such as `"12GiB"`; by default what is available on this machine,
            or all that the GPU has.
        ctx: tokens of prompt and answer together; by default 4,096, or what the model was made for
            if that is less. Of a model that does not write, tokens of one pass.
        batch_size: sequences at once, by default 1; in training those of one step, which may be
            accumulated from micro-batches: without it, the largest micro-batch is looked for.
        train: training, with `seq_len` (512), `task`, `optimizer` and `mixed_precision` as of
            `featherweight.memory`.
        recipe: this one alone; without it, all that are worth knowing.
        gpu, cuda_context, torch_version, revision, trust_remote_code: as of `featherweight.memory`.
        progress: called with what is being done.

    Returns a `Fit`, or with `train` a `TrainingFit`.

    Raises ModelError for a model that is unknown or cannot be built, RecipeError, and
    FeatherweightError for an impossible request.
    """
    chosen = Recipe.parse(recipe) if recipe is not None else None
    training: dict[str, Any] = {
        "seq_len": seq_len,
        "optimizer": optimizer,
        "mixed_precision": mixed_precision,
    }
    _refuse(train, {"ctx": ctx}, training)
    asked = ask(
        model,
        chosen,
        task=task,
        gpu=gpu,
        cuda_context=cuda_context,
        torch_version=torch_version,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    limit, source = allowed(memory, asked.gpu)
    runs = DryRuns(asked, progress)
    if batch_size is not None and batch_size < 1:
        raise FeatherweightError(f"batch_size is {batch_size}", hint="give 1 or more")
    if not train:
        return _Inference(runs, limit, source, ctx, batch_size or 1).fit(chosen)
    from featherweight.fitting.training import fit_training

    work = replace(Work("train"), **{name: v for name, v in training.items() if v is not None})
    return fit_training(runs, limit, source, chosen, work, batch_size)


def _refuse(train: bool, inference: dict[str, Any], training: dict[str, Any]) -> None:
    """What would be ignored."""
    for name, value in (inference if train else training).items():
        if value is not None:
            kind, other = ("inference", "training") if train else ("training", "inference")
            hint = "leave train out" if train else "give train=True too"
            raise FeatherweightError(f"{name} is of {kind}, and this is {other}", hint=hint)


class _Inference:
    """The recipes of one model, each tried at one context."""

    def __init__(
        self, runs: DryRuns, limit: int, source: str, context: int | None, batch_size: int
    ) -> None:
        self.runs, self.limit, self.source, self.batch = runs, limit, source, batch_size
        self.facts = Facts(runs.asked)
        self.given = context is not None
        most = self.facts.longest
        self.context = min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT) if context is None else context
        if self.context < 2:
            raise FeatherweightError(f"ctx is {context}", hint="give 2 tokens or more")
        self.bandwidth: float | None = None
        self.notes: list[str] = []

    def fit(self, chosen: Recipe | None) -> Fit:
        if not self.runs.on_gpu and self.facts.writes:
            self._measure_bandwidth()
        rows = self._rows(chosen)
        if not any(row.fits for row in rows):
            rows = self._with_the_nearest_run(rows)
        rows.sort(key=lambda row: (not row.fits, row.missing, row.read or row.weights or 0))
        return Fit(
            model=self.runs.asked.model,
            device=self.runs.asked.gpu.name if self.runs.asked.gpu else "cpu",
            memory=self.limit,
            memory_source=self.source,
            workload=self._work(self.context).described(),
            context=self.context,
            context_source=self._context_source(),
            longest=self.facts.longest,
            batch_size=self.batch,
            bandwidth=self.bandwidth,
            rows=rows,
            notes=self._notes(rows),
            versions=self.facts.versions,
        )

    def _rows(self, chosen: Recipe | None) -> list[Row]:
        """Of the recipe that was asked for, or else of those worth knowing."""
        if chosen is not None:
            return [self._row(chosen)]
        rows, refused = [], []
        config, half = self.runs.asked.config, self.runs.asked.half
        for text in candidates.inference(config, self.runs.on_gpu, half=half):
            try:
                rows.append(self._row(Recipe.parse(text)))
            except FeatherweightError as error:
                refused.append(error)
                rows.append(Row(text, fits=False, missing=self.limit, reason=error.message))
        if len(refused) == len(rows):
            raise refused[0]
        return rows

    def _row(self, recipe: Recipe, *, in_any_case: bool = False) -> Row:
        """What the recipe needs; it is run dry unless the weights alone are too much."""
        weights, read = self.facts.weights(recipe, self.batch)
        least = self.runs.asked.base + weights
        load = least + self.facts.loading(recipe)
        if least > self.limit and not in_any_case:
            reason = "not run: the weights alone are too much"
            return Row(str(recipe), False, weights, load_peak=load, context=0,
                       missing=load - self.limit, reason=reason)  # fmt: skip
        found = self.runs(recipe, self._work(self.context))
        peak = found.peak.process
        missing = max(0, max(peak, load) - self.limit)
        cache = self._cache(found) if self.facts.writes else None
        step = read + cache if read is not None and cache is not None else None
        reason = "loading needs more" if load > peak else "the peak is higher"
        return Row(
            recipe=str(recipe),
            fits=not missing,
            weights=weights,
            peak=peak,
            load_peak=load,
            kv_cache=cache,
            context=0 if load > self.limit else self._longest(recipe, found),
            read=step,
            tokens_per_s=self.batch * self.bandwidth / step if self.bandwidth and step else None,
            missing=missing,
            reason=reason if missing else None,
            attention=found.attention,
            command=command(self.runs, recipe, self.facts),
        )

    def _with_the_nearest_run(self, rows: list[Row]) -> list[Row]:
        """Where nothing fits, what comes nearest is run, to say what it would take."""
        known = [row for row in rows if row.weights is not None]
        nearest = min(known, key=lambda row: row.missing)
        if nearest.peak is not None:
            return rows
        again = self._row(Recipe.parse(nearest.recipe), in_any_case=True)
        return [again if row is nearest else row for row in rows]

    def _work(self, context: int) -> Work:
        if not self.facts.writes:
            return Work("forward", batch_size=self.batch, seq_len=context)
        new = _new(context)
        return Work("generate", batch_size=self.batch, prompt_tokens=context - new, new_tokens=new)

    def _longest(self, recipe: Recipe, found: Memory) -> int:
        """The most tokens that were seen to fit."""
        fixed = found.peak.process - found.peak.allocated
        fixed += sum(found.categories.get(kind, 0) for kind in ("weights", "workspace"))
        return longest(
            lambda tokens: self.runs(recipe, self._work(max(2, tokens))).peak.process,
            (self.context, found.peak.process),
            fixed,
            self.limit,
            max(self.facts.longest or 0, self.context),
        )

    def _cache(self, found: Memory) -> int:
        """Bytes of the KV cache at the end."""
        held = [(moment.phase, moment.categories.get("KV cache", 0)) for moment in found.timeline]
        if self.facts.two_sided:
            return max(nbytes for _, nbytes in held)
        whole = max((nbytes for phase, nbytes in held if phase == "prefill"), default=0)
        return whole * self.context // (self.context - _new(self.context))

    def _measure_bandwidth(self) -> None:
        from featherweight import machine

        self.runs.tell("measuring how fast this machine reads")
        rates = machine.probe()
        self.notes += rates.notes
        self.bandwidth = rates.peak_bandwidth.value * 1e9

    def _context_source(self) -> str:
        if self.given:
            return "as asked"
        return (
            "the most that the model was made for"
            if self.context == self.facts.longest
            else "by default"
        )

    def _notes(self, rows: list[Row]) -> list[str]:
        notes = [*self.notes, *self.runs.notes, *self.facts.notes]
        if not self.runs.on_gpu:
            notes.append("weights that are mapped from a file count as resident")
        if not self.runs.on_gpu and any(row.fits for row in rows) and self.facts.has_fast_path:
            notes.append(
                "'+fastpath' has the same weights and cache and decodes faster; what it takes"
                " besides is not predicted"
            )
        return list(dict.fromkeys(notes))


def _new(context: int) -> int:
    """Tokens of a context that are written, not read."""
    return min(NEW_TOKENS, context // 2)
