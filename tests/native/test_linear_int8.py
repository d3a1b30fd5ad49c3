"""Products with int8 weights: the integers exact, outliers in float, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featherweight.quant.int8 import linear_int8, quantize_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = torch.ops.featherweight
M = st.one_of(st.integers(0, 13), st.sampled_from([16, 17, 24, 25, 36, 37, 40]))
N = st.integers(1, 70)
K = st.one_of(st.integers(1, 300), st.sampled_from([511, 512, 513, 1025, 4099, 11008]))
LAYOUTS = ["rows", "single", "halves", "ones", "transposed", "sliced", "expanded", "shifted"]
LARGEST = 131072  # columns of which int32 holds every sum of products
thorough = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the ISA stays the same
)


@thorough
@given(
    m=M,
    n=N,
    k=K,
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    bias_dtype=st.sampled_from([None, torch.float64, *DTYPES]),
    threshold=st.sampled_from([0.0, 1e9, 3.0, 2.0, 0.5, 1e-30]),  # no outlier … all outliers
    per_batch=st.booleans(),
    seed=st.integers(0, 99),
)
def test_it_is_the_reference(
    isa: str,
    m: int,
    n: int,
    k: int,
    layout: str,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    threshold: float,
    per_batch: bool,
    seed: int,
    numbers: Any,
    rows: Any,
    close: Any,
) -> None:
    x = rows(m, k, layout, seed=seed, dtype=dtype)
    codes, absmax = quantize_rows(numbers(n, k, seed=seed + 1))
    bias = None if bias_dtype is None else numbers(n, seed=seed + 2, dtype=bias_dtype)
    found = OPS.linear_int8(x, codes, absmax, bias, threshold, per_batch)
    expected = linear_int8(x, codes, absmax, bias, threshold, per_batch)
    close(found, expected, x, codes * (absmax / 127)[:, None], bias)


def integers(m: int, n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x and weight of scale 1, so that results are sums of integers; and these sums."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-127, 128, (m, k), generator=generator)
    x[:, seed % k] = 127
    weight = torch.randint(-128, 128, (n, k), generator=generator)
    sums = x.double() @ weight.double().T  # below 2^53: exact
    return x.float(), weight.to(torch.int8), sums.float()


@thorough
@given(m=M, n=N, k=K, seed=st.integers(0, 99))
def test_integers_are_summed_exactly(isa: str, m: int, n: int, k: int, seed: int) -> None:
    x, weight, sums = integers(m, n, k, seed)
    found = OPS.linear_int8(x, weight, torch.full((n,), 127.0), None, 0.0, False)
    assert torch.equal(found, sums)


@pytest.mark.parametrize("k", [1, 31, 32, 33, 63, 64, 65, 127, 129, 1000, LARGEST])
@pytest.mark.parametrize("m", [1, 4, 9])
@pytest.mark.parametrize("code", [-128, -127, 127])
def test_the_largest_products_neither_saturate_nor_overflow(
    isa: str, code: int, m: int, k: int
) -> None:
    weight = torch.full((9, k), code, dtype=torch.int8)
    for activation in (-127.0, 127.0):
        x = torch.full((m, k), activation)
        found = OPS.linear_int8(x, weight, torch.full((9,), 127.0), None, 0.0, False)
        assert (found == float(code * activation * k)).all()


@pytest.mark.parametrize("m", [1, 9])
def test_rows_longer_than_int32_can_sum(isa: str, m: int, close: Any) -> None:
    x, weight, sums = integers(m, 3, LARGEST + 1, seed=5)
    found = OPS.linear_int8(x, weight, torch.full((3,), 127.0), None, 0.0, False)
    close(found, sums, x, weight)


@pytest.mark.parametrize("m", [1, 9])
def test_rows_of_which_int32_would_overflow(isa: str, m: int) -> None:
    k = LARGEST + 1000  # times 127 · 128 is above 2^31
    weight, x = torch.full((3, k), -128, dtype=torch.int8), torch.full((m, k), 127.0)
    found = OPS.linear_int8(x, weight, torch.full((3,), 127.0), None, 0.0, False)
    # In float32, a sum of equal terms is off to one side.
    torch.testing.assert_close(found, torch.full((m, 3), -128.0 * 127 * k), rtol=1e-3, atol=0)


def test_outliers_take_nothing_from_other_values(isa: str, numbers: Any) -> None:
    """Next to 1000, values about 1 would all become 0 or 8; apart, they keep their 8 bits."""
    weight = numbers(32, 256, seed=1)
    codes, absmax = quantize_rows(weight)
    x = numbers(12, 256)
    x[:, [3, 77, 255]] = 1000.0
    for m in (1, 3, 12):
        exact = x[:m] @ (codes * (absmax / 127)[:, None]).T
        for threshold, least, most in ((0.0, 10, 100), (6.0, 0, 0.5)):
            found = OPS.linear_int8(x[:m], codes, absmax, None, threshold, False)
            assert least < (found - exact).abs().max() < most


def test_an_activation_at_the_threshold_is_an_outlier(isa: str) -> None:
    weight, absmax = torch.full((9, 40), 127, dtype=torch.int8), torch.full((9,), 127.0)
    x = torch.full((12, 40), 0.01)  # nothing, beside 6 in 8 bits
    x[:, 33] = 6.0
    for m in (1, 12):
        for sign in (1, -1):
            for threshold, rest in ((6.0, 39 * 0.01), (6.0000005, 0.0)):
                found = OPS.linear_int8(sign * x[:m], weight, absmax, None, threshold, False)
                expected = torch.full((m, 9), sign * 127 * (6 + rest))
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_per_batch_makes_a_column_float_for_all_rows(isa: str, numbers: Any) -> None:
    codes, absmax = quantize_rows(numbers(8, 64, seed=1))
    x = numbers(10, 64).clamp(-2, 2)
    x[:, 5] = 0.001  # too small for 8 bits beside values of 2
    x[9, 5] = 50.0
    without = x.clone()
    without[:, 5] = 0
    column = codes[:, 5] * (absmax / 127)
    for per_batch, contribution in ((False, 0.0), (True, 0.001)):
        found = OPS.linear_int8(x, codes, absmax, None, 6.0, per_batch)[:9]
        rest = OPS.linear_int8(without, codes, absmax, None, 6.0, per_batch)[:9]
        torch.testing.assert_close(
            found - rest, (contribution * column).expand(9, 8), rtol=0, atol=2e-5
        )
