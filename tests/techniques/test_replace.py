"""Putting one layer in another's place: hooks, and parents that use a layer's weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw
from featherweight.nn import Int8Linear

RECIPES = ["int8", "nf4", "bf16:compute=fp32"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_hooks_go_along_and_can_be_removed(recipe: str):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    seen: list[str] = []
    before = model[0].register_forward_pre_hook(lambda m, args: seen.append(type(m).__name__))
    after = model[0].register_forward_hook(lambda m, args, out: out * 0)
    x = torch.ones(1, 32)
    with fw.apply(model, recipe):
        new = type(model[0]).__name__
        assert not model[0](x).any()
        after.remove()
        assert model[0](x).any()
        model[0].register_forward_hook(lambda m, args, out: seen.append("late"))
        model(x)
        assert seen == [new, new, new, "late"]
    before.remove()
    seen.clear()
    model(x)
    assert seen == ["late"]


def test_a_patched_forward_is_named(tiny_bert: Path, read: Any):
    model = read(tiny_bert)
    layer = model.encoder.layer[0].output.dense
    layer.forward = lambda x: nn.Linear.forward(layer, x) * 0
    with fw.apply(model, "int8") as applied:
        patched = [c.module for c in applied.receipt.changes if c.why and "patched" in c.why]
        assert patched == ["encoder.layer.0.output.dense"]


@pytest.mark.parametrize("recipe", [*RECIPES, "bnb-nf4"])
@torch.no_grad()
def test_torchs_own_encoder_does_not_reach_past_the_layer(recipe: str, state: Any):
    if recipe.startswith("bnb"):
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 64)
    expected, before = model(x), state(model)
    with fw.apply(model, recipe):
        error = (model(x) - expected).norm() / expected.norm()
        assert 1e-4 < error < 0.1
    assert torch.equal(model(x), expected)
    assert state(model) == before


def test_training_mode_is_taken_over(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    model.model.layers[0].train()
    with fw.apply(model, "int8"):
        for index, training in enumerate((True, False)):
            layers = [m for m in model.model.layers[index].modules() if type(m) is Int8Linear]
            assert {m.training for m in layers} == {training}
