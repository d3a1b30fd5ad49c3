"""bitsandbytes' ops on our kernels, against its own kernels and against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from featherweight.integrations import bitsandbytes as backend
from featherweight.quant import blockdot, blockwise
from featherweight.quant.codebooks import codebook
from featherweight.quant.int8 import quantize_rows
from featherweight.quant.nested import Nested

bnb = pytest.importorskip("bitsandbytes")
F = bnb.functional
OPS = torch.ops.bitsandbytes
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (5, 7), (33, 64), (64, 96), (40, 576), (7, 130)]
# Roundings to the dtype, and a sum in another order.
EPSILON = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    backend.disable()


def both(work: Callable[[], Any]) -> tuple[Any, Any]:
    """What bitsandbytes' own kernels answer, and ours."""
    backend.disable()
    stock = work()
    backend.enable()
    ours = work()
    backend.disable()
    return stock, ours


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative difference."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def quantised(weight: torch.Tensor, **options: Any) -> tuple[torch.Tensor, Any, blockwise.FourBit]:
    """bitsandbytes' bytes and state of a weight, and the same as our reference has it."""
    codes, state = F.quantize_4bit(weight, **options)
    scales = state.absmax
    if state.nested:
        outer = state.state2
        scales = Nested(state.absmax, outer.absmax, outer.code, float(state.offset))
    flat = codes.view(torch.uint8).reshape(-1)
    q = blockwise.FourBit(
        flat, scales, codebook(state.quant_type), state.blocksize, tuple(weight.shape), weight.dtype
    )
    return codes, state, q


def gemm(x: torch.Tensor, codes: torch.Tensor, state: Any, bias: Any = None) -> torch.Tensor:
    """`gemm_4bit` as bitsandbytes calls it."""
    nested: dict[str, Any] = {}
    absmax = state.absmax
    if state.nested:
        absmax = state.state2.absmax
        nested = {"absmax_8bit": state.absmax, "absmax_code": state.state2.code}
        nested["absmax_offset"] = state.offset
    rest = (state.shape, absmax, state.blocksize, state.quant_type)
    return OPS.gemm_4bit.default(x, codes, *rest, bias=bias, **nested)


# 4-bit ops


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gemm_4bit_is_the_reference(
    shape: tuple[int, int], name: str, nested: bool, dtype: torch.dtype
) -> None:
    weight = numbers(*shape, seed=1)
    options = {"quant_type": name, "compress_statistics": nested}
    for blocksize in blockwise.BLOCKSIZES[:: 1 if shape[1] == 576 else 3]:
        codes, state, q = quantised(weight, blocksize=blocksize, **options)
        for leading, bias in (((1,), None), ((2, 3), numbers(shape[0]).to(dtype)), ((20,), None)):
            x = numbers(*leading, shape[1], seed=2, dtype=dtype)
            backend.enable()
            found = gemm(x, codes, state, bias)
            expected = blockdot.linear_4bit(x, q, bias, exact=False)
            assert (found.shape, found.dtype) == (expected.shape, dtype)
            assert rms(found, expected) < EPSILON[dtype]


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_gemm_4bit_is_near_stock(name: str, storage: torch.dtype) -> None:
    codes, state, _ = quantised(numbers(64, 256, seed=1), quant_type=name, quant_storage=storage)
    assert codes.dtype is storage
    for m in (1, 20):
        x, bias = numbers(m, 256, seed=2), numbers(64, seed=3)
        stock, ours = both(lambda x=x, bias=bias: gemm(x, codes, state, bias))
        assert 0 < rms(ours, stock) < 0.01  # activations in 8 bits


def test_scales_of_another_dtype_are_taken() -> None:
    codes, state, q = quantised(numbers(64, 256, seed=1))
    x = numbers(3, 256, seed=2)
    state.absmax = state.absmax.bfloat16().float()
    backend.enable()
    expected = gemm(x, codes, state)
    state.absmax = state.absmax.bfloat16()
    assert torch.equal(gemm(x, codes, state), expected)
    assert rms(expected, blockdot.linear_4bit(x, q, None, exact=False)) < 0.01


def test_gemv_4bit_takes_flat_bytes_and_any_codebook() -> None:
    for name in ("nf4", "fp4"):
        codes, state, q = quantised(numbers(64, 128, seed=1), quant_type=name)
        x = numbers(1, 128, seed=2)
        backend.enable()
        found = F.gemv_4bit(x, codes, state=state)
        assert rms(found, blockdot.linear_4bit(x, q, None, exact=False)) < 2e-6


