"""A profile as text: for people, for issues (Markdown), for programs (JSON), for sheets (CSV)."""

from __future__ import annotations

import csv
import io
import json
import statistics
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from featherweight.errors import FeatherweightError
from featherweight.profiling.counting import BACKWARD, FORWARD
from featherweight.profiling.operations import CONTRACTION, GROUPS
from featherweight.profiling.profiled import Operation, Profile, Work, total
from featherweight.profiling.roofline import MEMORY
from featherweight.report import FORMATS
from featherweight.report.markdown import escape
from featherweight.report.words import MISSING, decimals, one_line, size

LEAST_SHARE = 0.01  # of the time or the FLOPs: operations below are put together
HEADS = ("operation", "calls", "GFLOP", "FLOP %", "moved", "FLOP/B", "bound by")
TIMES = ("roofline ms", "ms", "time %")
_DROPPED = (
    "calls",
    "FLOP %",
    "moved",
    "FLOP/B",
    "GFLOP",
)  # in this order, where a terminal is narrow
_OPERATION = ("phase", "group", "name", "calls", "flops", "read", "written", "intensity", "bound")


@dataclass(frozen=True)
class Line:
    """One line of the table; `level` 0 for a phase or the whole, 1 a group, 2 an operation."""

    level: int
    cells: tuple[str, ...]


def render(profile: Profile, format: str, *, width: int | None = None, color: bool = False) -> str:
    """`profile` in one of `report.FORMATS`, without a line end at the end.

    `width` (columns; None: the terminal's, else 80) and `color` concern "human" only.
    """
    if format == "human":
        return _human(profile, width, color)
    if format == "md":
        return _markdown(profile)
    if format == "json":
        return json.dumps(profile.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
    if format == "csv":
        return _csv(profile)
    raise FeatherweightError(
        f"unknown report format {format!r}", hint=f"choose one of {', '.join(FORMATS)}"
    )


# --- what every format says ----------------------------------------------------------------


def headline(profile: Profile) -> list[str]:
    """Model, pass, machine, and its roofline: a line each."""
    model, settings, roof = profile.model, profile.settings, profile.roofline
    recipe = settings["recipe"] or f"{model['dtype']} as it is"
    passes = {"train": "forward and backward", "decode": "one token after", "forward": "forward"}
    wall = statistics.median(profile.wall)
    spread = f" ± {1e3 * statistics.stdev(profile.wall):.1f}" if len(profile.wall) > 1 else ""
    dtypes = ", ".join(f"{dtype} {rate:.0f}" for dtype, rate in roof.products.items())
    return [
        f"{model['name']}, {model['architecture']}, {recipe}, {model['attention']} attention",
        f"{passes[settings['pass']]} {settings['batch_size']} × {settings['seq_len']} tokens:"
        f" {1e3 * wall:.1f}{spread} ms, {_count(settings['runs'], 'run')}",
        f"{profile.machine['cpu']}, {_count(settings['threads'], 'thread')}, {roof.device}"
        f" · roofline: {roof.bandwidth:.1f} GB/s, products in GFLOP/s: {dtypes};"
        f" below {roof.ridge(model['dtype']):.1f} FLOP/B memory binds",
    ]


def lines(profile: Profile) -> list[Line]:
    """Phases, their groups, their operations; what was outside; everything."""
    found = []
    whole = profile.total()
    phases = [phase for phase in (FORWARD, BACKWARD) if profile.total(phase)]
    for phase in phases:
        work = profile.total(phase)
        if len(phases) > 1 and work:
            found.append(Line(0, _cells(phase, work, profile)))
        for group in GROUPS:
            work = profile.total(phase, group)
            if work is None:
                continue
            found.append(Line(1, _cells(group, work, profile)))
            these = [o for o in profile.operations if (o.phase, o.group) == (phase, group)]
            found += _operation_lines(these, profile)
    blank = (MISSING,) * (len(HEADS) + len(TIMES) - 3)
    outside = ("outside of operations", *blank, *_time(profile.outside_s, profile))
    found.append(Line(1, outside))
    if whole:
        cells = _cells("all", whole, profile)
        found.append(Line(0, (*cells[:-2], *_time(profile.seconds, profile))))
    return found


def _operation_lines(operations: list[Operation], profile: Profile) -> list[Line]:
    """Those that matter and the longest by name, the others together."""
    whole = profile.total()
    flops = whole.flops if whole else 0
    named = [
        o
        for o in operations
        if o is operations[0]
        or o.work.seconds >= LEAST_SHARE * profile.seconds
        or o.work.flops > LEAST_SHARE * flops
    ]
    found = [Line(2, _cells(short(o.name), o.work, profile)) for o in named]
    rest = [o for o in operations if o not in named]
    if len(rest) == 1:
        return [*found, Line(2, _cells(short(rest[0].name), rest[0].work, profile))]
    if rest:
        together = total([o.work for o in rest])
        found.append(Line(2, _cells(f"{len(rest)} others", together, profile)))
    return found


def verdict(profile: Profile) -> str:
    """One line: what contractions are of the FLOPs and of the time, and what waits for memory."""
    whole = profile.total()
    if whole is None:
        return "no operation was seen"
    products = [o.work for o in profile.operations if o.group == CONTRACTION]
    flops = sum(work.flops for work in products) / whole.flops if whole.flops else 0.0
    waits = sum(o.work.seconds for o in profile.operations if o.work.bound == MEMORY)
    seconds = sum(work.seconds for work in products)
    return (
        f"tensor contractions are {_percent(flops)} % of the FLOPs and"
        f" {_percent(seconds / profile.seconds)} % of the time;"
        f" memory-bound operations take {_percent(waits / profile.seconds)} % of the time,"
        f" and {_percent(profile.outside_s / profile.seconds)} % is outside of operations"
    )


def attention(profile: Profile) -> tuple[str, list[tuple[str, ...]]]:
    """Title and rows of the table of the score matrix; no rows where the config has no heads."""
    model = profile.model
    title = (
        f"attention of one layer, {model['heads']} heads of {model['head_dim']}, {model['dtype']},"
        f" batch {profile.settings['batch_size']}"
    )
    rows: list[tuple[str, ...]] = [
        (f"{row.tokens:,}", size(row.eager), size(row.flash), f"{row.eager / row.flash:,.0f}×")
        for row in profile.attention
    ]
    return title, rows


ATTENTION_HEADS = ("tokens", "score matrix (eager)", "flash keeps", "ratio")


def short(name: str) -> str:
    """An op's name as tables have it."""
    for prefix in ("featherweight::", "_scaled_dot_product_"):
        name = name.removeprefix(prefix)
    return one_line(name.lstrip("_"))


def _cells(name: str, work: Work, profile: Profile) -> tuple[str, ...]:
    whole = profile.total()
    share = work.flops / whole.flops if whole and whole.flops else 0.0
    return (
        name,
        f"{work.calls:,}",
        _number(work.flops / 1e9),
        _percent(share),
        size(work.moved) if work.moved >= 1 << 19 else f"{work.moved / 1024:.1f} KiB",
        MISSING if work.intensity is None else _number(work.intensity),
        work.bound,
        _number(1e3 * work.attainable_s),
        *_time(work.seconds, profile),
    )


def _time(seconds: float, profile: Profile) -> tuple[str, str]:
    return _number(1e3 * seconds), _percent(seconds / profile.seconds)


def _number(value: float) -> str:
    if 0 < value < 0.005:
        return "<0.01"
    return f"{value:,.{min(2, decimals(value))}f}"


def _percent(share: float) -> str:
    return "<0.1" if 0 < share < 0.0005 else f"{100 * share:.1f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


# --- formats -------------------------------------------------------------------------------


def _human(profile: Profile, width: int | None, color: bool) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
    )
    with console.capture() as capture:
        first, *others = headline(profile)
        console.print(Text(first, style="bold"))
        for line in others:
            console.print(Text(line))
        console.print()
        console.print(_fitting(console, lines(profile)))
        console.print()
        console.print(Text(verdict(profile)))
        title, rows = attention(profile)
        if rows:
            console.print()
            console.print(Text(title))
            console.print(_table(ATTENTION_HEADS, [(0, row) for row in rows]))
        for note in profile.notes:
            console.print(Text(note, style="dim"))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _fitting(console: Console, found: list[Line]) -> Table:
    """The table without the columns that a narrow terminal has no room for."""
    heads = [*HEADS, *TIMES]
    keep = list(range(len(heads)))
    unlimited = console.options.update_width(10_000)
    for drop in (None, *_DROPPED):
        keep = [i for i in keep if heads[i] != drop]
        rows = [(line.level, tuple(line.cells[i] for i in keep)) for line in found]
        table = _table(tuple(heads[i] for i in keep), rows)
        if console.measure(table, options=unlimited).maximum <= console.width:
            break
    return table


