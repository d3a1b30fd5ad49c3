"""Quantising and its inverse: the bytes are those of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featherweight.errors import FeatherweightError
from featherweight.native import linear
from featherweight.quant.blockwise import BLOCKSIZES, dequantize_4bit, quantize_4bit
from featherweight.quant.codebooks import codebook
from featherweight.quant.int8 import quantize_rows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = torch.ops.featherweight
NAMES = ["nf4", "fp4", "int4", "random"]
SCALES = [1.0, 1e-3, 1e4, 1e-30, 1e-36, 1e-39, 1e-43, 1e30, 1e37]
COUNTS = st.one_of(st.integers(0, 300), st.integers(1, 9000))
thorough = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the ISA stays the same
)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal to the bit; any NaN is like another."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if found.is_floating_point():
        assert torch.equal(found.signbit() & ~found.isnan(), expected.signbit() & ~expected.isnan())
    return torch.equal(found.nan_to_num(1e30), expected.nan_to_num(1e30))


def hard(count: int, scale: float, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """N(0, scale²), some of it 0 or the same, in what the dtype can hold."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    x[seed % 7 :: 7] = 0.0
    x[seed % 11 :: 11] = -0.0
    x[seed % 13 :: 13] = 0.5
    x[: count // 3 * (seed % 2)] = 0.0  # blocks and rows of zeros
    largest = torch.finfo(dtype).max
    return (x.double() * scale).clamp(-largest, largest).to(dtype)


@thorough
@given(
    count=COUNTS,
    scale=st.sampled_from(SCALES),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(NAMES),
    blocksize=st.sampled_from(BLOCKSIZES),
    seed=st.integers(0, 999),
)
def test_4bit_codes_and_absmax(
    isa: str, count: int, scale: float, dtype: torch.dtype, name: str, blocksize: int, seed: int
) -> None:
    weight = hard(count, scale, dtype, seed)
    code = codebook(name) if name != "random" else hard(16, 0.2, torch.float32, seed).clamp(-1, 1)
    q = quantize_4bit(weight, code, blocksize)
    codes, absmax = OPS.quantize_4bit(weight, code, blocksize)
    assert same(codes, q.codes)
    assert same(absmax, q.absmax)


@pytest.mark.parametrize("name", NAMES[:3])
@pytest.mark.parametrize("tail", [0, 45])
def test_halfway_between_two_codes_the_lower_one_is_taken(isa: str, name: str, tail: int) -> None:
    levels = codebook(name).sort().values
    middle = (levels[:-1] + levels[1:]) / 2
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    values = torch.cat([middle, middle.nextafter(up), middle.nextafter(down)])
    weight = torch.cat([torch.ones(1), values, torch.zeros(18), torch.ones(1), values[:tail]])
    q = quantize_4bit(weight, codebook(name), 64)
    codes, absmax = OPS.quantize_4bit(weight, codebook(name), 64)
    assert same(codes, q.codes)
    assert same(absmax, q.absmax)


def test_4bit_of_any_shape_and_stride(isa: str, numbers: Any) -> None:
    for weight in (numbers(3, 5, 7), numbers(9, 64).T, numbers(100)[::2], numbers()):
        q = quantize_4bit(weight, codebook("nf4"), 32)
        codes, absmax = OPS.quantize_4bit(weight, codebook("nf4"), 32)
        assert same(codes, q.codes)
        assert same(absmax, q.absmax)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 63, 4095, 4100])
def test_4bit_refuses_what_no_code_stands_for(
    isa: str, at: int, value: float, numbers: Any
) -> None:
    weight = numbers(4101)
    weight[at] = value
    with pytest.raises(FeatherweightError, match=r"infinit.*no code"):
        OPS.quantize_4bit(weight, codebook("nf4"), 64)


@thorough
@given(
    n=st.integers(0, 20),
    k=st.one_of(st.integers(1, 300), st.sampled_from([4099, 11008])),
    scale=st.sampled_from(SCALES),
    dtype=st.sampled_from(DTYPES),
    bad=st.sampled_from([None, torch.nan, torch.inf]),
    seed=st.integers(0, 999),
)
def test_int8_codes_and_absmax(
    isa: str, n: int, k: int, scale: float, dtype: torch.dtype, bad: float | None, seed: int
) -> None:
    weight = hard(n * k, scale, dtype, seed).view(n, k)
    if n and bad is not None:
        weight[seed % n, seed % k] = bad
    expected_codes, expected_absmax = quantize_rows(weight)
    codes, absmax = OPS.quantize_int8(weight)
    assert same(codes, expected_codes)
    assert same(absmax, expected_absmax)


def test_int8_takes_halves_to_the_even_neighbour(isa: str) -> None:
    halves = torch.arange(-126.5, 127).repeat(3)
    weight = torch.cat([halves, torch.tensor([127.0])])[None]
    codes, absmax = OPS.quantize_int8(weight)
    assert absmax.item() == 127
    assert codes[0, :-1].tolist() == [round(x) for x in halves.tolist()]


def test_int8_of_a_transposed_weight(isa: str, numbers: Any) -> None:
    weight = numbers(70, 9).T
    codes, absmax = OPS.quantize_int8(weight)
    expected_codes, expected_absmax = quantize_rows(weight.contiguous())
    assert same(codes, expected_codes)
    assert same(absmax, expected_absmax)


@thorough
@given(
    shape=st.one_of(
        st.tuples(COUNTS),
        st.tuples(st.integers(1, 70), st.integers(1, 130)),
        st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 40)),
    ),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(NAMES),
    blocksize=st.sampled_from(BLOCKSIZES),
    double=st.booleans(),
    scale=st.sampled_from([1.0, 1e-3, 1e4, 1e-36, 1e30]),
    seed=st.integers(0, 99),
)
def test_4bit_decoded(
    isa: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    name: str,
    blocksize: int,
    double: bool,
    scale: float,
    seed: int,
    numbers: Any,
    four_bit: Any,
    arguments: Any,
) -> None:
    q = four_bit(numbers(*shape, seed=seed) * scale, name, blocksize, double)
    found = OPS.dequantize_4bit(*arguments(q), list(shape), dtype)
    expected = dequantize_4bit(q, dtype)
    assert same(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_long_calls_are_cut(
    isa: str, dtype: torch.dtype, numbers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an interrupt need not wait."""
    weight = numbers(37, 515, dtype=dtype)
    rows = OPS.quantize_int8(weight)
    code = codebook("nf4")
    blocks = {size: OPS.quantize_4bit(weight, code, size) for size in (32, 64, 4096)}
    monkeypatch.setattr(linear, "_QUANTISED", 4096)
    assert all(map(torch.equal, OPS.quantize_int8(weight), rows))
    for size, whole in blocks.items():
        assert all(map(torch.equal, OPS.quantize_4bit(weight, code, size), whole))
    weight[36, 514] = torch.nan
    with pytest.raises(FeatherweightError, match="leave it out of the quantisation"):
        OPS.quantize_4bit(weight, code, 64)
