"""LLM.int8(): rows of integers, outliers in float."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import linear

from featherweight.quant.absmax import quantize_absmax
from featherweight.quant.int8 import linear_int8, outliers, quantize_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def planted(rows: int, features: int, seed: int = 0) -> torch.Tensor:
    """Activations [rows, features] with three channels forty times as large as the rest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator)
    x[:, [3, features // 2, features - 1]] *= 40
    return x


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of what is right."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_have_the_bytes_of_bitsandbytes(hard: torch.Tensor, dtype: torch.dtype, bnb: Any):
    x = torch.atleast_2d(hard.clamp(-6e4, 6e4) if dtype is torch.float16 else hard).to(dtype)
    kept = (x == 0).all(1) | (x.abs().amax(1).float() >= 1e-35)  # we say 0 to what is smaller
    codes, absmax, _ = bnb.int8_vectorwise_quant(x.clone())
    found, found_absmax = quantize_rows(x)
    assert torch.equal(found_absmax, absmax)
    assert torch.equal(found[kept], codes[kept])
    assert not found[~kept].any()


@given(st.integers(1, 20), st.integers(1, 200), st.sampled_from(DTYPES), st.integers(0, 10_000))
def test_any_shape_has_the_bytes_of_bitsandbytes(
    bnb: Any, rows: int, features: int, dtype: torch.dtype, seed: int
):
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(seed)).to(dtype)
    codes, absmax, _ = bnb.int8_vectorwise_quant(x.clone())
    found, found_absmax = quantize_rows(x)
    assert torch.equal(found, codes)
    assert torch.equal(found_absmax, absmax)


def test_rows_are_absmax_quantised_whatever_leads_them(normal: Any):
    x = normal(2, 3, 5, 32)
    codes, absmax = quantize_rows(x)
    assert (codes.shape, absmax.shape) == ((2, 3, 5, 32), (2, 3, 5))
    expected, expected_absmax = quantize_absmax(x.reshape(30, 32), dim=1)
    assert torch.equal(codes.reshape(30, 32), expected)
    assert torch.equal(absmax.reshape(30), expected_absmax)


def test_rows_of_nothing_numbers_and_no_numbers():
    x = torch.ones(5, 4)
    x[0] = 0
    x[1, 2] = torch.nan
    x[2, 3] = -torch.inf
    x[3] = 1e-36
    codes, absmax = quantize_rows(x)
    assert codes.tolist() == [[0] * 4, [0] * 4, [0] * 4, [0] * 4, [127] * 4]
    torch.testing.assert_close(
        absmax, torch.tensor([0, torch.nan, torch.nan, 1e-36, 1]), equal_nan=True
    )


def test_outliers_are_at_or_above_the_threshold():
    x = torch.tensor([[6.0, -6.5, 5.9, torch.inf], [0.0, 1.0, torch.nan, 2.0]])
    by_row = [[True, True, False, True], [False] * 4]
    assert outliers(x, 6.0, per_batch=False).tolist() == by_row
    assert outliers(x, 6.0, per_batch=True).tolist() == [by_row[0], by_row[0]]
    assert not outliers(x, 0.0, per_batch=True).any()


@pytest.mark.parametrize("threshold", [0.0, 6.0, 2.5])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_per_batch_is_what_bitsandbytes_computes(
    rows: int, bias: bool, threshold: float, normal: Any, bnb: Any
):
    from bitsandbytes.nn import Linear8bitLt

    layer = Linear8bitLt(96, 40, bias=bias, has_fp16_weights=False, threshold=threshold).half()
    layer.load_state_dict({"weight": normal(40, 96).half()}, strict=False)
    if bias:
        layer.bias.data = normal(40, seed=1).half()
    layer = layer.to("cpu").eval()
    x = planted(rows, 96).half()
    with torch.no_grad():
        expected = layer(x.clone())
    state = layer.state
    found = linear_int8(x, state.CB, state.SCB, layer.bias, threshold, per_batch=True)
    # Theirs rounds to fp16 three times: the weights of outliers, the integer part, the sum.
    size = linear(x.float().abs(), (state.CB * state.SCB[:, None] / 127).abs()).max().item()
    torch.testing.assert_close(found, expected, rtol=2**-10, atol=2**-11 * size / 4)
    if threshold == 0:
        torch.testing.assert_close(found, expected, rtol=2**-10, atol=2**-14)


def test_absmax_of_a_row_counts_what_is_no_outlier_itself(normal: Any, bnb: Any):
    """Also in the column of another row's outlier, which is not in the row's integers."""
    from bitsandbytes.nn import Linear8bitLt

    layer = Linear8bitLt(64, 32, bias=False, has_fp16_weights=False, threshold=6.0).half()
    layer.load_state_dict({"weight": normal(32, 64).half()})
    layer = layer.to("cpu").eval()
    x = normal(2, 64, scale=0.004).half()
    x[0, 9], x[1, 9] = 5.9, 100.0
    with torch.no_grad():
        expected = layer(x.clone())[0].float()
    weight, absmax = layer.state.CB, layer.state.SCB
    found = linear_int8(x, weight, absmax, None, 6.0, per_batch=True)[0].float()
    torch.testing.assert_close(found, expected, rtol=2**-9, atol=2**-8)
    # The other 63 values of row 0 are below half a step of 5.9 / 127.
    column = 5.9 * weight[:, 9] * absmax / 127
    torch.testing.assert_close(found, column, rtol=2**-9, atol=2**-8)


def test_without_outliers_it_is_the_integer_product(normal: Any):
    x, weight = normal(7, 50), normal(11, 50, seed=1)
    bias = normal(11, seed=2)
    codes, absmax = quantize_rows(weight)
    x_codes, x_absmax = quantize_rows(x)
    integers = (x_codes[:, None].int() * codes.int()).sum(-1)  # [7, 11]
    expected = integers * (x_absmax[:, None] * absmax) / 127**2 + bias
    for threshold in (0.0, 50.0):
        found = linear_int8(x, codes, absmax, bias, threshold, per_batch=False)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("per_batch", [False, True], ids=["per row", "per batch"])
def test_setting_outliers_apart_saves_the_rest_of_the_row(per_batch: bool, normal: Any):
    x, weight = planted(64, 256), normal(128, 256, seed=1)
    # The channels that drown the rest carry little: so it is the rest that counts.
    weight[:, [3, 128, 255]] *= 0.02
    codes, absmax = quantize_rows(weight)
    exact = x @ (codes * absmax[:, None] / 127).T  # what rounding the weights costs is not at issue
    errors = {
        threshold: relative(linear_int8(x, codes, absmax, None, threshold, per_batch), exact)
        for threshold in (0.0, 6.0)
    }
    assert errors[0.0] > 0.1
    assert errors[6.0] < 0.01


@given(st.integers(2, 12), st.integers(4, 100), st.integers(0, 10_000))
def test_a_row_does_not_depend_on_its_neighbours(rows: int, features: int, seed: int):
    x = planted(rows, features, seed)
    weight = torch.randn(9, features, generator=torch.Generator().manual_seed(seed + 1))
    codes, absmax = quantize_rows(weight)
    together = linear_int8(x, codes, absmax, None, 6.0, per_batch=False)
    alone = [linear_int8(row, codes, absmax, None, 6.0, per_batch=False) for row in x]
    torch.testing.assert_close(together, torch.stack(alone), rtol=2e-7, atol=1e-30)


def test_per_batch_depends_on_the_neighbours(normal: Any):
    x = normal(2, 64)
    x[1, 5] = 50.0
    codes, absmax = quantize_rows(normal(8, 64, seed=1))
    alone = linear_int8(x[:1], codes, absmax, None, 6.0, per_batch=True)
    assert not torch.equal(linear_int8(x, codes, absmax, None, 6.0, per_batch=True)[:1], alone)


@given(
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(1, 70),
    st.integers(1, 20),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 3.0]),
    st.booleans(),
)
def test_shapes_dtypes_and_error(
    leading: list[int],
    features: int,
    out_features: int,
    dtype: torch.dtype,
    threshold: float,
    per_batch: bool,
):
    generator = torch.Generator().manual_seed(features)
    x = torch.randn(*leading, features, generator=generator).to(dtype)
    weight = torch.randn(out_features, features, generator=generator)
    codes, absmax = quantize_rows(weight)
    found = linear_int8(x, codes, absmax, None, threshold, per_batch)
    assert (found.shape, found.dtype) == ((*leading, out_features), dtype)
    # Half a step of each side, times the other side's largest.
    x = x.float()
    largest = x.abs().amax(-1, keepdim=True) * absmax
    bound = features * largest * (1 / 127 + 1 / 254**2)
    epsilon = torch.finfo(dtype).eps
    assert ((found - linear(x, weight)).abs() <= bound * (1 + 4 * epsilon) + 1e-5).all()


@pytest.mark.parametrize("threshold", [0.0, 6.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_never_become_numbers(value: float, threshold: float, normal: Any):
    x = normal(3, 64)
    clean = x.clone()
    x[1, 7] = value
    codes, absmax = quantize_rows(normal(8, 64, seed=1))
    found = linear_int8(x, codes, absmax, None, threshold, per_batch=False)
    assert not found[1].isfinite().any()
    others = linear_int8(clean, codes, absmax, None, threshold, per_batch=False)
    assert torch.equal(found[[0, 2]], others[[0, 2]])


def test_the_input_is_left_alone(normal: Any):
    x = planted(4, 64)
    before = x.clone()
    codes, absmax = quantize_rows(normal(8, 64))
    linear_int8(x, codes, absmax, None, 6.0, per_batch=True)
    assert torch.equal(x, before)