def _table(heads: tuple[str, ...], rows: list[tuple[int, tuple[str, ...]]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for i, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if i else "left", no_wrap=True)
    for level, (name, *cells) in rows:
        style = "dim" if level == 2 else ""
        indented = Text("  " * level + name, style=style)
        table.add_row(indented, *(Text(cell, style=style) for cell in cells))
    return table


def _markdown(profile: Profile) -> str:
    title, rows = attention(profile)
    blocks = [
        _pipes((*HEADS, *TIMES), [_indented(line) for line in lines(profile)]),
        escape(verdict(profile)),
        *([escape(title), _pipes(ATTENTION_HEADS, rows)] if rows else []),
        "\n".join(f"- {escape(note)}" for note in profile.notes),
        "  \n".join(escape(line) for line in headline(profile)),
    ]
    return "\n\n".join(block for block in blocks if block)


def _indented(line: Line) -> tuple[str, ...]:
    name, *cells = line.cells
    return (f"{'· ' * (line.level - 1)}{name}" if line.level else name, *cells)


def _pipes(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    made = [heads, (":--", *("--:" for _ in heads[1:]))]
    made += [tuple(escape(cell) for cell in row) for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in made)


def _csv(profile: Profile) -> str:
    """One line an operation, and one for what was outside; bytes, seconds and shares of 1."""
    stream = io.StringIO()
    names = [*_OPERATION, "attainable_s", "seconds", "share"]
    writer = csv.DictWriter(stream, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    data: dict[str, Any] = profile.to_json()
    writer.writerows(data["operations"])
    writer.writerow({"name": "outside of operations"} | data["outside"])
    return stream.getvalue().rstrip("\n")