@pytest.mark.parametrize("shape", [*SHAPES, (3, 4, 65), (2, 2, 2, 64), (1000, 3)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_dequantize_4bit_gives_the_bytes_of_the_reference(
    shape: tuple[int, ...], dtype: torch.dtype, name: str
) -> None:
    weight = numbers(*shape, seed=1, dtype=dtype)
    for blocksize in blockwise.BLOCKSIZES[::2]:
        for nested in (False, True):
            codes, state, q = quantised(
                weight, blocksize=blocksize, quant_type=name, compress_statistics=nested
            )
            backend.enable()
            found = F.dequantize_4bit(codes, state)
            expected = blockwise.dequantize_4bit(q)
            assert (found.dtype, found.shape) == (dtype, shape)
            if nested:  # bitsandbytes works the scales out itself
                torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
            else:
                assert torch.equal(found, expected)


def test_dequantize_4bit_of_transposed_bytes_is_transposed() -> None:
    weight = numbers(32, 64, seed=1)
    codes, state, q = quantised(weight, quant_storage=torch.bfloat16)
    stock, ours = both(lambda: F.dequantize_4bit(codes.t(), state))
    assert torch.equal(ours, blockwise.dequantize_4bit(q).t())
    assert torch.equal(ours, stock)


def test_a_weight_in_the_other_orientation() -> None:
    weight = numbers(64, 96, seed=1)  # [K, N]
    codes, state, q = quantised(weight)
    x = numbers(5, 64, seed=2)
    backend.enable()
    with pytest.warns(DeprecationWarning, match="Re-quantize"):
        found = bnb.matmul_4bit(x, codes.t(), state)
    assert rms(found, x @ blockwise.dequantize_4bit(q)) < 2e-6


# int8 ops


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("threshold", [0.0, 6.0, 2.0, 2.001, 1e-3, -1.0])
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (5, 65), (33, 576), (0, 4), (3, 0)])
def test_int8_vectorwise_quant_gives_stock_bytes(
    shape: tuple[int, int], threshold: float, dtype: torch.dtype
) -> None:
    x = numbers(*shape, dtype=dtype)
    if x.numel():
        x[-1] = 0
        x[0, -1] = 2.0
    before = x.clone()
    if not shape[1]:
        for switch in (backend.disable, backend.enable):
            switch()
            with pytest.raises((IndexError, ZeroDivisionError)):
                OPS.int8_vectorwise_quant(x, threshold)
        return
    stock, ours = both(lambda: OPS.int8_vectorwise_quant(x, threshold))
    for theirs, mine in zip(stock, ours, strict=True):
        if theirs is None:
            assert mine is None
        else:
            assert mine.dtype is theirs.dtype
            assert torch.equal(mine, theirs)
    assert torch.equal(x, before)


def test_int8_vectorwise_quant_of_what_is_not_finite() -> None:
    x = numbers(4, 64)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    backend.enable()
    codes, absmax, columns = OPS.int8_vectorwise_quant(x, 0.0)
    assert columns is None
    assert absmax[:2].isnan().all()
    assert absmax[2:].isfinite().all()
    assert not codes[:2].any()
    _, absmax, columns = OPS.int8_vectorwise_quant(x, 6.0)
    assert columns.tolist() == [5]  # infinity is an outlier, NaN is not
    assert absmax.isnan().tolist() == [True, False, False, False]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 64), (2, 65), (9, 7), (33, 576)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_products_are_stocks(
    shape: tuple[int, int], dtype: torch.dtype, with_bias: bool
) -> None:
    weight, absmax = quantize_rows(numbers(70, shape[1], seed=1))
    bias = numbers(70, seed=3, dtype=dtype) if with_bias else None
    x = numbers(*shape, seed=2, dtype=dtype)
    x[:, shape[1] // 2] *= 20
    # bitsandbytes' 1 / 127² is 2e-5 too large, and it rounds before it adds outliers.
    most = 3 * EPSILON[dtype] + 3e-5
    for threshold in (0.0, 6.0):
        codes, row_absmax, columns = OPS.int8_vectorwise_quant(x.half(), threshold)
        given = (codes, weight, row_absmax, absmax)
        stock, ours = both(lambda g=given: OPS.int8_scaled_mm(*g, bias=bias, dtype=dtype))
        assert (ours.shape, ours.dtype) == (stock.shape, dtype)
        assert rms(ours, stock) < most
        stock, ours = both(
            lambda g=given, c=columns: OPS.int8_mixed_scaled_mm(x, g[0], g[1], g[2], g[3], c, bias)
        )
        assert (ours[0].shape, ours[0].dtype) == (stock[0].shape, dtype)
        assert rms(ours[0], stock[0]) < most
        assert torch.equal(ours[1], stock[1])
    assert OPS.int8_scaled_mm(*given).dtype is torch.float16


@pytest.mark.parametrize("m", [1, 4, 20])
def test_int8_scaled_mm_takes_every_code(m: int) -> None:
    """−128 too, which quantising never gives."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-128, 128, (n, 192), generator=generator) for n in (m, 40))
    ones = torch.full((64,), 127.0)
    backend.enable()
    found = OPS.int8_scaled_mm(
        a.to(torch.int8), b.to(torch.int8), ones[:m], ones[:40], dtype=torch.float32
    )
    assert torch.equal(found, (a @ b.T).float())
