"""What fits, as text: for people, for issues (Markdown), for programs (JSON), for sheets (CSV)."""

from __future__ import annotations

import csv
import io
import json
import shlex
from dataclasses import asdict, fields
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from featherweight.errors import FeatherweightError
from featherweight.fitting.commands import hub_id
from featherweight.fitting.result import Fit, Gain, Row, TrainingFit, Tried
from featherweight.report import FORMATS
from featherweight.report.markdown import escape
from featherweight.report.memory import pipes, printed
from featherweight.report.memory_tables import Grid, amount
from featherweight.report.words import MISSING, decimals, one_line

HEADS = ("recipe", "fits", "peak", "loading", "weights", "longest", "read", "t/s ≤")
SMALL = 0.005  # share of the peak
_COLUMNS = tuple(field.name for field in fields(Row))
_TRAINING = ("kind", *(field.name for field in fields(Tried)))


def render(
    found: Fit | TrainingFit, format: str, *, width: int | None = None, color: bool = False
) -> str:
    """`found` in one of `report.FORMATS`, without a line end at the end.

    `width` (columns; None: the terminal's, else 80) and `color` concern "human" only.
    """
    if format == "human":
        return _human(found, width, color)
    if format == "md":
        return _markdown(found)
    if format == "json":
        return json.dumps(found.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    if format == "csv":
        return _csv(found)
    raise FeatherweightError(
        f"unknown report format {format!r}", hint=f"choose one of {', '.join(FORMATS)}"
    )


# --- what every format for people says -------------------------------------------------------


def subject(found: Fit | TrainingFit) -> list[str]:
    """Model, memory, device and work."""
    where = "the CPU" if found.device == "cpu" else found.device
    allowed = f"{amount(found.memory)} ({found.memory_source}) on {where}"
    lines = [f"{one_line(found.model)} in {allowed}"]
    if isinstance(found, Fit):
        lines.append(f"{found.workload}: {found.context:,} in all, {found.context_source}")
    else:
        lines.append(f"{found.recipe}, {found.workload}")
    return lines


def verdict(found: Fit | TrainingFit) -> str:
    """The answer in a line."""
    if isinstance(found, TrainingFit):
        return _rows_that_fit(found)
    if found.best:
        return f"fastest that fits: {found.best.recipe}"
    nearest = found.nearest
    if nearest is None:
        return "nothing fits"
    needs = max(nearest.peak or 0, nearest.load_peak or 0)
    said = f"nothing fits: {nearest.recipe} comes nearest with {amount(needs)}"
    said += f", {amount(nearest.missing)} too much"
    if nearest.context:
        said += f"; it fits with a context of {nearest.context:,} tokens"
    return said


def _rows_that_fit(found: TrainingFit) -> str:
    if not found.fits:
        return (
            f"nothing fits: with one row, {found.recipe} needs"
            f" {amount(max(found.peak, found.load_peak))}, {amount(found.missing)} too much"
        )
    said = f"micro-batch {found.batch_size}"
    said += f", accumulated {found.accumulate} times" if found.accumulate > 1 else ""
    said += f": peak {amount(found.peak)}"
    if found.more and found.more_peak:
        said += f"; {found.more} would need {amount(found.more_peak)}"
    return said


def makeup(found: TrainingFit) -> str:
    """What fills the memory, largest first; what is small in one."""
    base = "Python and libraries" if found.device == "cpu" else "CUDA context"
    parts = {**found.categories, "reserved beyond tensors": found.reserved, base: found.base}
    large = {name: n for name, n in parts.items() if n >= SMALL * found.peak}
    rest = sum(parts.values()) - sum(large.values())
    listed = sorted(large.items(), key=lambda item: -item[1]) + ([("rest", rest)] if rest else [])
    return "filled by " + ", ".join(f"{name} {amount(n)}" for name, n in listed)


def commands(found: Fit | TrainingFit) -> list[str]:
    """What to run, a line each."""
    if isinstance(found, TrainingFit):
        lines = (found.code or "").splitlines()
    else:
        lines = (found.best.command or "").splitlines() if found.best else []
        fitting = [row.recipe for row in found.rows if row.fits]
        if lines and found.device == "cpu" and len(fitting) > 1:
            words = ["featherweight", "compare", hub_id(found.model), fitting[-1], fitting[0]]
            lines.append(shlex.join(words))  # the heaviest is the baseline of the fastest
    return [one_line(line) for line in lines]


def remarks(found: Fit | TrainingFit) -> list[str]:
    """What a reader must know besides."""
    lines = []
    if isinstance(found, Fit):
        for reason, rows in groupby(sorted(found.rows, key=_reason), key=_reason):
            if reason:
                lines.append(f"{reason}: {', '.join(row.recipe for row in rows)}")
        if found.bandwidth and any(row.tokens_per_s for row in found.rows):
            lines.append(
                f"t/s ≤: what reading weights and cache at {found.bandwidth / 1e9:.1f} GB/s, as"
                " measured here, allows at most; compare measures"
            )
        if any(row.context for row in found.rows):
            lines.append("longest: tokens of the longest context that was seen to fit")
    elif found.cost and found.fits:
        lines.append(f"cost: {found.cost}")
    return [*lines, *(one_line(note) for note in found.notes)]


def _reason(row: Row) -> str:
    return one_line(row.reason or "")


def tables(found: Fit | TrainingFit) -> list[Grid]:
    """Recipes; or settings and changes that were tried."""
    if isinstance(found, Fit):
        rows = [_cells(row, found) for row in found.rows]
        shown = [i for i in range(len(HEADS)) if i < 3 or any(row[i] != MISSING for row in rows)]
        heads = tuple(HEADS[i] for i in shown)
        cells = [tuple(row[i] for i in shown) for row in rows]
        return [Grid("the least to read first", heads, cells, frozenset(range(2, len(heads))))]
    grids = []
    if len(found.tried) > 1:
        heads = ("setting", "optimizer", "batch", "peak", "fits")
        grids.append(Grid("tried", heads, [_tried(one) for one in found.tried], frozenset({2, 3})))
    if found.gains:
        heads = ("change", "batch", "peak", "cost")
        gains = [
            (one.label, str(one.batch_size), amount(one.peak), one.cost) for one in found.gains
        ]
        grids.append(Grid("what lets more rows fit", heads, gains, frozenset({1, 2})))
    return grids


def _cells(row: Row, found: Fit) -> tuple[str, ...]:
    peak = MISSING if row.peak is None else amount(row.peak)
    if row.peak is None and row.weights is not None:
        peak = f"> {amount(found.memory)}"
    context = MISSING if not row.context else f"{row.context:,}"
    rate = MISSING
    if row.tokens_per_s is not None:
        rate = f"{row.tokens_per_s:.{decimals(row.tokens_per_s, 2)}f}"
    sizes = [MISSING if n is None else amount(n) for n in (row.load_peak, row.weights, row.read)]
    fits = "yes" if row.fits else "no"
    return (row.recipe, fits, peak, sizes[0], sizes[1], context, sizes[2], rate)


def _tried(one: Tried) -> tuple[str, ...]:
    size = f"{one.batch_size} × {one.accumulate}"
    peak = amount(one.peak) if one.peak is not None else MISSING
    fits = "yes" if one.fits else "no" if one.peak is not None else f"no, {one.reason}"
    return (one.label, one.optimizer, size, peak, fits)


# --- forms ---------------------------------------------------------------------------------


def _human(found: Fit | TrainingFit, width: int | None, color: bool) -> str:
    style = "bold" if found.fits else "bold red"
    parts: list[Grid | RenderableType] = [Text(line) for line in subject(found)]
    parts.append(Text(verdict(found), style=style))
    if isinstance(found, TrainingFit):
        parts.append(Text(makeup(found)))
    for grid in tables(found):
        parts += [Text(), grid]
    said: list[Grid | RenderableType] = [Text(line, style="dim") for line in remarks(found)]
    blocks = [
        printed(parts, width, color),
        "\n".join(commands(found)),  # to be copied: never broken
        printed(said, width, color),
    ]
    return "\n\n".join(block for block in blocks if block)


def _markdown(found: Fit | TrainingFit) -> str:
    lines = [*subject(found), *([makeup(found)] if isinstance(found, TrainingFit) else [])]
    run = commands(found)
    blocks = [
        f"**{escape(verdict(found))}**",
        "  \n".join(escape(line) for line in lines),  # two spaces: a line break
        *(pipes(grid) for grid in tables(found)),
        "\n".join(["```", *run, "```"]) if run else "",
        "\n".join(f"- {escape(line)}" for line in remarks(found)),
        ", ".join(f"{name} {escape(version)}" for name, version in found.versions.items()),
    ]
    return "\n\n".join(block for block in blocks if block)


def _csv(found: Fit | TrainingFit) -> str:
    """One line a recipe, or a setting and a change; bytes as numbers, empty where there is none."""
    stream = io.StringIO()
    if isinstance(found, Fit):
        rows = [asdict(row) | {"attention": " ".join(row.attention)} for row in found.rows]
        writer = csv.DictWriter(stream, _COLUMNS, lineterminator="\n")
    else:
        rows = [{"kind": "tried", **asdict(one)} for one in found.tried]
        rows += [_gain(one) for one in found.gains]
        writer = csv.DictWriter(stream, _TRAINING, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().rstrip("\n")


def _gain(one: Gain) -> dict[str, object]:
    known = {"kind": "change", "label": one.label, "recipe": one.recipe, "fits": True}
    sizes = {"batch_size": one.batch_size, "accumulate": 1, "peak": one.peak}
    return {**known, **sizes, "optimizer": one.optimizer, "cost": one.cost}
