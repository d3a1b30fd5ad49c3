"""Probes of the machine on every instruction set, against numpy, over odd sizes and tails."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from featherweight import native
from featherweight.errors import NativeError

SIZES = st.one_of(st.integers(0, 300), st.sampled_from([511, 512, 513, 1023, 4096, 4099]))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the ISA stays the same
)
@given(nbytes=SIZES, offset=st.integers(0, 9), threads=st.integers(1, 3), seed=st.integers(0, 99))
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


def test_sum_words_takes_any_dtype_but_no_gaps(isa: str) -> None:
    data = torch.arange(6, dtype=torch.int64).view(2, 3)
    assert native.sum_words(data) == 15
    with pytest.raises(NativeError, match=r"data is torch.int64 \[3, 2\], strided, .*contiguous"):
        native.sum_words(data.T)


def test_probes_count_their_work(isa: str) -> None:
    for probe in (native.probe_f32, native.probe_i8):
        once = probe(1, 1)
        assert once > 0
        assert probe(3, 2) == 6 * once
