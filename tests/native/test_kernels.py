"""Every instruction set that runs here, against numpy, over odd sizes, tails and extremes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featherweight import native
from featherweight.errors import NativeError
from featherweight.native.kernels import MAX_DOT_I8

STATUS = native.status()
pytestmark = pytest.mark.skipif(not STATUS.available, reason=STATUS.error or "")

ISAS = [isa for isa in STATUS.built if isa in STATUS.detected]
SIZES = st.one_of(st.integers(0, 300), st.sampled_from([511, 512, 513, 1023, 4096, 4099]))
ROWS = st.integers(0, 37)  # blocks of 8 and what is left over, more than one range of 16
THREADS = st.integers(1, 3)
check = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the ISA stays the same
)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.forced_isa(request.param):
        yield request.param


def dot_i8(weight: np.ndarray, x: np.ndarray, threads: int) -> np.ndarray:
    row_sums = torch.from_numpy(weight.sum(1, dtype=np.int32))
    return native.dot_i8(torch.from_numpy(weight), row_sums, torch.from_numpy(x), threads).numpy()


@check
@given(nbytes=SIZES, offset=st.integers(0, 9), threads=THREADS, seed=st.integers(0, 99))
def test_sum_words(isa: str, nbytes: int, offset: int, threads: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, nbytes + offset, dtype=np.uint8)
    padded = np.zeros(-(-nbytes // 8) * 8, np.uint8)
    padded[:nbytes] = data[offset:]
    expected = int(padded.view(np.uint64).sum(dtype=np.uint64))
    assert native.sum_words(torch.from_numpy(data)[offset:], threads) == expected


def test_sum_words_of_many_ranges(isa: str) -> None:
    data = np.random.default_rng(0).integers(0, 256, 1_000_003, dtype=np.uint8)
    expected = int(np.append(data, np.zeros(5, np.uint8)).view(np.uint64).sum(dtype=np.uint64))
    assert native.sum_words(torch.from_numpy(data), 2) == expected


@check
@given(rows=ROWS, columns=SIZES, threads=THREADS, seed=st.integers(0, 99))
def test_dot_i8_is_exact(isa: str, rows: int, columns: int, threads: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    weight = generator.integers(-128, 128, (rows, columns), dtype=np.int8)
    x = generator.integers(-127, 128, columns, dtype=np.int8)
    expected = weight.astype(np.int64) @ x.astype(np.int64)
    assert np.array_equal(dot_i8(weight, x, threads), expected)


@pytest.mark.parametrize("columns", [1, 31, 32, 63, 64, 65, 1000, MAX_DOT_I8])
@pytest.mark.parametrize("code", [-128, -127, 0, 127])
@pytest.mark.parametrize("activation", [-127, 127])
def test_dot_i8_neither_saturates_nor_overflows(
    isa: str, code: int, activation: int, columns: int
) -> None:
    weight = np.full((9, columns), code, np.int8)
    x = np.full(columns, activation, np.int8)
    assert dot_i8(weight, x, 1).tolist() == [code * activation * columns] * 9


@check
@given(rows=ROWS, columns=SIZES, threads=THREADS, seed=st.integers(0, 99))
def test_dot_f32(isa: str, rows: int, columns: int, threads: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    weight = generator.standard_normal((rows, columns), np.float32)
    x = generator.standard_normal(columns, np.float32)
    out = native.dot_f32(torch.from_numpy(weight), torch.from_numpy(x), threads).numpy()
    exact = weight.astype(np.float64) @ x.astype(np.float64)
    # The bound that holds for a sum in any order: one rounding a term.
    bound = (columns + 1) * np.finfo(np.float32).eps * (np.abs(weight) @ np.abs(x))
    assert np.all(np.abs(out - exact) <= bound)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 63, 66])
def test_dot_f32_keeps_what_is_not_finite(isa: str, value: float, at: int) -> None:
    weight = torch.ones(9, 67)
    weight[4, at] = value
    out = native.dot_f32(weight, torch.ones(67))
    assert out[[0, 3, 5, 8]].tolist() == [67.0] * 4
    np.testing.assert_equal(out[4].item(), value)


def test_probes_count_their_work(isa: str) -> None:
    for probe in (native.probe_f32, native.probe_i8):
        once = probe(1, 1)
        assert once > 0
        assert probe(3, 2) == 6 * once


@pytest.mark.parametrize(
    ("weight", "x", "reason"),
    [
        (torch.ones(2, 3), torch.ones(4), r"x is torch.float32 \[4\].*torch.float32 \[3\]"),
        (torch.ones(2, 3).double(), torch.ones(3), "weight is torch.float64"),
        (torch.ones(3, 2).T, torch.ones(3), "strided"),
        (torch.ones(3), torch.ones(3), "a matrix is wanted"),
    ],
    ids=["shape", "dtype", "layout", "rank"],
)
def test_wrong_tensors_are_refused(weight: torch.Tensor, x: torch.Tensor, reason: str) -> None:
    with pytest.raises(NativeError, match=reason):
        native.dot_f32(weight, x)


def test_rows_too_long_for_int32_are_refused() -> None:
    columns = MAX_DOT_I8 + 1
    weight, x = torch.zeros(1, columns, dtype=torch.int8), torch.zeros(columns, dtype=torch.int8)
    with pytest.raises(NativeError, match="at most 131072"):
        native.dot_i8(weight, torch.zeros(1, dtype=torch.int32), x)
