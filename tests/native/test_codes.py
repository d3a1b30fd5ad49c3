"""Activations that are int8 codes already, as bitsandbytes gives them, and making such codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featherweight.errors import NativeError
from featherweight.native import linear as native
from featherweight.quant.int8 import outliers, quantize_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
M = st.one_of(st.integers(1, 13), st.sampled_from([16, 17, 40]))
K = st.one_of(st.integers(1, 300), st.sampled_from([511, 513, 1025, 4099]))
thorough = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the ISA stays the same
)


def codes(*shape: int, seed: int) -> torch.Tensor:
    """Anything that a byte holds, −128 included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)


def product(
    x: torch.Tensor,
    absmax: torch.Tensor,
    weight: torch.Tensor,
    weight_absmax: torch.Tensor,
) -> torch.Tensor:
    """In float64, which holds the sums of integers exactly."""
    return x.double() @ weight.double().T * torch.outer(absmax, weight_absmax).double() / 127**2


@thorough
@given(
    m=M,
    n=st.integers(1, 70),
    k=K,
    dtype=st.sampled_from(DTYPES),
    with_bias=st.booleans(),
    apart=st.sampled_from([0, 1, 5, 70]),
    seed=st.integers(0, 99),
)
def test_it_is_the_reference(
    isa: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    with_bias: bool,
    apart: int,
    seed: int,
    numbers: Any,
    close: Any,
) -> None:
    x, weight = codes(m, k, seed=seed), codes(n, k, seed=seed + 1)
    absmax, weight_absmax = numbers(m, seed=seed + 2).abs(), numbers(n, seed=seed + 3).abs()
    bias = numbers(n, seed=seed + 4) if with_bias else None
    columns = torch.randint(0, k, (apart,), generator=torch.Generator().manual_seed(seed))
    values = 10 * numbers(m, apart, seed=seed + 5)
    found = native.linear_codes(
        native.int8(weight, weight_absmax), x, absmax, dtype, bias, columns, values
    )
    decoded = weight * (weight_absmax / 127)[:, None]
    expected = product(x, absmax, weight, weight_absmax)
    expected = expected + values.double() @ decoded[:, columns].double().T
    expected = expected if bias is None else expected + bias.double()
    given_x = torch.cat([x * (absmax / 127)[:, None], values], 1)
    given_weight = torch.cat([decoded, decoded[:, columns]], 1)
    close(found, expected.to(dtype), given_x, given_weight, bias)


@pytest.mark.parametrize("k", [1, 32, 64, 65, 127, 1000, native.LONGEST - 1])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 9])
@pytest.mark.parametrize("code", [-128, -127, 127])
@pytest.mark.parametrize("activation", [-128, 127])
def test_the_largest_products_neither_saturate_nor_overflow(
    isa: str, activation: int, code: int, m: int, k: int
) -> None:
    weight, x = (torch.full((r, k), c, dtype=torch.int8) for r, c in ((9, code), (m, activation)))
    one, scale = torch.full((9,), 127.0), torch.full((m,), 127.0)
    found = native.linear_codes(native.int8(weight, one), x, scale, torch.float32)
    assert (found == float(code * activation * k)).all()


def test_what_it_does_not_take_is_refused() -> None:
    weight = codes(3, 40, seed=0)
    ones, absmax = torch.ones(3), torch.ones(2)
    matrix = native.int8(weight, ones)
    x, values = codes(2, 40, seed=1), torch.ones(2, 1)
    with pytest.raises(NativeError, match="last dimensions equal"):
        native.linear_codes(matrix, x[:, :39], absmax, torch.float32)
    with pytest.raises(NativeError, match=r"activations are torch\.uint8"):
        native.linear_codes(matrix, x.view(torch.uint8), absmax, torch.float32)
    with pytest.raises(NativeError, match=r"dtype is torch\.float64"):
        native.linear_codes(matrix, x, absmax, torch.float64)
    with pytest.raises(NativeError, match="wanted"):
        native.linear_codes(matrix, x, absmax[:1], torch.float32)
    for column in (-1, 40):
        with pytest.raises(NativeError, match=f"from {column} to {column}, of 40"):
            native.linear_codes(
                matrix, x, absmax, torch.float32, None, torch.tensor([column]), values
            )
    long = torch.zeros(1, native.LONGEST, dtype=torch.int8)
    with pytest.raises(NativeError, match="less than 131072"):
        native.linear_codes(native.int8(long, ones[:1]), long, absmax[:1], torch.float32)


@thorough
@given(
    m=M,
    k=K,
    dtype=st.sampled_from(DTYPES),
    threshold=st.sampled_from([0.0, 1e9, 3.0, 0.5, 1e-30]),
    seed=st.integers(0, 99),
)
def test_outliers_are_left_out(
    isa: str, m: int, k: int, dtype: torch.dtype, threshold: float, seed: int, numbers: Any
) -> None:
    x = numbers(m, k, seed=seed, dtype=dtype)
    apart = outliers(x, threshold, per_batch=False)
    expected, expected_absmax = quantize_rows(x.masked_fill(apart, 0))
    found, absmax, columns = native.quantize_but_outliers(x, threshold)
    assert torch.equal(found, expected)
    assert torch.equal(absmax, expected_absmax)
    assert torch.equal(columns, apart.any(0))
