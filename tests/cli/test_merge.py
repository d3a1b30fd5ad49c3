"""`featherweight merge` as a user runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import featherweight as fw

pytest.importorskip("peft", reason="PEFT is an optional extra")
pytestmark = pytest.mark.timeout(400)  # a command takes seconds to import its libraries


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, read: Any, run_all: Any
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("merge")
    model = read(tiny_llama)
    torch.manual_seed(0)
    with fw.apply(model, "lora:target=q_proj,v_proj"):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(root / "adapter")
    given = ("merge", tiny_llama, root / "adapter", "-o")
    commands = {
        "plain": (*given, root / "plain", "--verify", "--dtype", "bf16"),
        "none": ("merge", tiny_llama, root / "nothing", "-o", root / "none"),
        "onto base": (*given, tiny_llama),
    }
    return {"root": root} | run_all(commands)


def test_it_says_what_was_written(done: dict[str, Any]) -> None:
    plain = done["plain"]
    assert (plain.status, plain.errors) == (0, "")
    first, second = plain.out.splitlines()
    assert first == f"{done['root'] / 'plain'}: bfloat16, adapter merged into 4 modules"
    assert second.startswith("verified, relative difference of outputs: right 0.0")
    assert fw.load(done["root"] / "plain").provenance.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("none", "holds no adapter: it has no adapter_config.json"),
        ("onto base", "is the folder of the base; name a new folder with -o"),
    ],
)
def test_errors_are_one_line(done: dict[str, Any], name: str, says: str) -> None:
    assert (done[name].status, done[name].out) == (2, "")
    assert says in done[name].complaint
    assert not (done["root"] / "none").exists()
