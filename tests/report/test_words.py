"""Cells and verdicts, one by one."""

from __future__ import annotations

import math

import pytest

from featherweight.measure.result import Estimate, Figure, Interval, PeakMemory, Report, Row
from featherweight.report import words
from featherweight.report.columns import columns

MIB = 2**20


def speed(value, sd=0.0, ratio=None, tokens=64, unit="t/s"):
    return Figure(value, unit, sd, [value], tokens, 64, ratio)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([0], "0 MiB"),
        ([20 * 1024], "0.0195 MiB"),
        ([87 * MIB], "87.0 MiB"),
        ([612 * MIB, 514 * MIB], "612 + 514 MiB"),
        ([1536 * MIB, 512 * MIB], "1.50 + 0.500 GiB"),
        ([1024 * MIB], "1.00 GiB"),
    ],
)
def test_size(parts, text):
    assert words.size(*parts) == text


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (speed(143.21, 2.13), "143 ± 2"),
        (speed(0.2145, 0.0012), "0.214 ± 0.001"),
        (speed(1234.5, 20.2), "1234 ± 20"),
        (speed(9.876, math.nan), "9.88"),
        (speed(27.3, 0.4, tokens=16), "27.3 ± 0.4*"),
        (speed(0.0, 0.0), "0 ± 0"),
    ],
)
def test_spread(figure, text):
    assert words.spread(figure) == text


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("kld", 0.00043, "0.0004"),
        ("kld", 0.00001, "<0.0001"),
        ("kld", 0.0, "0.0000"),
        ("kld", math.nan, "nan"),
        ("same_top", 0.9913, "99.1"),
        ("same_top", 0.9999, ">99.9"),
        ("same_top", 1.0, "100.0"),
        ("ppl", 17.834, "17.83"),
        ("ppl", math.inf, "inf"),
        ("ppl_ratio", 1.00151, "1.0015"),
        ("cosine", 0.99981, "0.99981"),
        ("cosine", 0.9999999, ">0.99999"),
        ("neighbours", 0.98, "98.0"),
    ],
)
def test_quality_cells(key, value, text):
    assert words.QUALITY[key][1](value) == text


@pytest.mark.parametrize(
    ("key", "estimate", "text"),
    [
        ("ppl", Estimate(17.834, 0.41), "17.83 ± 0.41"),
        ("ppl_ratio", Estimate(1.00151, 0.0004), "1.0015 ± 0.0004"),
        ("kld", Estimate(0.0123, 0.0021), "0.0123 ± 0.0021"),
        ("kld", Estimate(0.00043, 0.00002), "0.0004"),  # too small to be seen
        ("kld_p99", Estimate(0.0039), "0.0039"),
        ("same_top", Estimate(0.9913, 0.002), "99.1 ± 0.2"),
        ("same_top", Estimate(1.0, 0.0), "100.0"),
        ("rms_dp", Estimate(0.0171, 0.0012), "1.7 ± 0.1"),
    ],
)
def test_quality_cells_carry_their_standard_error(key, estimate, text):
    assert words.quality(key, estimate) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.29, "1.29×"), (0.158, "0.16×"), (0.0851, "0.085×"), (12.34, "12.3×")]
)
def test_times(ratio, text):
    assert words.times(ratio) == text


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        (Interval(1.29, 1.22, 1.36), "1.29× (1.22–1.36, faster)"),
        (Interval(0.16, 0.15, 0.17), "0.16× (0.15–0.17, slower)"),
        (Interval(1.02, 0.97, 1.08), "1.02× (0.97–1.08, no clear difference)"),
        (Interval(1.4, 0.0, math.inf), "1.40×"),  # one round
    ],
)
def test_verdict_says_which_way(interval, said):
    row = Row("r", figures={"tg64": speed(1.0, ratio=interval)}, quality={"kld": Estimate(0.0)})
    assert words.verdict(row) == f"r: decode {said}, KLD 0.0000"


def test_verdict_without_rounds_takes_the_medians():
    base = Row("b", baseline=True, weights=100, figures={"tg64": speed(10.0), "encode": speed(4.0)})
    row = Row("r", weights=25, figures={"tg64": speed(12.5), "encode": speed(3.0)})
    assert words.verdict(row, base) == (
        "r: decode 1.25×, encode 0.75×, weights 0.25×, quality not measured"
    )


def test_verdict_of_baseline_and_failure():
    assert words.verdict(Row("b", baseline=True)) == "b: the baseline"
    assert words.verdict(Row("r", status="failed", reason="no\nroom")) == "r (failed): no room"


def test_stored_verdict_is_the_one_shown():
    report = Report({}, {}, {}, {}, rows=[Row("r", verdict="r: as measured")])
    assert words.remarks(report) == [("r: as measured", [])]


def test_baseline_is_remarked_only_with_something_to_say():
    quiet = Row("b", baseline=True)
    noted = Row("b", baseline=True, notes=["noisy:\nclose other programs"])
    assert words.remarks(Report({}, {}, {}, {}, rows=[quiet])) == []
    assert words.remarks(Report({}, {}, {}, {}, rows=[noted])) == [
        ("b: the baseline", ["noisy: close other programs"])
    ]


def test_no_comparison_with_a_failed_baseline():
    rows = [Row("b", baseline=True, status="failed", reason="x"), Row("r")]
    assert words.remarks_head(Report({}, {}, {}, {}, rows=rows)) is None


@pytest.mark.parametrize(
    ("counts", "said"),
    [([3, 3], "over 3 paired rounds"), ([5, 3], "over 3–5 paired rounds"), ([], "over no paired")],
)
def test_the_head_of_the_remarks_says_how_many_rounds(counts, said):
    rows = [Row("b", baseline=True), Row("r")]
    for number, count in enumerate(counts):
        figure = speed(1.0, ratio=Interval(1.0, 0.9, 1.1))
        figure.rounds = count
        rows[1].figures[f"tg{number}"] = figure
    rows[1].figures["pp1"] = speed(1.0)  # of no ratio
    assert said in words.remarks_head(Report({}, {}, {}, {}, rows=rows))


def test_outputs_begin_with_the_baseline():
    rows = [
        Row("r", outputs=[{"text": "", "tokens": 0, "first_difference": 0}]),
        Row("b", baseline=True, outputs=[{"text": "a", "tokens": 1, "first_difference": None}]),
        Row("failed", status="failed"),
    ]
    report = Report({}, {}, {}, {}, rows=rows, prompts=["p"])
    assert words.outputs(report) == [
        ("p", [("b", "baseline", "a"), ("r", "first 0 of 0 tokens the same", "(nothing)")])
    ]


def test_columns_appear_only_with_data_and_speeds_as_first_named():
    rows = [
        Row("a", figures={"tg7@b3": speed(1.0)}),
        Row("b", run_memory=PeakMemory(MIB, cuda_allocated=2 * MIB), figures={"pp9": speed(2.0)}),
    ]
    found = columns(Report({}, {}, {}, {}, rows=rows))
    assert [column.head for column in found] == [
        "peak memory",
        "GPU peak",
        "tg7@b3 t/s",
        "pp9 t/s",
    ]
    assert [column.best for column in found] == [None] * 4


def test_one_line_drops_control_characters():
    assert words.one_line("a\x1b[1m\tb\r\nc\x07") == "a[1m b c"
