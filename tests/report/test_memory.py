"""A prediction of memory as text: one figure first, and sums that agree."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from typing import Any

import pytest

import featherweight as fw
from featherweight.anatomy.measured import Measured
from featherweight.anatomy.result import Memory
from featherweight.anatomy.trace import CATEGORIES
from featherweight.anatomy.what_if import Change
from featherweight.errors import FeatherweightError
from featherweight.report import memory_tables as tables
from featherweight.report.memory import detail, human, markdown, render

MIB, GIB = 2**20, 2**30


@pytest.fixture(scope="module")
def found() -> Memory:
    """A step of training of a small Llama on a GPU."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "dtype": "float32",
    }
    return fw.memory(config, "fp32+eager", train=True, batch_size=2, seq_len=64, gpu="t4")


@pytest.fixture(scope="module")
def on_cpu(found: Memory) -> Memory:
    peak = replace(found.peak, reserved=found.peak.allocated, process=found.peak.allocated + GIB)
    return replace(found, device="cpu", base=GIB, peak=peak)


@pytest.fixture(scope="module")
def change(found: Memory) -> Change:
    lighter = replace(found, recipe="bf16", peak=replace(found.peak, process=300 * MIB))
    saved = found.peak.process - 300 * MIB
    return Change("bf16 | half", "bf16", saved, lighter, "featherweight memory x bf16", "rounding")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 MiB"),
        (100, "<0.01 MiB"),
        (16416, "0.0157 MiB"),
        (300 * MIB, "300 MiB"),
        (1536 * MIB, "1.50 GiB"),
        (11756634112, "10.9 GiB"),
    ],
)
def test_sizes_have_their_unit(nbytes: int, text: str) -> None:
    assert tables.amount(nbytes) == text


def test_the_first_figure_is_the_process(found: Memory, on_cpu: Memory) -> None:
    for memory, seen_by in ((found, "nvidia-smi"), (on_cpu, "system monitor")):
        first = human(memory).splitlines()[0]
        assert first.startswith(f"{tables.amount(memory.peak.process)} as ")
        assert seen_by in first
    assert str(found) == human(found)


def test_what_the_figure_is_made_of_adds_up(found: Memory, on_cpu: Memory) -> None:
    assert sum(found.categories.values()) == found.peak.allocated
    assert found.peak.reserved + found.base == found.peak.process
    text = human(found, width=200)
    split = (
        f"tensors {tables.amount(found.peak.allocated)}, reserved for them"
        f" {tables.amount(found.peak.reserved)}, CUDA context 300 MiB; the peak is in"
        f" {found.phase}"
    )
    assert split in text.splitlines()
    assert "Python and libraries 1.00 GiB" in human(on_cpu, width=200)
    for name, nbytes in found.categories.items():
        assert f"{name} {tables.amount(nbytes)}" in text


def test_it_says_whether_the_gpu_has_room(found: Memory) -> None:
    share = f"{100 * found.peak.process / (15 * GIB):.0f} % of the 15 GiB of t4"
    assert share in human(found, width=200)
    over = replace(found, peak=replace(found.peak, process=15 * GIB + 1))
    assert "more than the 15 GiB of t4" in human(over, width=200)
    assert "\x1b[31m" in human(over, color=True)
    assert "\x1b[31m" not in human(found, color=True)


def test_notes_and_kernels_are_said(found: Memory) -> None:
    noted = replace(found, notes=["every expert\x1b[2J alike"], attention=["flash", "math"])
    lines = human(noted, width=200).splitlines()
    assert lines[-2:] == ["every expert[2J alike", "attention kernels: flash, math"]


def test_details_are_the_tables_of_the_peak(found: Memory) -> None:
    text = detail(found, width=160)
    lines = text.splitlines()
    for name, nbytes in found.categories.items():
        assert any(li.startswith(name) and tables.amount(nbytes) in li for li in lines), name
    largest = found.holders[0]
    row = next(li for li in lines if largest.operation in li and largest.category in li)
    assert tables.amount(largest.nbytes) in row
    assert row.endswith(f"{largest.count:,}")
    for phase, nbytes in found.phases.items():
        assert any(li.startswith(phase) and tables.amount(nbytes) in li for li in lines), phase
    assert f"torch {found.versions['torch']}" in lines[-1]


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_no_line_is_wider_than_the_terminal_and_no_name_is_cut(found: Memory, width: int) -> None:
    text = detail(found, width=width)
    assert max(map(len, text.splitlines())) <= width
    if width == 160:
        assert found.holders[0].module in text


