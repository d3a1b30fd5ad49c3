"""Int8Linear and Int8Embedding against the plain-torch reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from featherweight.nn import Int8Embedding, Int8Linear
from featherweight.quant import int8 as reference


def planted(numbers: Any) -> torch.Tensor:
    """Activations with two channels that drown the rest of a row in 8 bits."""
    x = numbers(6, 64, seed=2)
    x[:, [3, 40]] *= 60
    return x


@pytest.mark.parametrize("threshold", [0.0, 2.0, 6.0])
@torch.no_grad()
def test_linear_is_the_reference(threshold: float, numbers: Any):
    weight, bias, x = numbers(48, 64), numbers(48, seed=1), planted(numbers)
    layer = Int8Linear.from_weight(weight, bias, threshold=threshold)
    codes, absmax = reference.quantize_rows(weight)
    assert torch.equal(layer.weight, codes)
    assert torch.equal(layer.absmax, absmax)
    assert torch.equal(layer.dequantize(), codes.float() * (absmax / 127)[:, None])
    expected = reference.linear_int8(x, codes, absmax, bias, threshold, per_batch=False)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_outliers_are_worth_it(numbers: Any):
    weight, x = numbers(48, 64), planted(numbers)
    errors = [
        (Int8Linear.from_weight(weight, threshold=t)(x) - x @ weight.T).norm() for t in (0.0, 6.0)
    ]
    assert errors[1] < errors[0] / 2


@torch.no_grad()
def test_per_batch_goes_through_float16_and_takes_columns(numbers: Any):
    weight, x = numbers(48, 64), planted(numbers)
    layer = Int8Linear.from_weight(weight, threshold=6.0, per_batch=True)
    codes, absmax = reference.quantize_rows(weight.half())
    rounded = x.half().float()
    expected = reference.linear_int8(rounded, codes, absmax, None, 6.0, per_batch=True)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-4)
    assert layer(x.bfloat16()).dtype is torch.bfloat16
    assert not layer(torch.full((1, 64), 1e5)).isfinite().any()  # beyond float16


def test_repr():
    assert repr(Int8Linear(4, 3)) == (
        "Int8Linear(in_features=4, out_features=3, bias=True, threshold=6)"
    )
    assert repr(Int8Linear(4, 3, bias=False, threshold=0.5, per_batch=True)) == (
        "Int8Linear(in_features=4, out_features=3, bias=False, threshold=0.5, per_batch=True)"
    )
    assert repr(Int8Embedding(4, 3, padding_idx=1)) == (
        "Int8Embedding(4, 3, padding_idx=1, dtype=torch.float32)"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_embedding_gives_the_rows_of_the_dequantised_weight(dtype: torch.dtype, numbers: Any):
    weight = numbers(20, 8)
    layer = Int8Embedding.from_weight(weight.to(dtype))
    for ids in (torch.tensor([[0, 19], [7, 7]]), torch.tensor(3), torch.zeros(0, 2).int()):
        found = layer(ids)
        assert found.dtype is dtype
        assert torch.equal(found, layer.dequantize()[ids.long()].to(dtype))
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((layer.dequantize() - weight).abs() <= step * 0.51 + 0.01 * weight.abs()).all()


def test_embeddings_output_follows_the_models_dtype(numbers: Any):
    model = nn.Sequential(Int8Embedding.from_weight(numbers(20, 8)), nn.Linear(8, 8))
    absmax = model[0].absmax
    model.bfloat16()
    assert model(torch.tensor([1, 2])).dtype is torch.bfloat16
    assert model[0].absmax is absmax
    model.float().to("meta")
    assert model[0].dtype is torch.float32


def test_an_embedding_and_a_head_can_share_codes(numbers: Any):
    head = Int8Linear.from_weight(numbers(20, 8))
    embedding = Int8Embedding(20, 8, device="meta")
    embedding.weight, embedding.absmax = head.weight, head.absmax
    assert torch.equal(embedding(torch.arange(20)), head.dequantize())
    model = nn.ModuleList([embedding, head])
    assert sum(p.numel() for p in model.parameters()) == 160
    assert sum(b.numel() for b in model.buffers()) == 20
    model.half()
    assert embedding.weight is head.weight
    assert embedding.absmax is head.absmax
