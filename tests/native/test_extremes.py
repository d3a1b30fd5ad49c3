"""Zeros, nothing at all, numbers at the ends of their range, and what is no number."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featherweight import native

STATUS = native.status()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = torch.ops.featherweight
few_and_many = pytest.mark.parametrize("m", [1, 3, 12])  # rows: two ways of computing


@few_and_many
def test_rows_of_zeros_give_the_bias(isa: str, m: int, product: Any, numbers: Any) -> None:
    bias = numbers(21, seed=2)
    x = numbers(m, 96)
    x[0] = 0
    found = product(numbers(21, 96, seed=1))(x, bias)
    assert torch.equal(found[0], bias)
    assert (found[1:] != bias).any(1).all()


@few_and_many
def test_weights_of_zeros_give_the_bias(isa: str, m: int, product: Any, numbers: Any) -> None:
    bias, weight = numbers(21, seed=2), numbers(21, 96, seed=1)
    weight[5:9], weight[20], weight[0, 32:] = 0, 0, 0  # rows, and blocks
    x = numbers(m, 96)
    layer = product(weight)
    found = layer(x, bias)
    zeros = [5, 6, 7, 8, 20]
    # Double quantisation has no code for an absmax of 0.
    torch.testing.assert_close(found[:, zeros], layer.reference(x, bias)[:, zeros])
    if "nested" not in layer.kind:
        assert torch.equal(found[:, zeros], bias[zeros].expand(m, 5))


@pytest.fixture
def fresh() -> Iterator[Executor]:
    """`fresh.submit(f, *args).result()` in a thread that has no memory left from a call before."""
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize("kind", ["int8", "int8-outliers", "f32", "bf16"])
def test_no_columns(isa: str, kind: str, product_of: Any, fresh: Executor) -> None:
    layer = product_of(kind, torch.ones(5, 1))  # then cut: nothing can be quantised of no column
    layer.codes = layer.codes[:, :0]
    bias = torch.arange(5.0)
    for m in (1, 12):
        for dtype in DTYPES:
            x = torch.zeros(m, 0, dtype=dtype)
            found = fresh.submit(layer, x, bias).result()
            assert torch.equal(found, bias.to(dtype).expand(m, 5))
            assert not layer(x).any()
            assert layer.backward(torch.ones(m, 5, dtype=dtype)).shape == (m, 0)


def test_no_columns_of_4_bits(isa: str, four_bit: Any, arguments: Any, fresh: Executor) -> None:
    weight, bias = arguments(four_bit(torch.zeros(5, 0))), torch.arange(5.0)
    for m in (1, 12):
        x = torch.zeros(m, 0)
        for exact in (False, True):
            found = fresh.submit(OPS.linear_4bit, x, *weight, 5, bias, exact).result()
            assert torch.equal(found, bias.expand(m, 5))
        assert OPS.linear_4bit_backward(torch.ones(m, 5), *weight, 0).shape == (m, 0)
    assert OPS.dequantize_4bit(*weight, [5, 0], torch.float32).shape == (5, 0)


def test_no_columns_to_quantise(isa: str, fresh: Executor) -> None:
    codes, absmax = fresh.submit(OPS.quantize_int8, torch.zeros(3, 0)).result()
    assert codes.shape == (3, 0)
    assert absmax.tolist() == [0.0] * 3


@few_and_many
def test_no_outputs(isa: str, m: int, product: Any, numbers: Any) -> None:
    layer = product(numbers(0, 64))
    assert layer(numbers(m, 64), torch.zeros(0)).shape == (m, 0)
    gradient = layer.backward(torch.zeros(m, 0))
    assert gradient.shape == (m, 64)
    assert not gradient.any()


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)], ids=str)
def test_no_rows(isa: str, shape: tuple[int, ...], product: Any, numbers: Any) -> None:
    layer = product(numbers(9, 64))
    assert layer(torch.zeros(*shape, 64), torch.ones(9)).shape == (*shape, 9)
    assert layer.backward(torch.zeros(*shape, 9)).shape == (*shape, 64)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # ISA and kind stay the same
)
@given(
    m=st.sampled_from([2, 4, 8, 9, 14]),
    row=st.integers(0, 13),
    column=st.integers(0, 159),
    k=st.sampled_from([160, 128, 100]),
    value=st.sampled_from([torch.nan, torch.inf, -torch.inf]),
    dtype=st.sampled_from(DTYPES),
)
def test_nan_and_infinity_spoil_their_row_alone(
    isa: str,
    product: Any,
    numbers: Any,
    m: int,
    row: int,
    column: int,
    k: int,
    value: float,
    dtype: torch.dtype,
) -> None:
    layer = product(numbers(21, k, seed=1))
    x, row = numbers(m, k, dtype=dtype), row % m
    clean = layer(x)
    x[row, column % k] = value
    found = layer(x)
    assert not found[row].isfinite().any()
    expected = layer.reference(x)[row]
    assert torch.equal(found[row].isnan(), expected.isnan())
    assert torch.equal(found[row].nan_to_num(0), expected.nan_to_num(0))
    others = [i for i in range(m) if i != row]
    if layer.per_batch:  # the value is, or was, what makes its column one of float for all
        assert found[others].isfinite().all()
    else:
        assert torch.equal(found[others], clean[others])
    grad = numbers(m, 21, seed=3, dtype=dtype)
    clean = layer.backward(grad)
    grad[row, column % 21] = value
    found = layer.backward(grad)
    assert not found[row].isfinite().any()
    assert torch.equal(found[others], clean[others])


@few_and_many
def test_activations_of_100000_in_bfloat16(
    isa: str, m: int, product: Any, numbers: Any, close: Any
) -> None:
    x = (numbers(m, 96) * 1e5).bfloat16()
    layer = product(numbers(21, 96, seed=1))
    close(layer(x), layer.reference(x), x, layer.weight)


@few_and_many
def test_results_too_large_for_float16_are_infinite(isa: str, m: int, product: Any) -> None:
    weight = torch.ones(21, 96)
    weight[7] = -1.0
    weight[9, 1:] = 0.0  # one result that fits
    layer, x = product(weight), torch.full((m, 96), 60000.0, dtype=torch.float16)
    found = layer(x)
    assert found[:, 7].tolist() == [-torch.inf] * m
    assert found[:, [0, 6, 8, 10, 20]].tolist() == [[torch.inf] * 5] * m
    torch.testing.assert_close(found[:, 9], layer.reference(x)[:, 9])
    assert found[:, 9].isfinite().all()


@few_and_many
@pytest.mark.parametrize("power", [-30, -36, -38, -40, -44])
def test_activations_near_the_smallest(
    isa: str, m: int, power: int, product: Any, numbers: Any
) -> None:
    x = numbers(m, 96) * 10.0**power
    layer = product(numbers(21, 96, seed=1))
    found, expected = layer(x).double(), layer.reference(x).double()
    terms = x.double().abs() @ layer.weight.double().abs().T
    # A product below 2^-126 loses digits: half of 2^-149 each time, scales of int8 included.
    scale_error = 2**-149 * 127 * 96 * layer.weight.abs().max()
    assert ((found - expected).abs() <= 2e-6 * terms + scale_error).all()
    if layer.exact:
        assert found.any()


@few_and_many
def test_float32_keeps_subnormal_numbers(isa: str, m: int) -> None:
    x = torch.full((m, 1), 1e-40)
    found = OPS.linear_half(x, torch.tensor([[1.0], [0.5], [4096.0]]), None)
    assert torch.equal(found, x * torch.tensor([1.0, 0.5, 4096.0]))
    assert found.all()


@pytest.mark.skipif(not STATUS.available, reason=STATUS.error or "")
def test_a_codebook_with_nan_gives_nan_not_the_one_before(
    isa: str, numbers: Any, four_bit: Any, arguments: Any
) -> None:
    codes, absmax, *nested, code, blocksize = arguments(four_bit(numbers(8, 64)))
    broken = code.clone()
    broken[3] = torch.nan
    for m in (1, 9):
        x = numbers(m, 64, seed=1)
        assert (
            OPS.linear_4bit(x, codes, absmax, *nested, code, blocksize, 8, None, False)
            .isfinite()
            .all()
        )
        out = OPS.linear_4bit(x, codes, absmax, *nested, broken, blocksize, 8, None, False)
        assert out.isnan().all()
