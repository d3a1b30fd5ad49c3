"""A real Trainer with the callback: what is known to the byte, and what is printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from mmap import PAGESIZE, mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from featherweight.anatomy.high_water import HighWater
from featherweight.integrations.trainer import FeatherweightMemory, TrainingMemory

MIB = 1 << 20
STEPS, BATCH, LENGTH = 3, 4, 64
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel keeps the mark")


@pytest.fixture
def train(tiny_config: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """`train(**arguments)`: the model and the callback after three steps of four rows."""

    def run(*, freeze: bool = False, **changes: Any) -> tuple[Any, FeatherweightMemory]:
        torch.manual_seed(0)
        model = LlamaForCausalLM(tiny_config(tie_word_embeddings=False))
        model.model.embed_tokens.requires_grad_(not freeze)
        ids = torch.arange(BATCH * STEPS * 2 * LENGTH).reshape(-1, LENGTH) % 384
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            **changes,
        )
        callback = FeatherweightMemory()
        rows = [{"input_ids": row, "labels": row} for row in ids]
        Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
        return model, callback

    return run


def _bytes(model: Any, *, trained: bool = False) -> int:
    return sum(4 * p.numel() for p in model.parameters() if p.requires_grad or not trained)


def test_weights_gradients_and_states_are_exact(
    train: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, callback = train()
    found = callback.summary
    frequencies = 2 * 8 * 4  # of rotary positions, and transformers' copy of them
    steps = 4 * len(list(model.parameters()))  # AdamW counts them for each tensor
    assert found.weights == _bytes(model) + frequencies
    assert found.gradients == _bytes(model)
    assert found.optimizer_state == 2 * _bytes(model) + steps
    assert (found.device, found.steps, found.reserved) == ("cpu", STEPS, None)
    assert found.peak == found.process
    said = capsys.readouterr().out
    assert said.count("Peak memory of the process on cpu") == 1
    assert str(found) in said
    assert json.loads(json.dumps(found.to_json()))["gradients"] == _bytes(model)


def test_frozen_weights_have_neither(train: Callable[..., Any]) -> None:
    model, callback = train(freeze=True, optim="sgd", gradient_accumulation_steps=2)
    assert callback.summary.gradients == _bytes(model, trained=True) < _bytes(model)
    assert callback.summary.optimizer_state == 0


def test_time_and_speed_are_those_of_trainer(train: Callable[..., Any]) -> None:
    _, callback = train(gradient_accumulation_steps=2)
    found = callback.summary
    assert found.steps == STEPS
    assert found.samples_per_second == pytest.approx(STEPS * BATCH * 2 / found.seconds, rel=0.02)


def test_only_the_main_process_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import TrainerControl, TrainerState

    arguments, control = TrainingArguments(use_cpu=True, report_to=[]), TrainerControl()
    state = TrainerState(is_world_process_zero=False)
    model, callback = torch.nn.Linear(2, 2), FeatherweightMemory()
    callback.on_train_begin(arguments, state, control)
    callback.on_train_end(arguments, state, control, model=model)
    assert capsys.readouterr().out == ""
    assert callback.summary is not None
    assert callback.summary.weights == 24


def test_the_parts_are_shown_in_one_unit_each() -> None:
    found = TrainingMemory(
        device="cuda:0",
        seconds=12.34,
        steps=20,
        samples_per_second=6.78,
        peak=700 * MIB,
        before=100 * MIB,
        weights=100 * MIB,
        gradients=100 * MIB,
        optimizer_state=200 * MIB,
        rest=300 * MIB,
        reserved=800 * MIB,
        process=1300 * MIB,
    )
    assert str(found).splitlines() == [
        "Training took 12.3 s for 20 steps, 6.78 samples/s",
        "Peak memory of tensors on cuda:0: 700 MiB",
        "  before training            100 MiB  (of it weights 100 MiB)",
        "  gradients                  100 MiB",
        "  optimizer state            200 MiB",
        "  activations and the rest   300 MiB",
        "Reserved 800 MiB, process 1.27 GiB",
    ]


@linux
def test_the_high_water_mark_is_of_what_comes_after() -> None:
    touched(256 * MIB).close()  # an earlier and higher one
    mark = HighWater()
    touched(64 * MIB).close()
    assert abs(mark.peak - mark.before - 64 * MIB) < 12 * MIB


def test_elsewhere_the_mark_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    mark = HighWater()
    with touched(64 * MIB):
        assert mark.peak - mark.before > 48 * MIB


def touched(size: int) -> mmap:
    """New pages of the system: what malloc gives may be of memory that the process has already."""
    pages = mmap(-1, size)
    for first in range(0, size, PAGESIZE):
        pages[first] = 1
    return pages
