"""What is occupied now: bytes of a model, of the process, and one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from featherweight.anatomy.now import Now, OnGpu, memory_now

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


@linux
def test_a_new_tensor_is_seen() -> None:
    before = memory_now()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    after = memory_now()
    assert after.anonymous is not None
    assert before.anonymous is not None
    assert abs(after.anonymous - before.anonymous - block.numel()) < 4 * MIB
    assert after.file is not None
    assert after.resident == after.anonymous + after.file


def test_a_model_is_counted_once_and_its_mapped_part_told(
    tiny_llama: Path, read: Callable[..., Any]
) -> None:
    linear = nn.Linear(100, 50)
    assert memory_now(linear).model == 4 * 5050
    assert memory_now(linear).mapped == 0
    assert memory_now().model is None
    model = read(tiny_llama)  # its weights are views of the file, the tied head among them
    found = memory_now(model)
    assert found.model is not None
    assert found.mapped is not None
    assert found.model - found.mapped < 1024  # the frequencies of positions
    assert found.mapped == 4 * sum(p.numel() for p in model.parameters())


def test_it_is_one_line_and_plain_data() -> None:
    on_gpu = OnGpu("cuda:0", allocated=3 * MIB, reserved=20 * MIB, process=520 * MIB)
    now = Now(700 * MIB, 600 * MIB, 100 * MIB, [on_gpu], model=50 * MIB, mapped=10 * MIB)
    assert str(now) == (
        "process 700 MiB (600 MiB its own, 100 MiB of files);"
        " model 50.0 MiB (10.0 MiB mapped from a file);"
        " cuda:0: allocated 3.00 MiB, reserved 20.0 MiB, process 520 MiB"
    )
    assert str(Now(700 * MIB, None, None, [])) == "process 700 MiB"
    assert json.loads(json.dumps(now.to_json()))["gpus"][0]["reserved"] == 20 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_seen_when_torch_uses_it() -> None:
    block = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    (found,) = (gpu for gpu in memory_now().gpus if gpu.device == "cuda:0")
    assert found.allocated >= block.numel()
    assert found.process > found.reserved >= found.allocated


def test_it_is_printed_unless_asked_not_to(capsys: pytest.CaptureFixture[str]) -> None:
    shown = memory_now()
    assert capsys.readouterr().out == f"{shown}\n"
    memory_now(quiet=True)
    assert capsys.readouterr().out == ""
