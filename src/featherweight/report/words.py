"""What every table says and how: cells, verdicts, remarks.

Plain text throughout; each writer escapes it for its own markup.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable
from typing import Any

from featherweight.measure.result import Estimate, Figure, Interval, Report, Row

MISSING = "–"
MIB, GIB = 2**20, 2**30


# --- cells ---------------------------------------------------------------------------------


def one_line(text: object) -> str:
    """`text` without line ends and control characters, which would break a table or a terminal."""
    return "".join(c for c in " ".join(str(text).split()) if unicodedata.category(c) != "Cc")


def decimals(value: float, significant: int = 3) -> int:
    """Decimal places that show at least `significant` digits of `value`."""
    if value == 0 or not math.isfinite(value):
        return 0
    return max(0, significant - 1 - math.floor(math.log10(abs(value))))


def size(*parts: int) -> str:
    """Bytes in MiB or GiB, whichever suits the largest part: `612 + 514 MiB`."""
    unit, name = (GIB, "GiB") if max(parts) >= GIB else (MIB, "MiB")
    amounts = [part / unit for part in parts]
    return " + ".join(f"{amount:.{decimals(amount)}f}" for amount in amounts) + f" {name}"


def spread(figure: Figure) -> str:
    """Median ± standard deviation; a star where fewer tokens were measured than asked for."""
    places = decimals(figure.value)
    text = f"{figure.value:.{places}f}"
    if math.isfinite(figure.sd):
        text += f" ± {figure.sd:.{places}f}"
    return text + "*" if figure.tokens < figure.asked else text


def percent(share: float) -> str:
    """A share of 1 as a percentage without its sign."""
    return ">99.9" if 0.9995 <= share < 1 else f"{100 * share:.1f}"


def divergence(kld: float) -> str:
    """Nats. What would round to zero does not claim to be zero; alike above and below."""
    return "<0.0001" if 0 < abs(kld) < 0.00005 else f"{kld:.4f}"


def cosine(value: float) -> str:
    """A cosine, to five decimals."""
    return ">0.99999" if 0.999995 <= value < 1 else f"{value:.5f}"


def times(ratio: float) -> str:
    """A ratio with its sign: `1.29×`."""
    return f"{ratio:.{_ratio_places(ratio)}f}×"


def _ratio_places(ratio: float) -> int:
    return decimals(ratio, 3 if ratio >= 1 else 2)


# Quality figure → what the tables call it, and its cell.
QUALITY: dict[str, tuple[str, Callable[[float], str]]] = {
    "kld": ("KLD", divergence),
    "kld_p99": ("KLD 99 %", divergence),
    "same_top": ("same top %", percent),
    "rms_dp": ("RMS Δp %", percent),
    "ppl": ("PPL", lambda value: f"{value:.{decimals(value, 4)}f}"),
    "ppl_ratio": ("PPL ratio", "{:.4f}".format),
    "cosine": ("cosine", cosine),
    "neighbours": ("neighbours %", percent),
}


TABLE_ONLY = {"ppl", "kld_p99", "rms_dp"}  # too much for a verdict


def quality(key: str, estimate: Estimate) -> str:
    """A cell: the value, and ± its standard error where there is one that can be seen."""
    cell = QUALITY[key][1]
    value = cell(estimate.value)
    if not estimate.se:
        return value
    places = len(value.partition(".")[2])
    scale = 100 if cell is percent else 1
    error = f"{scale * estimate.se:.{places}f}"
    return f"{value} ± {error}" if float(error) else value


def label(row: Row) -> str:
    """The recipe, flagged where it was not measured, or not in full."""
    name = one_line(row.recipe)
    return name if row.status == "ok" else f"{name} ({row.status})"


# --- verdicts and remarks ------------------------------------------------------------------


def baseline_of(report: Report) -> Row | None:
    """The row that the others are compared with."""
    return next((row for row in report.rows if row.baseline), None)


def verdict(row: Row, baseline: Row | None = None) -> str:
    """One line: what the recipe changed in speed, memory and quality.

    A row alone knows its speed ratios; the ratios of memory need the baseline's row.
    """
    name = label(row)
    if row.status == "failed":
        return f"{name}: {one_line(row.reason or 'no reason given')}"
    if row.baseline:
        return f"{name}: the baseline"
    parts = [*_speed_parts(row, baseline), *_memory_parts(row, baseline), *_quality_parts(row)]
    return f"{name}: {', '.join(parts)}"


def remarks(report: Report) -> list[tuple[str, list[str]]]:
    """A line and its details for each row that has something to say, in order."""
    baseline = baseline_of(report)
    found = []
    for row in report.rows:
        details = [one_line(note) for note in row.notes]
        if row.status == "partial":
            details.insert(0, f"partial: {one_line(row.reason or 'no reason given')}")
        if details or not row.baseline or row.status == "failed":
            found.append((one_line(row.verdict or verdict(row, baseline)), details))
    return found


def remarks_head(report: Report) -> str | None:
    """What the ratios of the verdicts are against; None where nothing could be compared."""
    baseline = baseline_of(report)
    if baseline is None or baseline.status == "failed" or len(report.rows) < 2:
        return None
    counts = {f.rounds for row in report.rows for f in row.figures.values() if f.ratio}
    rounds = (
        "–".join(str(count) for count in sorted({min(counts), max(counts)})) if counts else "no"
    )
    pairs = f"in brackets: 95 % interval over {rounds} paired rounds"
    return f"Against {one_line(baseline.recipe)} ({pairs})"


def closing(report: Report) -> list[str]:
    """Lines that concern the report as a whole: broken gates, an early end."""
    lines = [one_line(gate) for gate in report.gates]
    if report.interrupted:
        lines.append("interrupted: what was measured until then")
    elif not report.complete:
        lines.append("not all was measured in full: see the stars, notes and reasons above")
    return lines


def _speed_parts(row: Row, baseline: Row | None) -> list[str]:
    """Decode before prefill; `gen` and `ttft`, which mix the two, are left to the table."""
    parts = []
    for start, name in (("tg", "decode"), ("pp", "prefill"), ("encode", "encode")):
        for key, figure in row.figures.items():
            base = baseline.figures.get(key) if baseline else None
            said = _compared(figure, base) if key.startswith(start) else None
            if said:
                batch = key.partition("@b")[2]
                parts.append(f"{name} at batch {batch} {said}" if batch else f"{name} {said}")
    return parts


def _compared(figure: Figure, base: Figure | None) -> str | None:
    """The speed ratio, what it means, and how sure that is; without rounds only the ratio."""
    if figure.ratio is not None and math.isfinite(figure.ratio.high):
        return _interval(figure.ratio)
    if figure.ratio is not None:
        return times(figure.ratio.value)
    return times(figure.value / base.value) if base and base.value else None


def _interval(ratio: Interval) -> str:
    if ratio.low > 1:
        meaning = "faster"
    elif ratio.high < 1:
        meaning = "slower"
    else:
        meaning = "no clear difference"
    places = _ratio_places(ratio.value)
    return f"{times(ratio.value)} ({ratio.low:.{places}f}–{ratio.high:.{places}f}, {meaning})"


def _memory_parts(row: Row, baseline: Row | None) -> list[str]:
    if baseline is None:
        return []
    parts = []
    if row.weights is not None and baseline.weights:
        parts.append(f"weights {times(row.weights / baseline.weights)}")
    if row.run_memory and baseline.run_memory and baseline.run_memory.total:
        parts.append(f"peak memory {times(row.run_memory.total / baseline.run_memory.total)}")
    return parts


def _quality_parts(row: Row) -> list[str]:
    """The figures that compare with the baseline; perplexity alone compares nothing."""
    parts = []
    for key, (head, cell) in QUALITY.items():
        if key in row.quality and key not in TABLE_ONLY:
            name, sign, _ = head.partition(" %")
            parts.append(f"{name} {cell(row.quality[key].value)}{sign}")
    return parts or ["quality not measured"]


# --- the model, the machine, the texts -----------------------------------------------------


def headline(report: Report) -> list[str]:
    """Model, machine and versions, a part each."""
    model, machine = report.model, report.machine
    parts = [
        [model.get("name", "unnamed model"), _parameters(model.get("parameters"))],
        [
            machine.get("cpu", "unknown machine"),
            _counted(machine.get("cores"), "core"),
            _counted(report.settings.get("threads"), "thread"),
        ],
        [f"{name} {version}" for name, version in report.versions.items()],
    ]
    lines = [", ".join(one_line(word) for word in part if word) for part in parts]
    return [line for line in lines if line]


def _parameters(count: int | None) -> str | None:
    if count is None:
        return None
    amount, unit = (count / 1e9, "B") if count >= 1e9 else (count / 1e6, "M")
    return f"{amount:.{decimals(amount)}f} {unit} parameters"


def _counted(count: int | None, noun: str) -> str | None:
    return None if count is None else f"{count} {noun}{'' if count == 1 else 's'}"


def outputs(report: Report) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Each prompt with (recipe, agreement with the baseline, text) of every row, baseline first."""
    rows = sorted((row for row in report.rows if row.outputs), key=lambda row: not row.baseline)
    found = []
    for i, prompt in enumerate(report.prompts or []):
        said = [(row, out) for row in rows for out in (row.outputs or [])[i : i + 1]]
        texts = [(label(row), _agreement(row, out), _shown(out["text"])) for row, out in said]
        found.append((one_line(prompt), texts))
    return found


def _agreement(row: Row, output: dict[str, Any]) -> str:
    if row.baseline:
        return "baseline"
    same = output["first_difference"]
    if same is None:
        return f"same {output['tokens']} tokens"
    return f"first {same} of {output['tokens']} tokens the same"


def _shown(text: str) -> str:
    return one_line(text.replace("\n", " ↵ ")) or "(nothing)"
