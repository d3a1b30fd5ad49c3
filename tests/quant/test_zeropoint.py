"""Zero-point quantisation of a tensor, its rows or its columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featherweight.errors import UnsupportedError
from featherweight.quant.absmax import dequantize_absmax, quantize_absmax
from featherweight.quant.zeropoint import (
    dequantize_zeropoint,
    quantize_zeropoint,
    zeropoint_matmul,
)


def test_the_worked_example():
    codes, step, zero_point = quantize_zeropoint(torch.tensor([-1.0, 0.3, 1.0]))
    assert codes.tolist() == [-127, 38, 127]
    assert zero_point.item() == 0
    again = dequantize_zeropoint(codes, step, zero_point)
    assert again[1].item() == pytest.approx(0.2992, abs=5e-5)


def test_values_of_one_sign_use_all_codes():
    codes, step, zero_point = quantize_zeropoint(torch.tensor([0.0, 127.0, 254.0]))
    assert codes.tolist() == [-127, 0, 127]
    assert (step.item(), zero_point.item()) == (1, -127)
    codes, _, zero_point = quantize_zeropoint(torch.tensor([-254.0, 0.0]))
    assert codes.tolist() == [-127, 127]
    assert zero_point.item() == 127


def test_it_halves_the_error_of_absmax_after_a_relu(normal: Any):
    x = normal(1000).relu()
    shifted = dequantize_zeropoint(*quantize_zeropoint(x)) - x
    symmetric = dequantize_absmax(*quantize_absmax(x)) - x
    # Half the step, and zeros are exact in both.
    assert shifted.norm() / symmetric.norm() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_zeros_stay_zeros(dim: int | None):
    quantised = quantize_zeropoint(torch.zeros(3, 4), dim)
    assert not quantised[0].any()
    assert torch.equal(dequantize_zeropoint(*quantised, dim=dim), torch.zeros(3, 4))


@pytest.mark.parametrize("x", [[3.4e38, -3.4e38], [1e-44, 0.0], [7.0, 7.0], [1000.0, 1000.5]])
def test_ranges_that_strain_float32(x: list[float]):
    again = dequantize_zeropoint(*quantize_zeropoint(torch.tensor(x)))
    largest = max(map(abs, x))
    assert again.isfinite().all()
    torch.testing.assert_close(again, torch.tensor(x), rtol=0, atol=largest / 127 + 1e-44)


@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from([None, 0, 1]),
    st.integers(2, 8),
    st.floats(-3, 3),
    st.integers(0, 10_000),
)
def test_no_value_is_off_by_more_than_a_step(
    rows: int, columns: int, dim: int | None, bits: int, shift: float, seed: int
):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) + shift
    codes, step, zero_point = quantize_zeropoint(x, dim, bits)
    q = 2 ** (bits - 1) - 1
    assert codes.min() >= -q
    assert codes.max() <= q
    again = dequantize_zeropoint(codes, step, zero_point, dim)
    if dim is not None:
        step = step.unsqueeze(dim)
    # Half for the rounding of the value, half for that of the zero-point at the ends.
    assert ((again - x).abs() <= step * 1.0001).all()
    # Zero is exact, whatever the range.
    with_zero = torch.cat([x.reshape(-1), torch.zeros(1)])
    assert dequantize_zeropoint(*quantize_zeropoint(with_zero, None, bits))[-1] == 0


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 9), st.integers(0, 10_000))
def test_the_product_is_that_of_the_dequantised(m: int, k: int, n: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator).relu() + 0.1
    b = torch.randn(k, n, generator=generator)
    a_again = dequantize_zeropoint(*quantize_zeropoint(a, 1), dim=1).double()
    b_again = dequantize_zeropoint(*quantize_zeropoint(b, 0), dim=0).double()
    torch.testing.assert_close(
        zeropoint_matmul(a, b), (a_again @ b_again).float(), rtol=1e-5, atol=1e-5
    )


def test_bits_and_values_that_cannot_be_are_refused():
    with pytest.raises(UnsupportedError, match="int8 holds codes of 2 to 8 bits"):
        quantize_zeropoint(torch.ones(2), bits=16)
    with pytest.raises(UnsupportedError, match="NaN or infinity"):
        quantize_zeropoint(torch.tensor([1.0, torch.nan]))
