"""`featherweight quantize` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import featherweight as fw

pytestmark = pytest.mark.timeout(400)  # a command takes seconds to import its libraries


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, run_all: Any
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("quantize")
    (root / "file").write_text("mine")
    given = ("quantize", tiny_llama)
    commands = {
        "plain": (*given, "nf4:double", "-o", root / "plain"),
        "detail": (*given, "bf16+int8", "-o", root / "deep" / "er", "--detail", "--threads", 1),
        "file": (*given, "nf4", "-o", root / "file"),
        "unsaved": (*given, "int8:head=int8", "-o", root / "unsaved"),
        "recipe": (*given, "nf5", "-o", root / "recipe"),
        "no output": (*given, "nf4"),
    }
    return {"root": root} | run_all(commands)


def test_it_says_what_was_written(done: dict[str, Any]):
    plain, folder = done["plain"], done["root"] / "plain"
    assert plain.status == 0
    size = (folder / "model.safetensors").stat().st_size
    assert plain.out == f"{folder}: {size / 2**20:,.1f} MiB of weights\n"
    assert plain.errors.splitlines()[0].startswith("nf4:double: 0.4 MiB → 0.1 MiB")
    assert "changed 14 modules: Linear → FourBitLinear" in plain.errors
    loaded = fw.load(folder)
    assert loaded.tokenizer is not None
    assert loaded.model.config.quantization_config.stored["bnb_4bit_use_double_quant"] is True


def test_detail_is_json(done: dict[str, Any]):
    detail = done["detail"]
    assert detail.status == 0
    receipt = json.loads(detail.out)
    assert receipt["recipe"] == "bf16+int8"
    assert sum(change["action"] == "changed" for change in receipt["changes"]) == 14
    assert fw.load(done["root"] / "deep" / "er").provenance.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("file", "is a file"),
        ("unsaved", "'model.embed_tokens' is an int8 embedding, which bitsandbytes cannot read"),
        ("recipe", "unknown technique 'nf5'; nearest: "),
        ("no output", "Missing option '--output' / '-o'"),
    ],
)
def test_one_line_and_nothing_written(done: dict[str, Any], name: str, says: str):
    assert done[name].status == 2
    assert says in done[name].complaint
    assert done[name].out == ""
    assert sorted(path.name for path in done["root"].iterdir()) == ["deep", "file", "plain"]
    assert (done["root"] / "file").read_text() == "mine"
