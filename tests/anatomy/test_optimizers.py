"""Optimizers of a dry run: the size of their states, and which one a name stands for."""

from __future__ import annotations

import pytest
import torch

import featherweight as fw
from featherweight.anatomy import optimizers
from featherweight.anatomy.eras import Era


@pytest.mark.parametrize(
    ("optimizer", "bytes_a_parameter"),
    [
        ("none", 0.0),
        ("sgd", 0.0),
        ("sgd-momentum", 4.0),
        ("adamw_torch", 8.0),
        ("adamw_torch_fused", 8.0),
        ("adamw_hf", 8.0),
        ("adam8bit", 2 * (1 + 4 / 256)),
    ],
)
def test_states_of_optimizers(tiny: dict, optimizer: str, bytes_a_parameter: float) -> None:
    large = tiny | {"vocab_size": 20_000}
    found = fw.memory(large, "fp32", train=True, batch_size=1, seq_len=8, optimizer=optimizer)
    highest = max(moment.categories.get("optimizer state", 0) for moment in found.timeline)
    assert highest == pytest.approx(bytes_a_parameter * found.parameters, rel=0.01, abs=600)


def test_trainer_keeps_the_states_of_embeddings_in_32_bits(tiny: dict) -> None:
    options = {"train": True, "batch_size": 1, "seq_len": 8}
    large = tiny | {"vocab_size": 20_000}
    states = []
    for optimizer in ("adam8bit", "adamw_bnb_8bit", "paged_adamw_8bit"):
        found = fw.memory(large, "fp32", optimizer=optimizer, **options)
        states.append(max(m.categories.get("optimizer state", 0) for m in found.timeline))
    assert states[1] == states[2]
    lion = fw.memory(large, "fp32", optimizer="lion_8bit", **options)
    assert 2 * max(m.categories.get("optimizer state", 0) for m in lion.timeline) == states[1]
    assert states[1] - states[0] == 2 * 20_000 * 64 * (4 - 1) - 2 * 4 * 20_000 * 64 // 256


def test_adafactor_keeps_rows_and_columns(tiny: dict) -> None:
    found = fw.memory(tiny, "fp32", train=True, batch_size=1, seq_len=8, optimizer="adafactor")
    highest = max(moment.categories.get("optimizer state", 0) for moment in found.timeline)
    assert 0 < highest < 0.1 * 4 * found.parameters


def test_every_optimizer_is_made(tiny: dict) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4))]
    era = Era.of(torch.__version__)
    made = {
        name: optimizers.make(optimizers.resolve(name, era), parameters, at_once=False)
        for name in optimizers.NAMES
    }
    assert made["none"] is None
    assert all(made[name] is not None for name in optimizers.NAMES if name != "none")


def test_adamw_is_what_trainer_takes_by_itself() -> None:
    from transformers import TrainingArguments

    found = optimizers.resolve("adamw", Era.of(torch.__version__))
    assert found == str(TrainingArguments.default_optim)
    assert optimizers.resolve("adamw", Era.of("2.3")) == "adamw_torch"
