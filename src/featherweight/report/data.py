"""A report for programs: strict JSON with every sample, and CSV with one line a recipe."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict, fields
from typing import Any

from featherweight.measure.result import Figure, PeakMemory, Report, Row
from featherweight.report.columns import figure_keys

PLAIN = (
    "recipe",
    "baseline",
    "status",
    "reason",
    "load_s",
    "weights",
    "weights_mapped",
    "kv_cache",
    "bytes_per_token",
    "bandwidth_share",
)
MEMORY = ("load_memory", "run_memory")
FIGURE = ("", "_sd", "_tokens", "_asked", "_ratio", "_ratio_low", "_ratio_high")


def json_text(report: Report) -> str:
    """The document of `Report.to_json`; JSON has no nan and no infinity, they become null."""
    return json.dumps(_finite(report.to_json()), indent=2, ensure_ascii=False, allow_nan=False)


def csv_text(report: Report) -> str:
    """One line a recipe; bytes, seconds and shares as numbers, an empty cell where there is none.

    The columns of memory are always there, those of speed and quality where any row has them.
    """
    rows = [_flat(row) for row in report.rows]
    qualities = dict.fromkeys(key for row in report.rows for key in row.quality)
    names = [*PLAIN]
    names += [f"{kind}_{part.name}" for kind in MEMORY for part in fields(PeakMemory)]
    names += [name for key in figure_keys(report) for name in _figure_names(key)]
    names += [name for key in qualities for name in (key, f"{key}_se")]
    names += ["notes", "verdict"]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_finite(rows))
    return stream.getvalue().rstrip("\n")


def _flat(row: Row) -> dict[str, Any]:
    cells: dict[str, Any] = {name: getattr(row, name) for name in PLAIN}
    for kind in MEMORY:
        memory = getattr(row, kind)
        if memory is not None:
            cells |= {f"{kind}_{name}": value for name, value in asdict(memory).items()}
    for key, figure in row.figures.items():
        cells |= zip(_figure_names(key), _figure_cells(figure), strict=True)
    for key, estimate in row.quality.items():
        cells |= {key: estimate.value, f"{key}_se": estimate.se}
    return cells | {"notes": "\n".join(row.notes), "verdict": row.verdict}


def _figure_names(key: str) -> list[str]:
    return [key + suffix for suffix in FIGURE]


def _figure_cells(figure: Figure) -> list[float | None]:
    ratio = figure.ratio
    bounds = [ratio.value, ratio.low, ratio.high] if ratio else [None, None, None]
    return [figure.value, figure.sd, figure.tokens, figure.asked, *bounds]


def _finite(value: Any) -> Any:
    """`value` with None for every number that is not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
