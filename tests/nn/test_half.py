"""HalfLinear and HalfEmbedding: rounded once, then float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from featherweight.errors import UnsupportedError
from featherweight.nn import HalfEmbedding, HalfLinear

HALVES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@torch.no_grad()
def test_only_the_weight_is_rounded(dtype: torch.dtype, numbers: Any):
    weight, bias, x = numbers(48, 300), numbers(48, seed=1), numbers(7, 300, seed=2)
    layer = HalfLinear.from_weight(weight, bias, dtype=dtype)
    assert torch.equal(layer.weight, weight.to(dtype))
    expected = linear(x.double(), weight.to(dtype).double(), bias.double()).float()
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=2e-5)
    stock = linear(x.to(dtype), weight.to(dtype), bias.to(dtype)).float()
    assert (layer(x) - expected).norm() < (stock - expected).norm() / 100


@torch.no_grad()
def test_activations_beyond_float16_are_no_trouble(numbers: Any):
    layer = HalfLinear.from_weight(numbers(8, 64), dtype=torch.float16)
    assert layer(torch.full((1, 64), 1e6)).isfinite().all()


def test_what_float16_cannot_hold_is_refused():
    weight = torch.full((4, 4), 65504.0)
    assert torch.equal(HalfLinear.from_weight(weight, dtype=torch.float16).dequantize(), weight)
    weight[3, 3] = -70000.0
    for make in (
        lambda: HalfLinear.from_weight(weight, dtype=torch.float16),
        lambda: HalfEmbedding.from_weight(weight, weight_dtype=torch.float16),
    ):
        with pytest.raises(UnsupportedError, match="has values that float16 cannot hold"):
            make()
    assert HalfLinear.from_weight(weight, dtype=torch.bfloat16).dequantize()[3, 3] == -70144


def test_a_weight_is_not_trained_in_silence(numbers: Any):
    layer = HalfLinear.from_weight(numbers(48, 64)).requires_grad_()
    with pytest.raises(UnsupportedError, match=r"cannot be trained; freeze it"):
        layer(numbers(2, 64))
    with torch.no_grad():
        assert layer(numbers(2, 64)).shape == (2, 48)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_embedding_widens(dtype: torch.dtype, numbers: Any):
    weight, ids = numbers(20, 8), torch.tensor([[0, 19], [7, 7]])
    layer = HalfEmbedding.from_weight(weight, 3, weight_dtype=dtype)
    assert layer(ids).dtype is torch.float32
    assert torch.equal(layer(ids), weight.to(dtype).float()[ids])
    assert repr(layer) == "HalfEmbedding(20, 8, padding_idx=3, dtype=torch.float32)"
    model = nn.Sequential(layer, nn.LayerNorm(8)).to(dtype)
    assert model(ids).dtype is dtype


def test_repr():
    assert repr(HalfLinear(4, 3)) == (
        "HalfLinear(in_features=4, out_features=3, bias=True, dtype=torch.bfloat16)"
    )
