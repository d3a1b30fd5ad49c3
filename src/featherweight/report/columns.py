"""The columns of the table, as every writer shows them: plain text, not yet escaped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from featherweight.measure.result import Report, Row
from featherweight.report.words import MISSING, QUALITY, one_line, quality, size, spread


@dataclass(frozen=True)
class Column:
    """One column of the table: a cell for each row of the report."""

    head: str
    cells: list[str]
    speed: bool = False  # stands with the speeds where the table must be split
    best: int | None = None  # the row with the best speed, where rows compete


def columns(report: Report) -> list[Column]:
    """The columns that have any data, in the order of the table; the recipe's is not among them."""
    rows = report.rows
    found = [
        _column("weights", rows, lambda row: None if row.weights is None else size(row.weights)),
        _column("peak memory", rows, _peak),
        _column("GPU peak", rows, _gpu_peak),
        *(_speed_column(key, rows) for key in figure_keys(report)),
        _column("bandwidth %", rows, _bandwidth, speed=True),
        *(_quality_column(key, rows) for key in QUALITY),
    ]
    return [column for column in found if any(cell != MISSING for cell in column.cells)]


def figure_keys(report: Report) -> list[str]:
    """The speeds measured, in the order in which the rows first name them."""
    return list(dict.fromkeys(key for row in report.rows for key in row.figures))


def footnotes(report: Report) -> list[str]:
    """What a reader must know to read the cells of the table."""
    lines = []
    if any(row.run_memory and row.run_memory.anonymous is not None for row in report.rows):
        lines.append("peak memory: the process's own + mapped from files, each at its peak")
    for row in report.rows:
        for key, figure in row.figures.items():
            if figure.tokens < figure.asked:
                measured = f"measured on {figure.tokens} tokens of {figure.asked}"
                lines.append(f"* {one_line(row.recipe)}: {key} {measured}")
    name = one_line(report.model.get("name", "the model"))
    return lines + [f"{name}: {one_line(note)}" for note in report.model.get("notes", [])]


def _column(
    head: str, rows: list[Row], cell: Callable[[Row], str | None], speed: bool = False
) -> Column:
    return Column(head, [cell(row) or MISSING for row in rows], speed)


def _peak(row: Row) -> str | None:
    memory = row.run_memory
    if memory is None:
        return None
    if memory.anonymous is None or memory.file is None:
        return size(memory.total)
    return size(memory.anonymous, memory.file)


def _gpu_peak(row: Row) -> str | None:
    memory = row.run_memory
    if memory is None or memory.cuda_allocated is None:
        return None
    return size(memory.cuda_allocated)


def _bandwidth(row: Row) -> str | None:
    return None if row.bandwidth_share is None else f"{100 * row.bandwidth_share:.0f}"


def _speed_column(key: str, rows: list[Row]) -> Column:
    measured = {i: row.figures[key] for i, row in enumerate(rows) if key in row.figures}
    unit = next(iter(measured.values())).unit
    cells = [spread(measured[i]) if i in measured else MISSING for i in range(len(rows))]
    best = None
    if len(measured) > 1:
        pick = min if unit == "s" else max
        best = pick(measured, key=lambda i: measured[i].value)
    return Column(f"{key} {unit}", cells, speed=True, best=best)


def _quality_column(key: str, rows: list[Row]) -> Column:
    return _column(
        QUALITY[key][0],
        rows,
        lambda row: quality(key, row.quality[key]) if key in row.quality else None,
    )
