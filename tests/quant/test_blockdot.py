"""Products with 4-bit weights, as the kernels compute them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear

from featherweight.quant.blockdot import linear_4bit, quantize_blocks
from featherweight.quant.blockwise import (
    BLOCKSIZES,
    dequantize_4bit,
    quantize_4bit,
    scales,
    unpack_nibbles,
)
from featherweight.quant.codebooks import codebook, int8_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def by_hand(x: torch.Tensor, weight: torch.Tensor, name: str, blocksize: int, block: int) -> Any:
    """One output after the other: integers within a block, scaled, summed. x [M, K]."""
    q = quantize_4bit(weight, codebook(name), blocksize)
    table, step = int8_table(q.code)
    features = weight.shape[1]
    nibbles = unpack_nibbles(q.codes, weight.numel()).tolist()
    out = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for m in range(x.shape[0]):
        for n in range(weight.shape[0]):
            for start in range(0, features, block):
                piece = x[m, start : start + block].float()
                largest = piece.abs().max()
                ints = torch.round(piece * (127 / largest)).int() if largest else piece.int()
                first = n * features + start
                weights = table[nibbles[first : first + block]].int()
                scale = float(largest) / 127 * step * float(scales(q.absmax)[first // blocksize])
                out[m, n] += int(ints @ weights) * scale
    return out


@pytest.mark.parametrize(
    ("features", "blocksize", "block"),
    [(128, 64, 64), (96, 64, 32), (64, 32, 32), (64, 4096, 64), (32, 64, 32), (160, 128, 32)],
)
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_it_is_a_sum_of_integers_block_by_block(
    name: str, features: int, blocksize: int, block: int, normal: Any
):
    x, weight = normal(3, features), normal(5, features, seed=1, scale=0.02)
    x[1, :64] = 0
    found = linear_4bit(x, quantize_4bit(weight, codebook(name), blocksize), None, exact=False)
    expected = by_hand(x, weight, name, blocksize, block)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("double", [False, True], ids=["absmax", "nested"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_exact_is_the_product_with_dequantised_weights(
    bias: bool, dtype: torch.dtype, double: bool, normal: Any
):
    x = normal(2, 3, 64).to(dtype)
    q = quantize_4bit(normal(8, 64, seed=1), codebook("nf4"), 64, double)
    b = normal(8, seed=2).to(dtype) if bias else None
    expected = linear(x.float(), dequantize_4bit(q), None if b is None else b.float())
    found = linear_4bit(x, q, b, exact=True)
    torch.testing.assert_close(found, expected.to(dtype))
    # Integers come close to it: 1 % of a typical output, 8 in size.
    error = linear_4bit(x, q, b, exact=False).float() - expected
    assert 0 < error.square().mean().sqrt() < 0.01 * 8


@pytest.mark.parametrize("features", [1, 33, 48, 100])
def test_widths_that_32_does_not_divide_are_computed_exactly(features: int, normal: Any):
    x = normal(4, features)
    q = quantize_4bit(normal(6, features, seed=1), codebook("nf4"))
    assert torch.equal(linear_4bit(x, q, None, exact=False), linear_4bit(x, q, None, exact=True))


@given(
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(1, 6).map(lambda k: 32 * k),
    st.integers(1, 20),
    st.sampled_from(BLOCKSIZES),
    st.sampled_from(["nf4", "fp4", "int4"]),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_shapes_dtypes_and_error(
    leading: list[int],
    features: int,
    out_features: int,
    blocksize: int,
    name: str,
    dtype: torch.dtype,
    double: bool,
):
    generator = torch.Generator().manual_seed(features + out_features)
    x = torch.randn(*leading, features, generator=generator).to(dtype)
    weight = torch.randn(out_features, features, generator=generator)
    q = quantize_4bit(weight, codebook(name), blocksize, double)
    found = linear_4bit(x, q, None, exact=False)
    assert (found.shape, found.dtype) == ((*leading, out_features), dtype)
    # Half a step of the activations, and what rounding the codebook costs (FP4 most: 0.0032).
    x, again = x.float(), dequantize_4bit(q)
    largest = x.abs().amax(-1, keepdim=True)
    bound = (
        largest / 254 * again.abs().sum(1) + 0.005 * x.abs().sum(-1, True) * scales(q.absmax).max()
    )
    epsilon = torch.finfo(dtype).eps
    exact = linear(x, again)
    assert ((found - exact).abs() <= bound * 1.01 + epsilon * exact.abs() + 1e-5).all()


def test_blocks_of_activations(normal: Any):
    x = normal(2, 5, 128)
    x[0, 0, :64] *= 1000  # its neighbour keeps its own scale
    x[1, 1, 64:] = 0
    x[1, 2, 64:] = 1e-36
    x[1, 3, 70] = torch.nan
    x[1, 4, 3] = torch.inf
    codes, scale = quantize_blocks(x, 64)
    assert (codes.dtype, codes.shape, scale.shape) == (torch.int8, (2, 5, 128), (2, 5, 2))
    pieces, largest = codes.unflatten(-1, (2, 64)), x.unflatten(-1, (2, 64)).abs().amax(-1)
    assert not pieces[1, 1, 1].any()
    assert not pieces[1, 2, 1].any()
    for row, block in ((3, 1), (4, 0)):
        assert scale[1, row, block].isnan()
        assert not pieces[1, row, block].any()
    torch.testing.assert_close(scale[0], largest[0] / 127)
    again = pieces * scale[..., None]
    ordinary = scale.isfinite()
    error = (again - x.unflatten(-1, (2, 64))).abs().amax(-1)
    assert (error <= scale * 0.5001 + 1e-35)[ordinary].all()
    assert (pieces.abs().amax(-1) == 127).sum() == 16  # all but the four above


@pytest.mark.parametrize("exact", [False, True], ids=["integers", "exact"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_never_become_numbers(value: float, exact: bool, normal: Any):
    x = normal(3, 128)
    clean = x.clone()
    x[1, 100] = value
    q = quantize_4bit(normal(8, 128, seed=1), codebook("nf4"))
    found = linear_4bit(x, q, None, exact)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], linear_4bit(clean, q, None, exact)[[0, 2]])


def test_large_activations_in_bf16(normal: Any):
    x = (normal(4, 128) * 1e5).bfloat16()
    q = quantize_4bit(normal(16, 128, seed=1), codebook("nf4"))
    found = linear_4bit(x, q, None, exact=False).float()
    expected = linear(x.float(), dequantize_4bit(q))
    assert ((found - expected).norm() / expected.norm()) < 0.01


def test_blocks_of_activations_are_closer_than_rows(normal: Any):
    x = normal(16, 256) * torch.logspace(-1, 2, 4).repeat_interleave(64)
    errors = []
    for block in (64, 256):
        codes, scale = quantize_blocks(x, block)
        again = codes * scale.repeat_interleave(block, -1)
        errors.append(((again - x) / x.abs().mean(0)).norm())
    assert errors[0] < errors[1] / 5
