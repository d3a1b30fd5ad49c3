"""`featherweight profile` as a user runs it."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)  # a command takes seconds to import its libraries


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_bert: Path, run_all: Any
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("profile")
    bare = folder / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((tiny_llama / "config.json").read_text())
    short = ("-p", 8, "-r", 1)
    return run_all(
        {
            "human": ("profile", tiny_llama, *short, "--lengths", "16000,100000"),
            "json": ("profile", tiny_bert, *short, "--train", "--format", "json"),
            "file": ("profile", tiny_llama, *short, "--format", "csv", "-o", folder / "p.csv"),
            "bare": ("profile", bare, *short),
            "encoder": ("profile", tiny_bert, *short, "--decode"),
            "unwritable": ("profile", tiny_llama, *short, "-o", folder / "no" / "p.csv"),
        }
    ) | {"written": folder / "p.csv"}


def test_a_table_goes_to_stdout_and_progress_to_stderr(done: dict[str, Any]) -> None:
    human = done["human"]
    assert human.status == 0, human.errors
    for said in ("forward 1 × 8 tokens", "tensor contraction", "outside of operations", "100,000"):
        assert said in human.out
    assert "run 1 of 1" in human.errors
    assert all(line.startswith("[") for line in human.errors.splitlines())


def test_json_has_both_phases(done: dict[str, Any]) -> None:
    assert done["json"].status == 0, done["json"].errors
    document = json.loads(done["json"].out)
    assert document["schema"] == 1
    assert {o["phase"] for o in document["operations"]} == {"forward", "backward"}
    assert document["settings"]["pass"] == "train"


def test_a_file_is_written_whole(done: dict[str, Any]) -> None:
    assert (done["file"].status, done["file"].out) == (0, "")
    rows = list(csv.DictReader(io.StringIO(done["written"].read_text())))
    assert {"mm", "outside of operations"} <= {row["name"] for row in rows}
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("bare", "a profile runs the model for real, so that a config alone is not enough"),
        ("encoder", "BertModel writes no text"),
        ("unwritable", "cannot write to"),
    ],
)
def test_what_cannot_be_is_one_line(done: dict[str, Any], name: str, says: str) -> None:
    assert (done[name].status, done[name].out) == (2, "")
    assert says in done[name].complaint
