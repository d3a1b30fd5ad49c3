"""Products with weights in float32, bfloat16 and float16, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = torch.ops.featherweight
M = st.one_of(st.integers(0, 13), st.sampled_from([16, 17, 24, 25, 36, 37, 40]))
N = st.integers(1, 70)
K = st.one_of(st.integers(1, 300), st.sampled_from([511, 512, 513, 1025, 4099, 11008]))
LAYOUTS = ["rows", "single", "halves", "ones", "transposed", "sliced", "expanded", "shifted"]


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the ISA stays the same
)
@given(
    m=M,
    n=N,
    k=K,
    layout=st.sampled_from(LAYOUTS),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    bias_dtype=st.sampled_from([None, torch.float64, *DTYPES]),
    seed=st.integers(0, 99),
)
def test_it_is_the_reference(
    isa: str,
    m: int,
    n: int,
    k: int,
    layout: str,
    dtypes: tuple[torch.dtype, torch.dtype],
    bias_dtype: torch.dtype | None,
    seed: int,
    numbers: Any,
    rows: Any,
    close: Any,
) -> None:
    x = rows(m, k, layout, seed=seed, dtype=dtypes[0])
    weight = numbers(n, k, seed=seed + 1, dtype=dtypes[1])
    bias = None if bias_dtype is None else numbers(n, seed=seed + 2, dtype=bias_dtype)
    found = OPS.linear_half(x, weight, bias)
    expected = linear(x.float(), weight.float(), None if bias is None else bias.float())
    close(found, expected.to(x.dtype), x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_number_of_16_bits_is_read_and_written(isa: str, dtype: torch.dtype) -> None:
    values = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    finite = values[values.isfinite()].view(-1, 32)  # subnormal ones, too
    eye = torch.eye(32, dtype=dtype)
    for m in (1, 8, 32):
        assert torch.equal(OPS.linear_half(eye[:m], finite, None), finite.T[:m])
    assert torch.equal(OPS.linear_half(finite, eye, None), finite)
    others = values[~values.isfinite()]
    for found in (
        OPS.linear_half(others[:, None], eye[:1, :1], None).flatten(),
        OPS.linear_half(eye[:1, :1], others[:, None], None).flatten(),
    ):
        assert torch.equal(found.isnan(), others.isnan())
        assert torch.equal(found[found.isinf()], others[others.isinf()])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(
        st.one_of(
            st.floats(width=32),
            st.floats(-70000, 70000, width=32),  # about the end of float16
            st.floats(-(2.0**-13), 2.0**-13, width=32),  # about the start of it
            st.integers(-(1 << 12), 1 << 12).map(float),  # ties between numbers of 11 bits
        ),
        min_size=1,
        max_size=40,
    ),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_results_are_rounded_as_torch_rounds(
    isa: str, values: list[float], dtype: torch.dtype
) -> None:
    bias = torch.tensor(values)
    zeros = torch.zeros(1, 3, dtype=dtype)
    found = OPS.linear_half(zeros, torch.zeros(len(values), 3), bias)[0]
    torch.testing.assert_close(found, bias.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("m", [1, 3, 12])
def test_weights_that_are_subnormal_or_infinite(
    isa: str, dtype: torch.dtype, m: int, numbers: Any
) -> None:
    weight = numbers(19, 37, dtype=dtype)
    x = numbers(m, 37, seed=1).abs() + 0.1
    clean = OPS.linear_half(x, weight, None)
    tiny = torch.finfo(dtype).smallest_normal / 8
    weight[4], weight[7, 36], weight[11, 0] = tiny, torch.inf, -torch.inf
    found = OPS.linear_half(x, weight, None)
    torch.testing.assert_close(found[:, 4], tiny * x.sum(1), rtol=1e-5, atol=0)
    assert found[:, 7].tolist() == [torch.inf] * m
    assert found[:, 11].tolist() == [-torch.inf] * m
    others = [n for n in range(19) if n not in (4, 7, 11)]
    assert torch.equal(found[:, others], clean[:, others])