def test_the_sparkline_is_full_at_the_peak_and_has_its_phases(found: Memory) -> None:
    bars, ruler = tables.sparkline(found, width=72)
    assert len(bars) == 72
    assert "█" in bars
    order = [name for name, _ in tables.stretches(found.timeline)]
    assert order == ["load", *["forward", "backward", "optimizer"] * 2]
    assert ruler.count("│") == len(order)
    peak_phase_begins = ruler.rindex(f"│{found.phase}"[:4])
    assert bars.rindex("█") >= peak_phase_begins
    assert tables.sparkline(replace(found, timeline=[])) == []


def test_markdown_escapes_and_has_every_category(found: Memory) -> None:
    text = markdown(replace(found, model="a|b<c>", notes=["_x_"]), detailed=True)
    assert text.startswith(f"**{tables.amount(found.peak.process)}** ")
    assert r"a\|b\<c>" in text
    assert r"- \_x\_" in text
    for name, nbytes in found.categories.items():
        assert f"| {name} | {tables.amount(nbytes)}".replace("<", r"\<") in text
    assert "largest at the peak" in text
    assert "largest at the peak" not in markdown(found)


def test_json_is_the_result(found: Memory) -> None:
    assert Memory.from_json(json.loads(render(found, "json"))) == found


def test_csv_has_a_column_for_every_category(found: Memory, change: Change) -> None:
    asked, changed = csv.DictReader(io.StringIO(render(found, "csv", changes=[change])))
    assert sum(int(asked[name]) for name in CATEGORIES) == int(asked["allocated"])
    assert int(asked["process"]) == found.peak.process
    assert asked["what_if"] == ""
    assert (changed["what_if"], changed["recipe"]) == ("bf16 | half", "bf16")
    assert int(changed["process"]) == 300 * MIB


@pytest.mark.parametrize("form", ["human", "md"])
def test_changes_stand_with_their_cost_and_a_command(
    found: Memory, change: Change, form: str
) -> None:
    text = render(found, form, changes=[change], width=100)
    (row,) = [line for line in text.splitlines() if "half" in line]
    for said in (tables.amount(change.saved), "300 MiB", "rounding"):
        assert said in row
    assert change.command in [line.strip() for line in text.splitlines()]
    assert "nothing that is known would" in render(found, form, changes=[])


def test_changes_and_measurement_are_in_json(found: Memory, change: Change) -> None:
    measured = Measured(
        device="cuda:0",
        allocated=found.peak.allocated,
        resident=None,
        reserved=found.peak.reserved,
        process=found.peak.process,
        seconds=1.5,
        note="random weights",
    )
    document = json.loads(render(found, "json", changes=[change], measured=measured))
    (written,) = document["what_if"]
    assert written["peak"]["process"] == 300 * MIB
    assert (written["saved"], written["command"]) == (change.saved, change.command)
    assert document["measured"]["allocated"] == found.peak.allocated
    assert document["measured"]["resident"] is None


def test_a_measurement_stands_beside_the_prediction(found: Memory) -> None:
    measured = Measured(
        device="cpu",
        allocated=found.peak.allocated,
        resident=None,
        reserved=found.peak.reserved,
        process=2 * found.peak.process,
        seconds=1.25,
        note="in one child",
    )
    lines = render(found, "human", measured=measured, width=100).splitlines()
    assert "measured on cpu in 1.2 s; in one child" in lines
    rows = {line.split()[0]: line for line in lines if line.endswith(" %")}
    assert rows["tensors"].endswith("+0.0 %")
    assert rows["process"].endswith("-50.0 %")
    assert "resident" not in rows


def test_an_unknown_format_is_refused(found: Memory) -> None:
    with pytest.raises(FeatherweightError, match="choose one of human, md, json, csv"):
        render(found, "xml")
