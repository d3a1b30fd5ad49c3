"""Absmax quantisation of a tensor, its rows or its columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featherweight.errors import UnsupportedError
from featherweight.quant.absmax import dequantize_absmax, quantize_absmax, vectorwise_matmul

EXAMPLE = [1.2, -0.5, -4.3, 1.2, -3.1, 0.8, 2.4, 5.4]


def test_the_worked_example():
    codes, absmax = quantize_absmax(torch.tensor(EXAMPLE))
    assert codes.tolist() == [28, -12, -101, 28, -73, 19, 56, 127]
    assert codes.dtype is torch.int8
    assert absmax.item() == pytest.approx(5.4)
    again = dequantize_absmax(codes, absmax)
    expected = [1.1906, -0.5102, -4.2945, 1.1906, -3.1039, 0.8079, 2.3811, 5.4]
    torch.testing.assert_close(again, torch.tensor(expected), atol=1e-4, rtol=0)


def test_rows_columns_and_the_whole_have_their_own_absmax():
    x = torch.tensor([[1.0, -2.0, 0.5], [10.0, 0.0, -40.0]])
    rows, row_absmax = quantize_absmax(x, dim=1)
    assert row_absmax.tolist() == [2, 40]
    assert rows.tolist() == [[64, -127, 32], [32, 0, -127]]  # 63.5 and 31.75
    columns, column_absmax = quantize_absmax(x, dim=0)
    assert column_absmax.tolist() == [10, 2, 40]
    assert columns.tolist() == [[13, -127, 2], [127, 0, -127]]
    whole, absmax = quantize_absmax(x)
    assert absmax.shape == ()
    assert whole.tolist() == [[3, -6, 2], [32, 0, -127]]


def test_halves_go_to_the_even_neighbour():
    codes, _ = quantize_absmax(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5]))
    assert codes.tolist() == [127, 0, 2, 2, 0, -2]


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_zeros_stay_zeros(dim: int | None):
    codes, absmax = quantize_absmax(torch.zeros(3, 4), dim)
    assert not codes.any()
    assert torch.equal(dequantize_absmax(codes, absmax, dim), torch.zeros(3, 4))


@pytest.mark.parametrize("size", [3e38, 1e-30, 1e-36, 1e-44])
def test_the_ends_of_float32(size: float):
    x = torch.tensor([size, -size / 2, 0.0])
    again = dequantize_absmax(*quantize_absmax(x))
    expected = x if size > 1e-35 else torch.zeros(3)  # below it, as good as zero
    torch.testing.assert_close(again, expected, rtol=0, atol=size / 254 * 1.01)


@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from([None, 0, 1]),
    st.integers(2, 8),
    st.floats(-20, 20),
    st.integers(0, 10_000),
)
def test_no_value_is_off_by_more_than_half_a_step(
    rows: int, columns: int, dim: int | None, bits: int, power: float, seed: int
):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10**power
    codes, absmax = quantize_absmax(x, dim, bits)
    q = 2 ** (bits - 1) - 1
    assert codes.abs().max() <= q
    step = (absmax if dim is None else absmax.unsqueeze(dim)) / q
    again = dequantize_absmax(codes, absmax, dim, bits)
    assert ((again - x).abs() <= step * 0.50001).all()
    # The largest comes back as it was, so that quantising again changes nothing.
    assert torch.equal(quantize_absmax(again, dim, bits)[0], codes)


def test_the_vectorwise_product_is_one_of_integers():
    a = torch.tensor([[127.0, -1.0], [2.54, 0.02]])
    b = torch.tensor([[1.0, 0.0], [1.0, -12.7]])
    # Codes: rows [127, -1] and [127, 1], columns [127, 127] and [0, -127].
    expected = torch.tensor([[126.0, 12.7], [2.56, -0.254]])
    torch.testing.assert_close(vectorwise_matmul(a, b), expected)


def test_vectorwise_beats_one_absmax_where_rows_differ_in_size(normal: Any):
    a = normal(32, 64, seed=1) * torch.logspace(-2, 2, 32)[:, None]
    b = normal(64, 16, seed=2) * torch.logspace(-1, 1, 16)
    exact = a @ b
    vectorwise = vectorwise_matmul(a, b)
    whole = dequantize_absmax(*quantize_absmax(a)) @ dequantize_absmax(*quantize_absmax(b))
    for dim in (0, 1):
        size = exact.norm(dim=dim)
        assert ((vectorwise - exact).norm(dim=dim) / size).max() < 0.05
        assert ((whole - exact).norm(dim=dim) / size).max() > 0.15


@pytest.mark.parametrize("bits", [1, 9])
def test_bits_that_int8_cannot_hold_are_refused(bits: int):
    with pytest.raises(UnsupportedError, match=f"bits={bits}; int8 holds codes of 2 to 8 bits"):
        quantize_absmax(torch.ones(2), bits=bits)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused(value: float):
    with pytest.raises(UnsupportedError, match="NaN or infinity, which no code stands for"):
        quantize_absmax(torch.tensor([1.0, value]))
