"""A `Report` as text: for people, for issues (Markdown), for programs (JSON), for sheets (CSV)."""

from __future__ import annotations

from featherweight.errors import FeatherweightError
from featherweight.measure.result import Report

FORMATS = ("human", "md", "json", "csv")


def render(report: Report, format: str, *, width: int | None = None, color: bool = False) -> str:
    """`report` in one of `FORMATS`, without a line end at the end.

    `width` (columns; None: the terminal's, else 80) and `color` concern "human" only.
    """
    if format == "human":
        from featherweight.report.human import human

        return human(report, width=width, color=color)
    if format == "md":
        from featherweight.report.markdown import markdown

        return markdown(report)
    if format == "json":
        from featherweight.report.data import json_text

        return json_text(report)
    if format == "csv":
        from featherweight.report.data import csv_text

        return csv_text(report)
    raise FeatherweightError(
        f"unknown report format {format!r}", hint=f"choose one of {', '.join(FORMATS)}"
    )
