"""A report to paste into an issue: a GitHub table, verdicts as a list, the machine beneath."""

from __future__ import annotations

import re

from featherweight.measure.result import Report
from featherweight.report import words
from featherweight.report.columns import columns, footnotes


def markdown(report: Report) -> str:
    """Same columns and remarks as for people, in GitHub's Markdown."""
    blocks = [
        _table(report),
        "  \n".join(escape(note) for note in footnotes(report)),  # two spaces: a line break
        _remarks(report),
        "\n".join(f"**{escape(line)}**  " for line in words.closing(report)).rstrip(),
        *(_texts(prompt, texts) for prompt, texts in words.outputs(report)),
        escape(" · ".join(words.headline(report))),
    ]
    return "\n\n".join(block for block in blocks if block)


def _table(report: Report) -> str:
    table = columns(report)
    lines = [
        ["recipe", *(column.head for column in table)],
        [":--", *("--:" for _ in table)],
    ]
    for i, row in enumerate(report.rows):
        cells = [words.label(row), *(column.cells[i] for column in table)]
        lines.append([escape(cell) for cell in cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _remarks(report: Report) -> str:
    lines = []
    for line, details in words.remarks(report):
        lines.append(f"- {escape(line)}")
        lines += [f"  - {escape(detail)}" for detail in details]
    head = words.remarks_head(report)
    return "\n".join([f"{escape(head)}:\n", *lines] if head else lines)


def _texts(prompt: str, texts: list[tuple[str, str, str]]) -> str:
    lines = [f"Prompt: {_code(prompt)}\n"]
    lines += [f"- {escape(name)} ({same}): {_code(text)}" for name, same, text in texts]
    return "\n".join(lines)


def escape(text: str) -> str:
    """`text`, a single line, with nothing left in it that Markdown would act upon."""
    return re.sub(r"([\\|`*_~$&<\[\]])", r"\\\1", text)


def _code(text: str) -> str:
    """Somebody's text, verbatim: in a code span even `@name` stays what it is."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}"
