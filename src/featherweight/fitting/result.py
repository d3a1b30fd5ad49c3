"""What fits, as data. Sizes in bytes; peaks are of the process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One recipe at one context."""

    recipe: str
    fits: bool
    weights: int | None = None  # None: the model cannot have the recipe
    peak: int | None = None  # at work; None: not run, as the weights alone are too much
    load_peak: int | None = None  # while loading
    kv_cache: int | None = None  # at the end of the context
    context: int | None = None  # tokens: the most that was seen to fit; None: not looked for
    read: int | None = None  # that a step of decoding reads: weights and cache
    tokens_per_s: float | None = None  # at most, all sequences together: what reading allows
    missing: int = 0  # by which it does not fit, at least
    reason: str | None = None  # why it does not fit
    attention: list[str] = field(default_factory=list)  # kernels, on a GPU
    command: str | None = None  # that runs it


@dataclass(frozen=True)
class Fit:
    """Recipes under a limit of memory: those that fit first, the least to read first."""

    model: str
    device: str
    memory: int  # allowed
    memory_source: str
    workload: str
    context: int
    context_source: str
    longest: int | None  # tokens that the model was made for
    batch_size: int
    bandwidth: float | None  # bytes a second that this machine's CPU reads
    rows: list[Row]
    notes: list[str]
    versions: dict[str, str]

    @property
    def fits(self) -> bool:
        """Whether any recipe does."""
        return any(row.fits for row in self.rows)

    @property
    def best(self) -> Row | None:
        """The fastest that fits; None if none does."""
        return next((row for row in self.rows if row.fits), None)

    @property
    def nearest(self) -> Row | None:
        """Of those that were run, the one with the least missing."""
        run = [row for row in self.rows if row.peak is not None]
        return min(run, key=lambda row: row.missing, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"schema": 1, "kind": "inference", "fits": self.fits} | asdict(self)

    def __str__(self) -> str:
        from featherweight.report.fit import render

        return render(self, "human")


@dataclass(frozen=True)
class Tried:
    """A setting that was considered; `peak` is None where it was not run, for `reason`."""

    label: str
    recipe: str
    optimizer: str
    batch_size: int
    accumulate: int
    peak: int | None
    fits: bool
    cost: str
    reason: str | None = None


@dataclass(frozen=True)
class Gain:
    """One change, the micro-batch that it lets fit, and the peak of that."""

    label: str
    recipe: str
    optimizer: str
    workload: str
    cost: str
    batch_size: int
    peak: int


@dataclass(frozen=True)
class TrainingFit:
    """A setting to train with, and how many rows fit."""

    model: str
    device: str
    memory: int  # allowed
    memory_source: str
    recipe: str
    optimizer: str
    workload: str
    cost: str  # of the setting, if it was not asked for
    seq_len: int
    batch_size: int  # rows of a micro-batch; 0: none fits
    accumulate: int
    peak: int  # at that batch; of one row, if none fits
    load_peak: int
    more: int | None  # rows that do not fit any more; None where as many as wanted do
    more_peak: int | None  # with so many
    categories: dict[str, int]  # at the peak
    base: int  # of the process without tensors
    reserved: int  # by the allocator beyond tensors
    tried: list[Tried]
    gains: list[Gain]
    code: str | None  # that trains so; None if nothing fits
    notes: list[str]
    versions: dict[str, str]
    dry_runs: int

    @property
    def fits(self) -> bool:
        """Whether one row does, at least."""
        return self.batch_size > 0

    @property
    def missing(self) -> int:
        """By how much it does not fit."""
        return max(0, max(self.peak, self.load_peak) - self.memory)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"schema": 1, "kind": "training", "fits": self.fits} | asdict(self)

    def __str__(self) -> str:
        from featherweight.report.fit import render

        return render(self, "human")
