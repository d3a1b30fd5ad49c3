"""What fits, as text: the verdict, what it would take, and figures that survive every form."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest

from featherweight.errors import FeatherweightError
from featherweight.fitting.result import Fit, Gain, Row, TrainingFit, Tried
from featherweight.report import FORMATS
from featherweight.report.fit import commands, makeup, remarks, render, verdict

MIB, GIB = 2**20, 2**30


def row(recipe: str, peak: int | None, load: int, allowed: int = 12 * GIB) -> Row:
    missing = max(0, max(peak or 0, load) - allowed)
    return Row(
        recipe=recipe,
        fits=peak is not None and not missing,
        weights=load - GIB,
        peak=peak,
        load_peak=load,
        kv_cache=2 * GIB,
        context=0 if missing else 4096,
        read=load + GIB if peak else None,
        tokens_per_s=5.83 if peak else None,
        missing=missing,
        reason=None if peak and not missing else "not run: the weights alone are too much",
        command=f"featherweight generate me/it PROMPT --recipe {recipe}",
    )


@pytest.fixture
def found() -> Fit:
    return Fit(
        model="me/a|b\x1b[31m",
        device="cpu",
        memory=12 * GIB,
        memory_source="as asked",
        workload="generation, batch 1, 3,968 prompt and 128 new tokens",
        context=4096,
        context_source="by default",
        longest=8192,
        batch_size=1,
        bandwidth=33.5e9,
        rows=[
            row("nf4:double", 6 * GIB, 4 * GIB),
            row("int8", 9 * GIB, 7 * GIB),
            row("bf16", None, 14 * GIB),
        ],
        notes=["a note"],
        versions={"torch": "2.13.0", "transformers": "5.24.0"},
    )


@pytest.fixture
def training() -> TrainingFit:
    return TrainingFit(
        model="bert",
        device="v100-16gb",
        memory=8 * GIB,
        memory_source="as asked",
        recipe="fp32+checkpointing",
        optimizer="adamw",
        workload="training, batch 2 × 512 tokens, 2 steps accumulated, adamw",
        cost="one more forward pass",
        seq_len=512,
        batch_size=2,
        accumulate=2,
        peak=7 * GIB,
        load_peak=2 * GIB,
        more=4,
        more_peak=9 * GIB,
        categories={"weights": GIB, "inputs": 16, "saved activations": 4 * GIB},
        base=GIB,
        reserved=GIB,
        tried=[
            Tried("plain", "fp32", "adamw", 1, 4, 9 * GIB, False, "nothing"),
            Tried("other", "bf16", "adamw", 1, 4, None, False, "x", "at least 9.0 GiB"),
            Tried("checkpointing", "fp32+checkpointing", "adamw", 2, 2, 7 * GIB, True, "a pass"),
        ],
        gains=[Gain("sdpa attention", "fp32+sdpa", "adamw", "training", "none", 4, 7 * GIB)],
        code='model = load("bert")\nargs = TrainingArguments(per_device_train_batch_size=2)',
        notes=[],
        versions={"torch": "2.13.0"},
        dry_runs=5,
    )


def test_people_get_the_verdict_the_table_and_the_command_unbroken(found: Fit) -> None:
    text = render(found, "human", width=90)
    assert "\x1b" not in text
    assert "12.0 GiB (as asked) on the CPU" in text
    assert "4,096 in all, by default" in text
    assert "fastest that fits: nf4:double" in text
    lines = text.splitlines()
    assert "featherweight generate me/it PROMPT --recipe nf4:double" in lines
    (bf16,) = [line for line in lines if line.startswith("bf16")]
    assert bf16.split()[:5] == ["bf16", "no", ">", "12.0", "GiB"]
    (nf4,) = [line for line in lines if line.startswith("nf4:double ")]
    assert nf4.split()[1:4] == ["yes", "6.00", "GiB"]
    assert nf4.split()[-1] == "5.8"


def test_the_lightest_and_the_heaviest_that_fit_are_to_be_compared(found: Fit) -> None:
    assert commands(found)[-1].startswith("featherweight compare ")
    assert commands(found)[-1].endswith(" int8 nf4:double")


def test_remarks_say_what_was_not_run_and_what_figures_mean(found: Fit) -> None:
    said = remarks(found)
    assert said[0] == "not run: the weights alone are too much: bf16"
    assert "33.5 GB/s" in said[1]
    assert said[-1] == "a note"


def test_where_nothing_fits_the_nearest_and_what_is_missing(found: Fit) -> None:
    rows = [replace(row("nf4:double", 6 * GIB, 4 * GIB, 5 * GIB), context=1024)]
    none = replace(found, memory=5 * GIB, rows=rows)
    assert verdict(none) == (
        "nothing fits: nf4:double comes nearest with 6.00 GiB, 1.00 GiB too much;"
        " it fits with a context of 1,024 tokens"
    )
    assert commands(none) == []
    assert "nothing fits" in render(none, "md")


def test_what_no_row_has_is_no_column(found: Fit) -> None:
    rows = [replace(one, read=None, tokens_per_s=None) for one in found.rows]
    head = render(replace(found, rows=rows), "md").split("| recipe", 1)[1].splitlines()[0]
    assert head == " | fits | peak | loading | weights | longest |"


def test_training_says_batch_makeup_and_what_would_help(training: TrainingFit) -> None:
    assert verdict(training) == (
        "micro-batch 2, accumulated 2 times: peak 7.00 GiB; 4 would need 9.00 GiB"
    )
    assert makeup(training) == (
        "filled by saved activations 4.00 GiB, weights 1.00 GiB,"
        " reserved beyond tensors 1.00 GiB, CUDA context 1.00 GiB, rest <0.01 MiB"
    )
    text = render(training, "human", width=100)
    for said in ("no, at least 9.0 GiB", "sdpa attention", "cost: one more forward pass"):
        assert said in text
    assert "args = TrainingArguments(per_device_train_batch_size=2)" in text.splitlines()


def test_training_that_does_not_fit_says_how_much_is_missing(training: TrainingFit) -> None:
    none = replace(training, batch_size=0, memory=6 * GIB, code=None, more=None, more_peak=None)
    assert (none.fits, none.missing) == (False, GIB)
    assert verdict(none).endswith("needs 7.00 GiB, 1.00 GiB too much")


@pytest.mark.parametrize("form", FORMATS)
def test_every_form_ends_without_a_line_end(found: Fit, training: TrainingFit, form: str) -> None:
    for each in (found, training):
        assert render(each, form) == render(each, form).rstrip("\n")


def test_markdown_escapes_names_and_keeps_commands(found: Fit) -> None:
    text = render(found, "md")
    assert "a\\|b" in text
    assert "```\nfeatherweight generate me/it PROMPT --recipe nf4:double\n" in text


def test_json_is_the_data(found: Fit, training: TrainingFit) -> None:
    document = json.loads(render(found, "json"))
    assert (document["kind"], document["fits"], document["schema"]) == ("inference", True, 1)
    assert document["rows"][0]["peak"] == 6 * GIB
    document = json.loads(render(training, "json"))
    assert (document["kind"], document["batch_size"], document["base"]) == ("training", 2, GIB)


def test_csv_has_a_line_for_each_recipe_setting_and_change(
    found: Fit, training: TrainingFit
) -> None:
    rows = list(csv.DictReader(io.StringIO(render(found, "csv"))))
    assert [(r["recipe"], r["peak"]) for r in rows] == [
        ("nf4:double", str(6 * GIB)),
        ("int8", str(9 * GIB)),
        ("bf16", ""),
    ]
    rows = list(csv.DictReader(io.StringIO(render(training, "csv"))))
    assert [r["kind"] for r in rows] == ["tried", "tried", "tried", "change"]
    assert (rows[-1]["label"], rows[-1]["batch_size"]) == ("sdpa attention", "4")


def test_a_form_that_is_none_is_refused(found: Fit) -> None:
    with pytest.raises(FeatherweightError, match="unknown report format 'xml'"):
        render(found, "xml")
