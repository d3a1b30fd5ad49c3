"""What every writer says about a prediction of memory: sentences and tables, in plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from featherweight.anatomy.gpus import find
from featherweight.anatomy.result import Memory, Moment
from featherweight.report.words import GIB, MIB, MISSING, _parameters, one_line, size

if TYPE_CHECKING:
    from featherweight.anatomy.measured import Measured
    from featherweight.anatomy.what_if import Change

LARGEST = 12  # holders that a table names
METER = 24  # characters of a bar
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Grid:
    """A table; the columns in `right` hold numbers."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    right: frozenset[int] = frozenset()
    empty: str = "nothing"  # said where there are no rows
    meter: int = 0  # above 0: the last column is a bar of at most so many characters
    commands: tuple[str, ...] = ()  # what to run, one for each row


def amount(nbytes: int) -> str:
    """Bytes in MiB or GiB; what would round to nothing does not claim to be nothing."""
    return "<0.01 MiB" if 0 < abs(nbytes) < 0.005 * MIB else size(nbytes)


def percent(share: float) -> str:
    """A share of 1 as a percentage with its sign."""
    return "<0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


# --- sentences -----------------------------------------------------------------------------


def board(memory: Memory) -> int | None:
    """Bytes on the board of the GPU that was asked about; None on a CPU."""
    return None if memory.device == "cpu" else find(memory.device).memory


def seen(memory: Memory) -> str:
    """Where the figure would be seen, and whether it fits."""
    has = board(memory)
    if has is None:
        return "as the system monitor would show it, on the CPU"
    share = f"{100 * memory.peak.process / has:.0f} % of" if fits(memory) else "more than"
    return f"as nvidia-smi would show it: {share} the {has / GIB:.3g} GiB of {memory.device}"


def fits(memory: Memory) -> bool:
    """Whether it is at most what the GPU has; True on a CPU."""
    has = board(memory)
    return has is None or memory.peak.process <= has


def subject(memory: Memory) -> str:
    """Model, recipe and workload."""
    name = f"{one_line(memory.model)} ({parameters(memory)})"
    return f"{name}, {one_line(memory.recipe)}, {memory.workload}"


def parameters(memory: Memory) -> str:
    """How many there are."""
    return f"{_parameters(memory.parameters)}"


def split(memory: Memory) -> str:
    """What the figure is made of, and when it is reached."""
    peak = memory.peak
    parts = [f"tensors {amount(peak.allocated)}"]
    if memory.device == "cpu":
        if peak.reserved > peak.allocated:
            parts.append(f"kept by malloc besides {amount(peak.reserved - peak.allocated)}")
        parts.append(f"Python and libraries {amount(memory.base)}")
    else:
        parts.append(f"reserved for them {amount(peak.reserved)}")
        parts.append(f"CUDA context {amount(memory.base)}")
    return f"{', '.join(parts)}; the peak is in {memory.phase}"


def makeup(memory: Memory) -> str:
    """The categories at the peak, largest first."""
    found = sorted(memory.categories.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {amount(nbytes)}" for name, nbytes in found)


def remarks(memory: Memory) -> list[str]:
    """What a reader must know besides."""
    kernels = [f"attention kernels: {', '.join(memory.attention)}"] if memory.attention else []
    return [*(one_line(note) for note in memory.notes), *kernels]


def made_with(memory: Memory) -> str:
    """The versions whose program was run dry."""
    return ", ".join(f"{name} {version}" for name, version in memory.versions.items())


# --- tables --------------------------------------------------------------------------------


def categories(memory: Memory) -> Grid:
    """Bytes of each category at the peak, and their sum."""
    whole = memory.peak.allocated
    rows = [
        (name, amount(nbytes), percent(nbytes / whole))
        for name, nbytes in memory.categories.items()
    ]
    rows.append(("tensors", amount(whole), percent(1)))
    return Grid("at the peak", ("category", "size", "share"), rows, frozenset({1, 2}))


def largest(memory: Memory, count: int = LARGEST) -> Grid:
    """What holds most at the peak."""
    rows = [
        (
            one_line(holder.module) or MISSING,
            holder.operation or MISSING,
            holder.category,
            amount(holder.nbytes),
            f"{holder.count:,}",
        )
        for holder in memory.holders[:count]
    ]
    heads = ("module", "made by", "category", "size", "tensors")
    return Grid("largest at the peak", heads, rows, frozenset({3, 4}))


def phases(memory: Memory) -> Grid:
    """The most that was allocated in each phase."""
    most = max(memory.phases.values(), default=0)
    rows = [
        (name, amount(nbytes), "█" * round(METER * nbytes / most) if most else "")
        for name, nbytes in memory.phases.items()
    ]
    return Grid("peak of each phase", ("phase", "tensors", ""), rows, frozenset({1}), meter=METER)


def what_if(changes: Sequence[Change]) -> Grid:
    """What each change would save."""
    rows = [
        (
            one_line(change.label),
            amount(change.saved),
            amount(change.memory.peak.process),
            one_line(change.cost),
        )
        for change in changes
    ]
    return Grid(
        "what would save memory",
        ("what if", "saves", "leaves", "cost"),
        rows,
        frozenset({1, 2}),
        empty="nothing that is known would",
        commands=tuple(one_line(change.command) for change in changes),
    )


def beside(memory: Memory, measured: Measured) -> Grid:
    """Prediction and measurement, and the error of the prediction; only what was measured."""
    peak = memory.peak
    figures = (
        ("tensors", peak.allocated, measured.allocated),
        ("reserved", peak.reserved, measured.reserved),
        ("resident", peak.allocated, measured.resident),
        ("process", peak.process, measured.process),
    )
    rows = [
        (name, amount(predicted), amount(real), f"{100 * (predicted / real - 1):+.1f} %")
        for name, predicted, real in figures
        if real
    ]
    note = f"; {one_line(measured.note)}" if measured.note else ""
    title = f"measured on {measured.device} in {measured.seconds:.1f} s{note}"
    return Grid(title, ("figure", "predicted", "measured", "error"), rows, frozenset({1, 2, 3}))


# --- the course of it ----------------------------------------------------------------------


def stretches(timeline: list[Moment]) -> list[tuple[str, int]]:
    """Phases in the order in which they follow one another, each with its number of moments."""
    return [(name, len(list(run))) for name, run in groupby(timeline, lambda m: m.phase)]


def sparkline(memory: Memory, width: int = 72) -> list[str]:
    """The tensors over time in bars, and the phases below; nothing without a timeline."""
    moments = memory.timeline
    width = min(width, len(moments))
    if not width:
        return []
    edges = [i * len(moments) // width for i in range(width + 1)]
    parts = [moments[start:end] for start, end in pairwise(edges)]
    most = max(moment.allocated for moment in moments) or 1
    highest = [max(part, key=lambda moment: moment.allocated) for part in parts]
    bars = "".join(_BARS[-(-8 * moment.allocated // most)] for moment in highest)
    ruler = "".join(_mark(*stretch) for stretch in stretches([part[0] for part in parts]))
    return [bars, ruler.rstrip()]


def _mark(name: str, width: int) -> str:
    """The beginning of a phase and its name, as much of it as there is room for."""
    if len(name) >= width > 4:
        name = f"{name[: width - 2]}…"
    return f"│{name}"[:width].ljust(width)
