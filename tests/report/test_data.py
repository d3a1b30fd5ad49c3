"""JSON and CSV are read back by other programs: strictly, and number for number."""

from __future__ import annotations

import csv
import io
import json

import pytest

from featherweight.errors import FeatherweightError
from featherweight.report import render


def strict(text):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_is_the_document_with_numbers_intact(decoder):
    document = strict(render(decoder, "json"))
    assert document["schema"] == "featherweight.compare/1"
    assert document["gates"] == decoder.gates
    bf16 = document["rows"][1]
    assert bf16["kld"] == {"value": 0.00043, "se": 0.00002}
    assert bf16["pp512"]["ratio"] == {"value": 0.16, "low": 0.153, "high": 0.171}
    assert bf16["pp512"]["samples"] == decoder.rows[1].figures["pp512"].samples


def test_json_has_null_for_what_is_not_finite(decoder):
    gen = strict(render(decoder, "json"))["rows"][1]["gen"]
    assert gen["sd"] is None
    assert gen["ratio"] == {"value": 0.843, "low": 0.0, "high": None}


def test_json_leaves_the_report_as_it_was(decoder):
    before = repr(decoder)
    render(decoder, "json")
    assert repr(decoder) == before


def test_csv_one_line_a_recipe(decoder):
    rows = list(csv.DictReader(io.StringIO(render(decoder, "csv"))))
    assert [row["recipe"] for row in rows] == [row.recipe for row in decoder.rows]
    bf16 = rows[1]
    assert float(bf16["pp512"]) == 22.9
    assert float(bf16["pp512_sd"]) == 0.31
    assert [float(bf16[f"pp512_ratio{end}"]) for end in ("", "_low", "_high")] == [
        0.16,
        0.153,
        0.171,
    ]
    assert (bf16["kld"], bf16["kld_se"], bf16["kld_p99"]) == ("0.00043", "2e-05", "0.0039")
    assert int(bf16["run_memory_anonymous"]) == 443 * 2**20
    assert (bf16["gen_sd"], bf16["gen_ratio_high"], bf16["load_s"]) == ("", "", "")
    assert (rows[2]["tg64_tokens"], rows[2]["tg64_asked"]) == ("16", "64")
    assert rows[3]["reason"] == "no kernel for [bold]\n|x|"
    assert rows[3]["pp512"] == ""


def test_csv_columns_keep_their_order(decoder, encoder):
    names = render(decoder, "csv").partition("\n")[0].split(",")
    assert names[:4] == ["recipe", "baseline", "status", "reason"]
    speeds = [name for name in names if name.endswith("_ratio") and name != "ppl_ratio"]
    assert speeds == [f"{key}_ratio" for key in ("pp512", "tg64", "gen", "ttft", "tg64@b8")]
    assert names[-2:] == ["notes", "verdict"]
    assert len(names) == len(set(names))
    assert "cosine" in render(encoder, "csv").partition("\n")[0].split(",")


def test_unknown_format_names_the_allowed_ones(decoder):
    with pytest.raises(FeatherweightError, match="'xml'; choose one of human, md, json, csv"):
        render(decoder, "xml")
