"""A report for people, at a terminal."""

from __future__ import annotations

import re
from io import StringIO

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from featherweight.measure.result import Report, Row
from featherweight.report import words
from featherweight.report.columns import Column, columns, footnotes

# Strings given to rich are read for markup; recipes, reasons and model text must not be. Hence
# every text below is a `Text`.


def human(report: Report, *, width: int | None = None, color: bool = False) -> str:
    """Head, table, verdicts and texts, at most `width` columns wide."""
    console = Console(
        file=StringIO(),
        width=width,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
    )
    with console.capture() as capture:
        _print(console, report)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _print(console: Console, report: Report) -> None:
    console.print(Text(" · ".join(words.headline(report)), style="bold"))
    for table in _tables(console, report):
        console.print()
        console.print(table)
    for note in footnotes(report):
        console.print(Text(note, style="dim"))
    _print_remarks(console, report)
    for line in words.closing(report):
        console.print()
        console.print(Text(line, style="bold red"))
    for prompt, texts in words.outputs(report):
        console.print()
        console.print(Text(f"Prompt: {prompt}", style="bold"))
        console.print(_side_by_side(texts))


def _print_remarks(console: Console, report: Report) -> None:
    found = words.remarks(report)
    if found:
        console.print()
    head = words.remarks_head(report)
    if head:
        console.print(Text(f"{head}:", style="dim"))
    for line, details in found:
        console.print(Text(line))
        for detail in details:
            console.print(Padding(Text(detail), (0, 0, 0, 4)))


def _tables(console: Console, report: Report) -> list[Table]:
    """One table where it fits; else memory and quality before speed, in as many as it takes."""
    found = columns(report)
    whole = _table(report.rows, found, recipe_width=console.width // 3)
    if _fits(console, whole):
        return [whole]
    narrow = console.width // 4
    tables: list[Table] = []
    for group in ([c for c in found if not c.speed], [c for c in found if c.speed]):
        taken: list[Column] = []
        for column in group:
            if taken and not _fits(console, _table(report.rows, [*taken, column], narrow)):
                tables.append(_table(report.rows, taken, narrow))
                taken = []
            taken.append(column)
        if taken:
            tables.append(_table(report.rows, taken, narrow))
    return tables


def _fits(console: Console, table: Table) -> bool:
    unlimited = console.options.update_width(10_000)
    return console.measure(table, options=unlimited).maximum <= console.width


def _table(rows: list[Row], found: list[Column], recipe_width: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(Text("recipe"), max_width=recipe_width, overflow="fold")
    for column in found:
        table.add_column(Text(column.head.replace(" ", "\n", 1)), justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        cells = [
            Text(column.cells[i], style="bold green" if i == column.best else "")
            for column in found
        ]
        table.add_row(Text(_folded(words.label(row), recipe_width)), *cells)
    return table


def _folded(name: str, width: int) -> str:
    """`name` in lines of at most `width` where it has joints to break at."""
    lines = [""]
    for piece in re.split(r"(?<=[+:, ])", name):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def _side_by_side(texts: list[tuple[str, str, str]]) -> Table:
    """Recipe and agreement to the left, its text to the right."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(max_width=30, overflow="fold")
    grid.add_column(overflow="fold")
    for name, same, text in texts:
        grid.add_row(Text(name).append(f"\n{same}", style="dim"), Text(text))
    return grid
