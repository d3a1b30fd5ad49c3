"""`featherweight generate` as a user runs it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(400)  # a command takes seconds to import its libraries


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_bert: Path, run_all: Any
) -> dict[str, Any]:
    silent = tmp_path_factory.mktemp("silent") / "llama"
    shutil.copytree(tiny_llama, silent, ignore=shutil.ignore_patterns("*token*"))
    text = ("generate", tiny_llama, "A class is", "-n", 8)
    return run_all(
        {
            "greedy": text,
            "sample": (*text, "--sample"),
            "recipe": (*text, "--sample", "--recipe", "fp32", "--threads", 1),
            "encoder": ("generate", tiny_bert, "A class is"),
            "silent": ("generate", silent, "A class is"),
        }
    )


def test_text_goes_to_stdout_and_figures_to_stderr(done: dict[str, Any]) -> None:
    greedy = done["greedy"]
    assert greedy.status == 0
    assert len(greedy.out.strip()) > 3
    for figure in ("prefill", "decode", "t/s", "weights", "recipe none: float32 as it is"):
        assert figure in greedy.complaint
    share = re.search(
        r"decode .* t/s \(8 tokens\), (\d+) % of the read bandwidth", greedy.complaint
    )
    assert share
    assert 0 <= int(share[1]) < 100


def test_a_recipe_is_applied_and_named(done: dict[str, Any]) -> None:
    assert done["recipe"].status == 0
    assert "recipe fp32" in done["recipe"].complaint


def test_sampling_differs_from_greedy_and_repeats_by_its_seed(done: dict[str, Any]) -> None:
    assert done["sample"].out != done["greedy"].out
    assert done["sample"].out == done["recipe"].out


@pytest.mark.parametrize(
    ("name", "says"), [("encoder", "(BertModel) does not write text"), ("silent", "no tokenizer")]
)
def test_models_that_cannot_are_one_line(done: dict[str, Any], name: str, says: str) -> None:
    assert (done[name].status, done[name].out) == (2, "")
    assert says in done[name].complaint


def test_a_reader_that_stops_early_is_no_error(tiny_llama: Path, start: Any) -> None:
    process = start("generate", tiny_llama, "A class is", "-n", 8)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() in (0, 1)
    assert "Traceback" not in errors
    assert "Error" not in errors
