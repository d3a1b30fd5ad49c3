"""Stored distributions: how exactly they come back, and disks that are full."""

from __future__ import annotations

import shutil
import tempfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from featherweight.errors import FeatherweightError
from featherweight.measure.logprobs import FLOOR, STEPS, Reader, Writer

full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
LOGITS = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=20),
    elements=st.floats(-60, 60, width=32),
)


def store(folder: Path, logp: torch.Tensor, targets: torch.Tensor, parts: int = 1) -> Reader:
    with Writer(folder, *logp.shape) as writer:
        for some, true in zip(logp.chunk(parts), targets.chunk(parts), strict=True):
            writer.write(some, true)
    return Reader(folder)


def kld(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)


@given(LOGITS)
def test_round_trip_stays_within_a_step_and_far_below_any_divergence(
    logits: np.ndarray,
) -> None:
    logp = torch.log_softmax(torch.from_numpy(logits), -1)
    with tempfile.TemporaryDirectory() as folder:
        read = store(Path(folder), logp, logp.argmin(-1)).rows(0, len(logp))
    high = logp.amax(-1, keepdim=True)
    floored = logp.maximum(high - FLOOR).double()
    step = (high - floored.amin(-1, keepdim=True)) / STEPS
    assert ((read - floored).abs() <= 1.05 * step + 1e-5).all()
    exact = torch.log_softmax(logp.double(), -1)
    assert (kld(read, exact) < 1e-6).all()
    assert read.exp().sum(-1) == pytest.approx(1)


def test_the_top_and_the_true_token_are_exact(tmp_path: Path) -> None:
    logp = torch.log_softmax(torch.randn(50, 300, generator=torch.Generator().manual_seed(0)), -1)
    targets = torch.arange(50) * 5
    reader = store(tmp_path, logp, targets, parts=3)
    assert torch.equal(reader.tops, logp.argmax(-1))
    assert torch.equal(reader.logp, logp[torch.arange(50), targets])
    assert torch.equal(reader.rows(20, 30), reader.rows(0, 50)[20:30])


@pytest.mark.parametrize("mask", [-torch.inf, torch.finfo(torch.float32).min])
def test_masked_tokens_do_not_coarsen_the_others(tmp_path: Path, mask: float) -> None:
    logits = torch.linspace(-5, 5, 64).repeat(3, 1)
    logits[:, 40:] = mask
    logp = torch.log_softmax(logits, -1)
    read = store(tmp_path, logp, torch.zeros(3, dtype=torch.long)).rows(0, 3)
    torch.testing.assert_close(read[:, :40].float(), logp[:, :40], atol=2e-3, rtol=0)
    assert (read[:, 40:].exp() < 1e-30).all()


def test_reading_maps_the_file(tmp_path: Path) -> None:
    logp = torch.log_softmax(torch.zeros(4, 8), -1)
    reader = store(tmp_path, logp, torch.zeros(4, dtype=torch.long))
    assert isinstance(reader._codes, np.memmap)
    assert (tmp_path / "codes.u16").stat().st_size == 4 * 8 * 2


def test_a_disk_that_is_too_small_is_refused_up_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 10**6))
    with pytest.raises(FeatherweightError, match=r"need 304 MB .* 1 MB are free") as caught:
        Writer(tmp_path, 1000, 152_000)
    assert "FEATHERWEIGHT_CACHE" in str(caught.value)
    assert not list(tmp_path.iterdir())


@full_disk
@pytest.mark.parametrize("name", ["codes.u16", "meta.npz"])
def test_a_disk_that_fills_up_is_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/full")
    logp = torch.log_softmax(torch.zeros(4, 8), -1)
    with pytest.raises(FeatherweightError, match="free some space"):
        store(tmp_path, logp, torch.zeros(4, dtype=torch.long))
