"""Plain data and its JSON form."""

from __future__ import annotations

import json

from featherweight.measure.result import SCHEMA, Estimate, Figure, Interval, Report, Row


def test_figures_and_quality_stand_under_their_own_names() -> None:
    row = Row("bf16", figures={"pp16": Figure(2.0, "t/s", 0.1, [2.0], 16, 16, Interval(1, 0, 2))})
    row.quality = {"kld": Estimate(0.1, 0.01)}
    data = row.to_json()
    assert data["pp16"]["ratio"] == {"value": 1, "low": 0, "high": 2}
    assert data["kld"] == {"value": 0.1, "se": 0.01}
    assert not {"figures", "quality"} & set(data)
    assert row.figures  # the row itself is as before


def test_a_report_is_one_document() -> None:
    report = Report({"name": "m"}, {}, {}, {}, rows=[Row("fp32", baseline=True)])
    data = json.loads(json.dumps(report.to_json()))
    assert data["schema"] == SCHEMA
    assert data["rows"][0]["recipe"] == "fp32"
    assert data["rows"][0]["baseline"] is True
    assert "fp32" in str(report)
