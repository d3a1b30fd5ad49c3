"""A prediction of memory as one page of HTML that needs nothing else, with the course of it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from featherweight import __version__
from featherweight.anatomy.result import Memory
from featherweight.anatomy.trace import CATEGORIES
from featherweight.errors import MissingExtraError
from featherweight.paths import write_atomic
from featherweight.report import memory_tables as tables
from featherweight.report.memory_tables import Grid, amount
from featherweight.report.words import one_line

if TYPE_CHECKING:
    from featherweight.anatomy.measured import Measured
    from featherweight.anatomy.what_if import Change

TEMPLATE = Path(__file__).with_name("memory_page.html")
LARGEST = 25  # holders in the table
# Hues far from one another, of a lightness that stands on white and on black.
_COLORS = (
    *("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2"),
    *("#39a3a0", "#9d755d", "#e3c341", "#a3aab3", "#f2a7c3"),
)
COLORS = dict(zip(CATEGORIES, _COLORS, strict=True))


def plotly_js() -> str:
    """The source of plotly.js, of the package plotly; MissingExtraError without it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtraError("plotly", "html", "an HTML page") from None
    source: str = get_plotlyjs()
    return source


def write_page(
    path: str | os.PathLike[str],
    memory: Memory,
    *,
    changes: Sequence[Change] | None = None,
    measured: Measured | None = None,
) -> None:
    """Write the page whole or not at all. Raises OSError, and MissingExtraError without plotly."""
    write_atomic(path, page(memory, changes=changes, measured=measured).encode())


def page(
    memory: Memory, *, changes: Sequence[Change] | None = None, measured: Measured | None = None
) -> str:
    """The page: the figure, what it is made of, the timeline, the tables, and all of it as JSON.

    Raises MissingExtraError without plotly.
    """
    has_room = tables.fits(memory)
    added = [] if measured is None else [tables.beside(memory, measured)]
    added += [] if changes is None else [tables.what_if(changes)]
    figures = {
        "title": f"{one_line(memory.model)}: {amount(memory.peak.process)}",
        "model": f"{one_line(memory.model)} · {one_line(memory.recipe)}",
        "subject": f"{tables.parameters(memory)} · {memory.workload}",
        "process": amount(memory.peak.process),
        "allocated": amount(memory.peak.allocated),
        "phase": memory.phase,
        "seen": tables.seen(memory),
        "fit": "soft" if has_room else "warn",
        "version": __version__,
        "made_with": tables.made_with(memory),
    }
    return Template(TEMPLATE.read_text("utf-8")).substitute(
        {name: escape(text) for name, text in figures.items()},
        bar=_bar(memory),
        key="".join(f"<li>{_dot(*part[:2])}{part[2]}</li>" for part in _key(memory)),
        categories=_table(tables.categories(memory), dots=True),
        phases=_table(tables.phases(memory)),
        holders=_table(tables.largest(memory, LARGEST)),
        added="".join(f"<section>{_table(grid)}</section>" for grid in added),
        remarks=_list(tables.remarks(memory)),
        memory=_json(memory.to_json()),
        colors=_json(COLORS),
        plotly=plotly_js(),
    )


def _parts(memory: Memory) -> list[tuple[str, str, str, int]]:
    """Class, colour, name and bytes of all that the figure is the sum of."""
    peak = memory.peak
    parts = [("", COLORS[name], name, nbytes) for name, nbytes in memory.categories.items()]
    parts.append(("slack", "", "reserved, not used at the peak", peak.reserved - peak.allocated))
    base = "Python and libraries" if memory.device == "cpu" else "CUDA context"
    parts.append(("base", "", base, peak.process - peak.reserved))
    return [part for part in parts if part[3] > 0]


def _bar(memory: Memory) -> str:
    """The parts as shares of the board, or where they are more, with a mark where it ends."""
    has = tables.board(memory) or 0
    whole = max(memory.peak.process, has)
    limit = (
        ""
        if tables.fits(memory)
        else f'<i class="limit" style="left:{100 * has / whole:.3f}%"></i>'
    )
    return limit + "".join(
        f'<i class="{kind}" style="width:{100 * nbytes / whole:.3f}%;background:{color}"'
        f' title="{escape(name)} {escape(amount(nbytes))}"></i>'
        for kind, color, name, nbytes in _parts(memory)
    )


def _key(memory: Memory) -> list[tuple[str, str, str]]:
    return [
        (kind, color, f"{escape(name)} <b>{escape(amount(nbytes))}</b>")
        for kind, color, name, nbytes in _parts(memory)
    ]


def _dot(kind: str, color: str) -> str:
    return f'<span class="dot {kind}" style="background:{color}"></span>'


def _table(grid: Grid, dots: bool = False) -> str:
    head = f"<h2>{escape(grid.title)}</h2>"
    if not grid.rows:
        return f"{head}<p>{escape(grid.empty)}</p>"
    right = [' class="right"' if i in grid.right else "" for i in range(len(grid.heads))]
    heads = "".join(f"<th{k}>{escape(h)}</th>" for k, h in zip(right, grid.heads, strict=True))
    rows = []
    for row in grid.rows:
        cells = [escape(cell) for cell in row]
        if dots and row[0] in COLORS:
            cells[0] = _dot("", COLORS[row[0]]) + cells[0]
        if grid.meter:
            cells[-1] = (
                f'<i class="meter" style="width:{100 * len(row[-1]) / grid.meter:.0f}%"></i>'
            )
        kind = ' class="sum"' if dots and row[0] not in COLORS else ""
        filled = "".join(f"<td{k}>{cell}</td>" for k, cell in zip(right, cells, strict=True))
        rows.append(f"<tr{kind}>{filled}</tr>")
    commands = "\n".join(map(escape, grid.commands))
    below = f"<pre><code>{commands}</code></pre>" if commands else ""
    return f"{head}<table><tr>{heads}</tr>{''.join(rows)}</table>{below}"


def _list(lines: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _json(data: dict[str, Any]) -> str:
    """JSON that nothing in it can end the script element of."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
