"""Products with 4-bit weights, activations in int8 or in float, against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featherweight.quant.blockdot import linear_4bit
from featherweight.quant.blockwise import BLOCKSIZES, FourBit, dequantize_4bit, pack_nibbles
from featherweight.quant.codebooks import FP4, int8_table

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = torch.ops.featherweight
CODES = ["nf4", "fp4", "int4", "random"]
M = st.one_of(st.integers(0, 13), st.sampled_from([16, 17, 24, 25, 36, 37, 40]))
N = st.integers(1, 70)
K = st.one_of(
    st.integers(1, 12).map(lambda k: 32 * k),
    st.integers(1, 300),
    st.sampled_from([1024, 4096, 4128, 4160, 8224, 11008]),
)
LAYOUTS = ["rows", "single", "halves", "ones", "transposed", "sliced", "expanded", "shifted"]
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
    name=st.sampled_from(CODES),
    blocksize=st.sampled_from(BLOCKSIZES),
    double=st.booleans(),
    exact=st.booleans(),
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
    name: str,
    blocksize: int,
    double: bool,
    exact: bool,
    seed: int,
    numbers: Any,
    rows: Any,
    four_bit: Any,
    arguments: Any,
    close: Any,
) -> None:
    x = rows(m, k, layout, seed=seed, dtype=dtype)
    q = four_bit(numbers(n, k, seed=seed + 1), name, blocksize, double)
    bias = None if bias_dtype is None else numbers(n, seed=seed + 2, dtype=bias_dtype)
    found = OPS.linear_4bit(x, *arguments(q), n, bias, exact)
    expected = linear_4bit(x, q, bias, exact)
    close(found, expected, x, dequantize_4bit(q, torch.float32), bias)


@pytest.mark.parametrize("k", [32, 64, 96, 1088, 4096 + 32])
@pytest.mark.parametrize("m", [1, 4, 9])
@pytest.mark.parametrize("code", [2, 3, 10, 11], ids=lambda code: f"code{code}")
def test_the_largest_products_do_not_saturate(
    isa: str, code: int, m: int, k: int, arguments: Any
) -> None:
    """FP4 has 0.667, 1, and the negative ones: all codes of a weight at an end of int8."""
    nibbles = torch.full((5 * k,), code, dtype=torch.uint8)
    blocks = -(-5 * k // 64)
    q = FourBit(pack_nibbles(nibbles), torch.full((blocks,), 2.0), FP4, 64, (5, k), torch.float32)
    table, step = int8_table(FP4)
    for activation in (-3.0, 3.0):
        x = torch.full((m, k), activation)
        found = OPS.linear_4bit(x, *arguments(q), 5, None, False)
        expected = torch.full((m, 5), int(table[code]) * step * 2 * activation * k)
        torch.testing.assert_close(found, expected, rtol=1e-6 + 1e-8 * k, atol=0)


@pytest.mark.parametrize("exact", [False, True], ids=["int8-activations", "exact"])
@pytest.mark.parametrize("m", [1, 9])
def test_blocks_that_began_in_the_row_before(
    isa: str, m: int, exact: bool, four_bit: Any, arguments: Any
) -> None:
    """With rows of 96 and blocks of 256, row 2 has absmax of block 0 and of block 1."""
    weight = torch.ones(4, 96)
    weight.view(-1)[256:] = 1000.0
    q = four_bit(weight, "nf4", 256)
    x = torch.ones(m, 96)
    found = OPS.linear_4bit(x, *arguments(q), 4, None, exact)
    expected = torch.tensor([96.0, 96.0, 64 + 32 * 1000.0, 96 * 1000.0])
    torch.testing.assert_close(found, expected.expand(m, 4), rtol=1e-6, atol=0)


def test_a_column_of_codes_is_taken_as_it_is_stored(
    isa: str, numbers: Any, four_bit: Any, arguments: Any
) -> None:
    q = four_bit(numbers(8, 64))
    codes, *rest = arguments(q)
    x = numbers(3, 64, seed=1)
    found = OPS.linear_4bit(x, codes[:, None], *rest, 8, None, False)
    assert torch.equal(found, OPS.linear_4bit(x, codes, *rest, 8, None, False))
