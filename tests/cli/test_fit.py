"""`featherweight fit` as a user runs it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)  # a command takes seconds to import its libraries

GPU = ("--gpu", "t4", "--cuda-context", "100MiB")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fit")


@pytest.fixture(scope="module")
def done(folder: Path, tiny_llama: Path, tiny_bert: Path, run_all: Callable) -> dict[str, Any]:
    llama = ("fit", tiny_llama)
    train = ("--train", "--seq-len", 32)
    return run_all(
        {
            "human": (*llama, "--memory", "2GiB", "--ctx", 64),
            "file": (*llama, *GPU, "--format", "csv", "-o", folder / "f.csv"),
            "nothing": (*llama, *GPU, "--memory", "101MiB", "--format", "json"),
            "train": (
                *("fit", tiny_bert, *GPU, *train, "--memory", "140MiB", "--recipe", "fp32+eager"),
                *("--task", "sequence-classification", "--format", "json"),
            ),
            "accumulated": (*llama, *GPU, *train, "-m", "150MiB", "-b", 6, "--format", "md"),
            "size": (*llama, "--memory", "lots"),
            "ignored": (*llama, "--seq-len", 8),
            "contrary": (*llama, "--train", "--ctx", 8),
            "recipe": (*llama, "--recipe", "int9"),
            "unknown": ("fit", folder / "none"),
        }
    )


def test_a_table_goes_to_stdout_and_progress_to_stderr(done: dict[str, Any]) -> None:
    human = done["human"]
    assert human.status == 0, human.errors
    for said in ("fastest that fits: ", "64 in all, as asked", "featherweight generate", "t/s ≤"):
        assert said in human.out
    assert "dry run of nf4:double: generation, batch 1" in human.errors
    assert all(line.startswith("[") for line in human.errors.splitlines()), human.errors


def test_a_file_is_written_whole(done: dict[str, Any], folder: Path) -> None:
    assert (done["file"].status, done["file"].out) == (0, "")
    rows = list(csv.DictReader(io.StringIO((folder / "f.csv").read_text())))
    assert {row["recipe"] for row in rows} == {
        "fp32",
        "fp16",
        "bnb-int8",
        "bnb-nf4:double:compute=fp16",
    }
    assert all(row["fits"] == "True" for row in rows)
    assert all(row["context"] == "256" for row in rows)  # all that the model was made for


def test_the_status_is_1_where_nothing_fits(done: dict[str, Any]) -> None:
    assert done["nothing"].status == 1, done["nothing"].errors
    document = json.loads(done["nothing"].out)
    assert document["fits"] is False
    assert min(row["missing"] for row in document["rows"]) > 0


def test_training_gives_the_largest_micro_batch(done: dict[str, Any]) -> None:
    assert done["train"].status == 0, done["train"].errors
    document = json.loads(done["train"].out)
    assert document["batch_size"] > 1
    assert document["more"] == document["batch_size"] + 1
    assert document["peak"] <= 140 * 2**20 < document["more_peak"]
    assert document["base"] == 100 * 2**20


def test_a_batch_is_made_of_micro_batches(done: dict[str, Any]) -> None:
    assert done["accumulated"].status == 0, done["accumulated"].errors
    assert done["accumulated"].out.startswith("**micro-batch 6: peak ")
    assert "TrainingArguments(per_device_train_batch_size=6)" in done["accumulated"].out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("size", "'lots' is no size"),
        ("ignored", "--seq-len needs --train"),
        ("contrary", "--ctx means nothing to training"),
        ("recipe", "unknown technique 'int9'"),
        ("unknown", "no file or folder"),
    ],
)
def test_what_cannot_be_is_one_line(done: dict[str, Any], name: str, says: str) -> None:
    assert (done[name].status, done[name].out) == (2, "")
    assert says in done[name].complaint
