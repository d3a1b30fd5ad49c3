"""FourBitLinear against the plain-torch reference, and its layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from featherweight.errors import UnsupportedError
from featherweight.nn import FourBitLinear
from featherweight.quant import blockdot, blockwise
from featherweight.quant.codebooks import codebook
from featherweight.quant.nested import Nested


@pytest.mark.parametrize("exact", [False, True], ids=["int8-activations", "exact"])
@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("blocksize", [32, 64, 256])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "int4"])
@torch.no_grad()
def test_it_is_the_reference(
    quant_type: str, blocksize: int, double: bool, exact: bool, numbers: Any
):
    weight, bias, x = numbers(40, 96), numbers(40, seed=1), numbers(5, 96, seed=2)
    layer = FourBitLinear.from_weight(
        weight, bias, quant_type=quant_type, blocksize=blocksize, double=double, exact=exact
    )
    q = blockwise.quantize_4bit(weight, codebook(quant_type), blocksize, double)
    assert layer.weight.shape == (40 * 96 // 2, 1)
    assert torch.equal(layer.weight.reshape(-1), q.codes)
    assert torch.equal(layer.quant_map, q.code)
    if isinstance(q.absmax, Nested):
        assert torch.equal(layer.absmax, q.absmax.codes)
        assert torch.equal(layer.nested_absmax, q.absmax.absmax)
        assert torch.equal(layer.nested_quant_map, q.absmax.code)
        assert layer.nested_offset == q.absmax.offset
    else:
        assert torch.equal(layer.absmax, q.absmax)
        assert layer.nested_absmax is layer.nested_quant_map is None
    again = blockwise.dequantize_4bit(q, torch.float32)
    rounding = 1e-6 if double else 0.0  # code · absmax + offset is one operation in a kernel
    torch.testing.assert_close(layer.dequantize(), again, rtol=rounding, atol=0.0)
    expected = blockdot.linear_4bit(x, q, bias, exact)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


def test_an_odd_number_of_weights(numbers: Any):
    weight = numbers(7, 9)
    layer = FourBitLinear.from_weight(weight)
    assert layer.weight.shape == (32, 1)
    assert layer.absmax.shape == (1,)
    assert (layer.dequantize() - weight).abs().max() < 0.16 * weight.abs().max()


def test_dequantize_takes_a_dtype(numbers: Any):
    layer = FourBitLinear.from_weight(numbers(32, 64))
    assert torch.equal(layer.dequantize(torch.bfloat16), layer.dequantize().bfloat16())


def test_an_empty_layer_takes_the_state_of_another(numbers: Any):
    layer = FourBitLinear.from_weight(numbers(32, 64), numbers(32, seed=1), double=True)
    assert layer.nested_offset > 1
    empty = FourBitLinear(64, 32, double=True)
    assert not empty(numbers(2, 64)).any()
    empty.load_state_dict(layer.state_dict())
    assert empty.nested_offset == layer.nested_offset
    assert torch.equal(empty.dequantize(), layer.dequantize())
    other = FourBitLinear(64, 32, quant_type="fp4", blocksize=32)
    other.load_state_dict(layer.state_dict())  # the state says how it was quantised
    assert repr(other) == repr(empty)
    assert torch.equal(other.dequantize(), layer.dequantize())
    with pytest.raises(RuntimeError, match="Missing key"):
        empty.load_state_dict(FourBitLinear.from_weight(numbers(32, 64)).state_dict())
    with pytest.raises(RuntimeError, match=r"nf4 \[32, 64\]; the model has .* \[64, 32\]"):
        FourBitLinear(32, 64).load_state_dict(layer.state_dict() | {"bias": numbers(64)})


def test_what_there_is_not_is_refused(numbers: Any):
    with pytest.raises(UnsupportedError, match="there is no codebook 'nf3'"):
        FourBitLinear.from_weight(numbers(32, 64), quant_type="nf3")
    for blocksize in (16, 48, 8192):
        with pytest.raises(UnsupportedError, match=f"blocksize={blocksize}; choose one of 32"):
            FourBitLinear.from_weight(numbers(32, 64), blocksize=blocksize)


def test_repr():
    assert repr(FourBitLinear(64, 32, quant_type="fp4", bias=False)) == (
        "FourBitLinear(in_features=64, out_features=32, bias=False, quant_type=fp4, blocksize=64)"
    )
    assert repr(FourBitLinear(64, 32, double=True, exact=True)).endswith(
        "quant_type=nf4, blocksize=64, double=True, exact=True)"
    )
