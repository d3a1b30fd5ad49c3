"""A prediction of memory for people, at a terminal and in issues (Markdown)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, Literal

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from featherweight.anatomy.result import Memory
from featherweight.errors import FeatherweightError
from featherweight.report import FORMATS
from featherweight.report import memory_tables as tables
from featherweight.report.markdown import escape
from featherweight.report.memory_tables import Grid, amount

if TYPE_CHECKING:
    from featherweight.anatomy.measured import Measured
    from featherweight.anatomy.what_if import Change


def render(
    memory: Memory,
    format: str,
    *,
    detailed: bool = False,
    changes: Sequence[Change] | None = None,
    measured: Measured | None = None,
    width: int | None = None,
    color: bool = False,
) -> str:
    """`memory` in one of `report.FORMATS`, without a line end at the end.

    `changes` (of `what_if`) and `measured` are added to every format, `detailed` tables to "human"
    and "md". `width` (columns; None: the terminal's, else 80) and `color` concern "human" only.
    """
    if format == "human":
        parts = [human(memory, width=width, color=color)]
        if detailed:
            parts.append(detail(memory, width=width, color=color))
        added = _added(memory, changes, measured)
        parts += [printed([grid], width, color) for grid in added]
        return "\n\n".join(parts)
    if format == "md":
        return markdown(memory, detailed=detailed, changes=changes, measured=measured)
    if format in FORMATS:
        from featherweight.report import memory_data

        write = memory_data.json_text if format == "json" else memory_data.csv_text
        return write(memory, changes, measured)
    raise FeatherweightError(
        f"unknown report format {format!r}", hint=f"choose one of {', '.join(FORMATS)}"
    )


def human(memory: Memory, *, width: int | None = None, color: bool = False) -> str:
    """The one figure, and in a few lines what it is of and how it splits."""
    figure = Text.assemble((amount(memory.peak.process), "bold"), " ")
    figure.append(tables.seen(memory), style="" if tables.fits(memory) else "red")
    lines = [tables.subject(memory), tables.split(memory), tables.makeup(memory)]
    remarks = [Text(remark, style="dim") for remark in tables.remarks(memory)]
    return printed([figure, *(Text(line) for line in lines), *remarks], width, color)


def detail(memory: Memory, *, width: int | None = None, color: bool = False) -> str:
    """Categories and largest holders at the peak, the peak of each phase, and the course of it."""
    parts: list[Grid | RenderableType] = []
    for grid in _details(memory):
        parts += [grid, Text()]
    for line in tables.sparkline(memory):
        parts.append(Text(line, no_wrap=True, overflow="crop"))
    parts.append(Text(f"predicted with {tables.made_with(memory)}", style="dim"))
    return printed(parts, width, color)


def markdown(
    memory: Memory,
    *,
    detailed: bool = False,
    changes: Sequence[Change] | None = None,
    measured: Measured | None = None,
) -> str:
    """The same in GitHub's Markdown."""
    grids = _details(memory) if detailed else [tables.categories(memory)]
    lines = [tables.subject(memory), tables.split(memory)]
    blocks = [
        f"**{amount(memory.peak.process)}** {escape(tables.seen(memory))}",
        "  \n".join(escape(line) for line in lines),  # two spaces: a line break
        *(pipes(grid) for grid in [*grids, *_added(memory, changes, measured)]),
        "\n".join(f"- {escape(remark)}" for remark in tables.remarks(memory)),
        f"predicted with {escape(tables.made_with(memory))}",
    ]
    return "\n\n".join(block for block in blocks if block)


def _details(memory: Memory) -> list[Grid]:
    return [tables.categories(memory), tables.largest(memory), tables.phases(memory)]


def _added(
    memory: Memory, changes: Sequence[Change] | None, measured: Measured | None
) -> list[Grid]:
    grids = [] if measured is None else [tables.beside(memory, measured)]
    return grids if changes is None else [*grids, tables.what_if(changes)]


# --- forms ---------------------------------------------------------------------------------


def printed(parts: Sequence[Grid | RenderableType], width: int | None, color: bool) -> str:
    console = Console(
        file=StringIO(),
        width=width,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
    )
    with console.capture() as capture:
        for part in parts:
            if isinstance(part, Grid):
                _print_grid(console, part)
            else:
                console.print(part)
    return "\n".join(line.rstrip() for line in capture.get().rstrip().splitlines())


def _print_grid(console: Console, grid: Grid) -> None:
    console.print(Text(grid.title, style="bold"))
    if not grid.rows:
        console.print(Text(grid.empty))
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, head in enumerate(grid.heads):
        numbers = i in grid.right
        justify: Literal["left", "right"] = "right" if numbers else "left"
        table.add_column(Text(head), justify=justify, no_wrap=numbers, overflow="fold")
    widths = [max(map(len, column)) + 2 for column in zip(grid.heads, *grid.rows, strict=True)]
    for first, *others in grid.rows:
        cell = Text(_folded(first, console.width - sum(widths[1:])))
        table.add_row(cell, *(Text(other) for other in others))
    console.print(table)
    for command in grid.commands:
        console.print(Text(f"  {command}"), soft_wrap=True)  # to be copied whole


def _folded(name: str, width: int) -> str:
    """A dotted name in lines of at most `width`, where that many parts fit."""
    lines = [""]
    for piece in re.split(r"(?<=\.)", name):
        if lines[-1] and len(lines[-1] + piece) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(lines)


def pipes(grid: Grid) -> str:
    if not grid.rows:
        return f"{escape(grid.title)}: {escape(grid.empty)}"
    rule = ["--:" if i in grid.right else ":--" for i in range(len(grid.heads))]
    made = [grid.heads, tuple(rule), *(tuple(escape(c) for c in row) for row in grid.rows)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in made)
    commands = "\n".join(["", "", "```", *grid.commands, "```"]) if grid.commands else ""
    return f"{escape(grid.title)}:\n\n{table}{commands}"
