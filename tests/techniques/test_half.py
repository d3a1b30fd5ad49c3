"""bf16:compute=fp32 and fp16:compute=fp32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw
from featherweight.errors import UnsupportedError
from featherweight.machine import describe
from featherweight.nn import FourBitLinear, HalfEmbedding, HalfLinear
from featherweight.recipe import registry

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("name", DTYPES)
def test_the_answer_is_that_of_rounded_weights_in_float32(
    tiny: Path, name: str, read: Any, answer: Any
):
    model, rounded = read(tiny), read(tiny)
    halved = {id(m.weight) for m in rounded.modules() if isinstance(m, nn.Linear | nn.Embedding)}
    halved |= {id(m.weight) for m in rounded.modules() if type(m).__name__ == "Conv1D"}
    for parameter in rounded.parameters():
        if id(parameter) in halved:
            parameter.data = parameter.data.to(DTYPES[name]).float()
    with fw.apply(model, f"{name}:compute=fp32") as applied:
        torch.testing.assert_close(answer(model), answer(rounded), rtol=1e-4, atol=1e-4)
        dtypes = {n: p.dtype for n, p in model.named_parameters()}
        for module_name, module in model.named_modules():
            if isinstance(module, HalfLinear | HalfEmbedding):
                assert dtypes.pop(f"{module_name}.weight", DTYPES[name]) is DTYPES[name]
        assert set(dtypes.values()) == {torch.float32}
        assert model.config.dtype is torch.float32
        asked = {"bf16": "bfloat16", "fp16": "float16"}[name]
        assert applied.receipt.actual["dtype"] == f"float32, from weights in {asked}"


def test_what_is_tied_stays_tied(tiny_llama: Path, read: Any, answer: Any):
    model = read(tiny_llama)
    with fw.apply(model, "bf16:compute=fp32") as applied:
        assert type(model.lm_head) is HalfLinear
        assert type(model.model.embed_tokens) is HalfEmbedding
        assert model.lm_head.weight is model.model.embed_tokens.weight
        lines = {c.module: c for c in applied.receipt.changes}
        assert lines["lm_head"].why == "the same weight as model.embed_tokens"
        assert lines["lm_head"].bytes_after is None
        assert lines["model.embed_tokens"].bytes_after == 384 * 64 * 2
        found = answer(model)
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(answer(model), found)


def test_a_bf16_checkpoint_is_computed_in_float32(tiny_llama: Path, read: Any, answer: Any):
    narrow = read(tiny_llama, dtype=torch.bfloat16)
    with fw.apply(narrow, "fp32"):
        expected = answer(narrow)
    with fw.apply(narrow, "bf16:compute=fp32") as applied:
        found = answer(narrow)
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert narrow.config.dtype is torch.float32
        assert {c.module for c in applied.receipt.changes if c.what == "bfloat16 → float32"} == {
            n for n, _ in narrow.named_parameters() if "norm" in n
        }
    assert narrow.config.dtype is torch.bfloat16
    assert narrow.model.norm.weight.dtype is torch.bfloat16


def test_conv1d_is_transposed(tiny_gpt2: Path, read: Any):
    model = read(tiny_gpt2)
    weight = model.transformer.h[0].attn.c_attn.weight.clone()
    with fw.apply(model, "bf16:compute=fp32"):
        layer = model.transformer.h[0].attn.c_attn
        assert torch.equal(layer.weight, weight.T.bfloat16())
        assert (layer.out_features, layer.in_features) == (192, 64)


def test_what_float16_cannot_hold_is_refused_by_name(tiny_llama: Path, read: Any, state: Any):
    model = read(tiny_llama)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()
    weight.data[3, 5] = 70000.0
    before = state(model)
    says = r"'model\.layers\.1\.mlp\.up_proj\.weight' cannot be kept in float16: .*use 'bf16'"
    with pytest.raises(UnsupportedError, match=says):
        fw.apply(model, "fp16:compute=fp32")
    assert state(model) == before
    fw.apply(model, "bf16:compute=fp32").undo()


def test_without_compute_it_is_stock(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    kinds = {name: type(module) for name, module in model.named_modules()}
    with fw.apply(model, "bf16"):
        assert {name: type(module) for name, module in model.named_modules()} == kinds
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_quantise_first(tiny_llama: Path, read: Any, state: Any, answer: Any):
    model = read(tiny_llama)
    before = state(model)
    says = r"has no linear layer .*; quantise first: 'nf4\+bf16:compute=fp32'"
    with pytest.raises(UnsupportedError, match=says):
        fw.apply(model, "bf16:compute=fp32+nf4")
    assert state(model) == before
    with fw.apply(model, "nf4+bf16:compute=fp32"):
        assert type(model.model.layers[0].mlp.up_proj) is FourBitLinear
        assert type(model.lm_head) is HalfLinear
        assert type(model.model.embed_tokens) is HalfEmbedding
        assert answer(model).dtype is torch.float32
    assert state(model) == before


@pytest.mark.parametrize("second", ["fp16", "fp32", "bf16"])
def test_a_second_dtype_is_refused(tiny_llama: Path, second: str, read: Any):
    model = read(tiny_llama)
    with (
        fw.apply(model, "bf16:compute=fp32"),
        pytest.raises(UnsupportedError, match=r"another of arithmetic already; undo 'compute=fp32"),
    ):
        fw.apply(model, second)


def test_nothing_to_halve_is_an_error():
    for model in (nn.LayerNorm(4), nn.Linear(4, 4), nn.Sequential(Renormalised(4, 4))):
        with pytest.raises(UnsupportedError, match="has no linear layer or embedding to keep in"):
            fw.apply(model, "bf16:compute=fp32")


class Renormalised(nn.Embedding):
    """A subclass that may do anything."""


def test_flash_sees_that_arithmetic_is_in_float32(tiny_llama: Path, read: Any, answer: Any):
    model = read(tiny_llama)
    with fw.apply(model, "bf16:compute=fp32+flash"):
        assert answer(model).isfinite().all()


@pytest.mark.parametrize("name", DTYPES)
def test_nothing_is_slow_about_it(name: str):
    machine = replace(describe(), features=(), onednn_limit=None)
    assert registry()[name](compute="fp32").notes(machine, "cpu") == []
    assert len(registry()[name]().notes(machine, "cpu")) == 1
