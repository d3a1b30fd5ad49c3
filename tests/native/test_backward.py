"""Gradients of activations, with weights of every format, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featherweight.quant.blockwise import BLOCKSIZES, dequantize_4bit

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = torch.ops.featherweight
M = st.one_of(st.integers(0, 13), st.sampled_from([16, 17, 24, 25, 36, 37, 40]))
N = st.one_of(st.integers(1, 70), st.sampled_from([511, 512, 513, 1100]))
K = st.one_of(st.integers(1, 300), st.sampled_from([512, 1025, 4128]))
LAYOUTS = ["rows", "single", "halves", "ones", "transposed", "sliced", "expanded", "shifted"]


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the ISA and kind stay the same
)
@given(
    m=M,
    n=N,
    k=K,
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("kind", ["int8", "f32", "bf16", "fp16"])
def test_it_is_the_product_with_the_dequantised_weight(
    isa: str,
    kind: str,
    m: int,
    n: int,
    k: int,
    layout: str,
    dtype: torch.dtype,
    seed: int,
    numbers: Any,
    rows: Any,
    product_of: Any,
    close: Any,
) -> None:
    grad = rows(m, n, layout, seed=seed, dtype=dtype)
    product = product_of(kind, numbers(n, k, seed=seed + 1))
    expected = (grad.float() @ product.weight).to(dtype)
    close(product.backward(grad), expected, grad, product.weight.T)


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    m=M,
    n=N,
    k=K,
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from(["nf4", "fp4", "int4", "random"]),
    blocksize=st.sampled_from(BLOCKSIZES),
    double=st.booleans(),
    seed=st.integers(0, 99),
)
def test_4bit(
    isa: str,
    m: int,
    n: int,
    k: int,
    layout: str,
    dtype: torch.dtype,
    name: str,
    blocksize: int,
    double: bool,
    seed: int,
    numbers: Any,
    rows: Any,
    four_bit: Any,
    arguments: Any,
    close: Any,
) -> None:
    grad = rows(m, n, layout, seed=seed, dtype=dtype)
    q = four_bit(numbers(n, k, seed=seed + 1), name, blocksize, double)
    weight = dequantize_4bit(q, torch.float32)
    found = OPS.linear_4bit_backward(grad, *arguments(q), k)
    close(found, (grad.float() @ weight).to(dtype), grad, weight.T)
