"""The child's side: one answer a request on a clean pipe, and an end when nobody listens."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from featherweight.errors import FeatherweightError, ModelError, RecipeError
from featherweight.measure import worker

NOISY = """
import os
from transformers import LlamaForCausalLM
print("noise")
os.write(1, b"noise from below")
class Noisy(LlamaForCausalLM):
    pass
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    command = [sys.executable, "-P", "-m", "featherweight.measure.worker", "1", "0"]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        yield process
        process.kill()


def ask(process: subprocess.Popen[str], method: str, **arguments: Any) -> Any:
    assert process.stdin
    assert process.stdout
    process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def test_what_libraries_print_goes_to_standard_error(
    process: subprocess.Popen[str], tiny_llama: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_llama, tmp_path / "noisy")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["Noisy"], "auto_map": {"AutoModelForCausalLM": "noisy.Noisy"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "noisy.py").write_text(NOISY)
    request = {"recipe": None, "device": None, "trust_remote_code": True}

    answer = ask(process, "load", model=str(folder), **request)
    assert answer["ok"]["provenance"]["architecture"] == "Noisy"
    assert answer["ok"]["recipe"] == "fp32"

    out, errors = process.communicate()  # closes its standard input
    assert process.returncode == 0
    assert out == ""
    assert "noise\n" in errors
    assert "noise from below" in errors


def test_the_end_of_requests_ends_it_at_once(process: subprocess.Popen[str]) -> None:
    out, _ = process.communicate()
    assert (process.returncode, out) == (0, "")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RecipeError("no", hint="do"), "no; do"),
        (ValueError("\n first \nsecond"), "ValueError: first"),
        (KeyError(), "KeyError: "),
        (MemoryError(), "out of memory: an allocation failed"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "out of memory: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
        ),
    ],
)
def test_reasons_are_one_line(error: Exception, says: str) -> None:
    assert worker._reason(error) == says


def test_only_what_no_recipe_can_help_is_the_input() -> None:
    assert worker._about_input(FeatherweightError("the text is short"))
    assert worker._about_input(ModelError("no model"))
    assert not worker._about_input(RecipeError("no technique"))
    assert not worker._about_input(ValueError("a bug"))
