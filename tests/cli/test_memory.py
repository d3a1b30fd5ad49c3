"""`featherweight memory` as a user runs it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import featherweight as fw
from featherweight.anatomy.result import Memory
from featherweight.anatomy.trace import CATEGORIES
from featherweight.report.memory_tables import amount

pytestmark = pytest.mark.timeout(400)  # a command takes seconds to import its libraries

TRAIN = ("--train", "-b", 2, "--seq-len", 32, "--gpu", "t4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("memory")


@pytest.fixture(scope="module")
def done(folder: Path, tiny_llama: Path, tiny_bert: Path, run_all: Callable) -> dict[str, Any]:
    llama = ("memory", tiny_llama)
    return run_all(
        {
            "human": (*llama, "fp32+eager", *TRAIN),
            "json": (*llama, "--recipe", "fp32+eager", *TRAIN, "--format", "json"),
            "csv": (*llama, "fp32+eager", *TRAIN, "--format", "csv", "-o", folder / "m.csv"),
            "md": (*llama, "-p", 16, "-n", 4, "--detail", "--format", "md"),
            "cpu": (*llama, "-p", 16, "-n", 4, "--num-beams", 2, "--format", "json"),
            "context": (
                *(*llama, "-p", 16, "-n", 4, "--gpu", "a100-40gb"),
                *("--cuda-context", "1343MiB", "--format", "json"),
            ),
            "forward": ("memory", tiny_bert, "--forward", "--seq-len", 16, "--detail"),
        }
    )


def document(done: dict[str, Any], name: str) -> dict[str, Any]:
    assert done[name].status == 0, done[name].errors
    found: dict[str, Any] = json.loads(done[name].out)
    return found


def test_the_headline_is_the_json_s_process(done: dict[str, Any]) -> None:
    assert done["human"].status == 0, done["human"].errors
    peak = document(done, "json")["peak"]
    first = done["human"].out.splitlines()[0]
    assert first.startswith(f"{amount(peak['process'])} as nvidia-smi would show it: ")
    assert "15 GiB of t4" in first
    assert f"tensors {amount(peak['allocated'])}" in done["human"].out


def test_categories_add_up_to_what_is_allocated(done: dict[str, Any]) -> None:
    for name in ("json", "cpu", "context"):
        found = document(done, name)
        assert sum(found["categories"].values()) == found["peak"]["allocated"]
        assert found["peak"]["process"] == found["peak"]["reserved"] + found["base"]
    assert document(done, "context")["base"] == 1343 * 2**20


def test_json_is_the_result_of_the_function(done: dict[str, Any], tiny_llama: Path) -> None:
    again = fw.memory(str(tiny_llama), "fp32+eager", train=True, batch_size=2, seq_len=32, gpu="t4")
    assert Memory.from_json(document(done, "json")) == again


def test_nothing_but_data_goes_to_stdout(done: dict[str, Any]) -> None:
    for name in ("human", "json", "md", "cpu", "forward"):
        assert all(line.startswith("[") for line in done[name].errors.splitlines()), name


def test_a_sheet_is_written_to_its_file(done: dict[str, Any], folder: Path) -> None:
    assert (done["csv"].status, done["csv"].out) == (0, "")
    assert done["csv"].complaint == f"written to {folder / 'm.csv'}"
    (row,) = csv.DictReader(io.StringIO((folder / "m.csv").read_text()))
    peak = document(done, "json")["peak"]
    assert {name: int(row[name]) for name in peak} == peak
    assert sum(int(row[name]) for name in CATEGORIES) == peak["allocated"]
    assert [path.name for path in folder.iterdir()] == ["m.csv"]


def test_markdown_has_the_tables(done: dict[str, Any]) -> None:
    assert done["md"].status == 0, done["md"].errors
    assert done["md"].out.startswith("**")
    for said in ("| KV cache |", "largest at the peak:", "| prefill |", "| decode |"):
        assert said in done["md"].out


def test_details_of_a_forward_pass(done: dict[str, Any]) -> None:
    assert done["forward"].status == 0, done["forward"].errors
    for said in ("forward pass, batch 1 × 16 tokens", "at the peak", "peak of each phase", "│"):
        assert said in done["forward"].out


def test_a_page_is_written_beside_the_answer(
    folder: Path, tiny_llama: Path, run: Callable, tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "memory.html"
    result = run("memory", tiny_llama, *TRAIN, "--format", "json", "--html", page)
    assert result.status == 0, result.errors
    data = page.read_text("utf-8").split('id="memory">')[1].split("</script>")[0]
    assert json.loads(data) == json.loads(result.out)
    assert result.complaint == f"written to {page}"
    assert list(tmp_path.iterdir()) == [page]


@pytest.fixture(scope="module")
def refused(folder: Path, tiny_llama: Path, run_all: Callable) -> dict[str, Any]:
    llama = ("memory", tiny_llama)
    return run_all(
        {
            "model": ("memory", "./no-such-folder"),
            "gpu": (*llama, "--gpu", "a999"),
            "optimizer": (*llama, "--train", "--optimizer", "adamx"),
            "batch": (*llama, "-b", 0),
            "huge": (*llama, "-b", 10**15),
            "technique": (*llama, "nf5"),
            "context": (*llama, "--gpu", "t4", "--cuda-context", "12G"),
            "recipes": (*llama, "fp32", "--recipe", "bf16"),
            "ignored": (*llama, "--seq-len", 5),
            "lengths": ("memory", "bert-large", "--forward", "--seq-len", 4096),
            "measure": (*llama, "--measure", "--torch", "1.10"),
            "unwritable": (*llama, "--html", folder / "no" / "m.html"),
        }
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model", "no file or folder './no-such-folder'"),
        ("gpu", "no GPU is known as 'a999'; known: gtx1080ti"),
        ("optimizer", "no optimizer is known as 'adamx'; allowed: adamw, none"),
        ("batch", "0 is not in the range x>=1"),
        ("huge", "cannot run generation, batch 1000000000000000"),
        ("technique", "unknown technique 'nf5'; nearest: nf4"),
        ("context", "'12G' is no size; write 1343MiB, 12GiB, 8GB or bytes"),
        ("recipes", "two recipes, 'fp32' and 'bf16'; name one"),
        ("ignored", "--seq-len means nothing to generation: it needs --train or --forward"),
        ("lengths", "'bert-large' has 512 positions, and 4,096 tokens are asked for"),
        ("measure", "--measure runs the versions at hand; leave --torch out"),
        ("unwritable", "name a file in a folder that can be written to"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(
    refused: dict[str, Any], name: str, said: str
) -> None:
    result = refused[name]
    assert (result.status, result.out) == (2, "")
    assert result.complaint.startswith("featherweight: ")
    assert said in result.complaint


def test_what_if_and_measure_are_shown_with_the_prediction(
    tiny_llama: Path, run_all: Callable
) -> None:
    asked = ("memory", tiny_llama, "fp32+eager", "--train", "-b", 2, "--seq-len", 32)
    done = run_all(
        {
            "what if": (*asked, "--what-if", "--format", "json"),
            "measure": (*asked, "--measure", "--format", "json"),
        }
    )
    found = document(done, "what if")
    assert found["what_if"]
    for change in found["what_if"]:
        assert change["saved"] == found["peak"]["process"] - change["peak"]["process"]
        assert change["command"].startswith("featherweight memory ")
    measured = document(done, "measure")
    assert measured["measured"]["process"] == pytest.approx(measured["peak"]["process"], rel=0.2)
