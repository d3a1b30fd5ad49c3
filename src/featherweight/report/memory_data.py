"""A prediction of memory for programs: JSON with the whole timeline, and CSV with one line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from featherweight.anatomy.result import Memory
from featherweight.anatomy.trace import CATEGORIES

if TYPE_CHECKING:
    from featherweight.anatomy.measured import Measured
    from featherweight.anatomy.what_if import Change

MEASURED = ("allocated", "resident", "reserved", "process", "seconds")
_NAMES = (
    *("what_if", "model", "recipe", "workload", "device", "parameters"),
    *("process", "reserved", "allocated", "base", "phase"),
    *CATEGORIES,
)


def json_text(
    memory: Memory, changes: Sequence[Change] | None = None, measured: Measured | None = None
) -> str:
    """The document of `Memory.to_json`, with `measured` and `what_if` where they were asked for."""
    document = memory.to_json()
    if measured is not None:
        document["measured"] = measured.to_json()
    if changes is not None:
        document["what_if"] = [_change(change) for change in changes]
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)


def csv_text(
    memory: Memory, changes: Sequence[Change] | None = None, measured: Measured | None = None
) -> str:
    """One line for what was asked and one for each change; bytes as numbers.

    The columns of categories are always there, so that lines of several runs go into one sheet.
    """
    rows = [_row("", memory)]
    names = [*_NAMES]
    if measured is not None:
        names += [f"measured_{name}" for name in MEASURED]
        rows[0] |= {f"measured_{name}": getattr(measured, name) for name in MEASURED}
    rows += [_row(change.label, change.memory) for change in changes or ()]
    return _sheet(names, rows)


def _change(change: Change) -> dict[str, Any]:
    plain = {name: getattr(change, name) for name in ("label", "recipe", "saved", "command")}
    return plain | {"cost": change.cost, "peak": asdict(change.memory.peak)}


def _row(what_if: str, memory: Memory) -> dict[str, Any]:
    plain = {name: getattr(memory, name) for name in _NAMES if hasattr(memory, name)}
    zeros = dict.fromkeys(CATEGORIES, 0)
    return {"what_if": what_if} | plain | asdict(memory.peak) | zeros | memory.categories


def _sheet(names: list[str], rows: Iterable[dict[str, Any]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue().rstrip("\n")
