"""Peak memory: the process's own and mapped files apart, what is freed early counted too."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from featherweight.measure import resident
from featherweight.measure.resident import CPU, Watch
from featherweight.native import libc

MIB = 1 << 20
BLOCK = 64 * MIB
SLACK = 12 * MIB  # what the interpreter does meanwhile, and the kernel's rough counting
linux = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


@pytest.fixture(autouse=True)
def trim() -> None:
    """Free pages of the heap go now: given back while memory is watched, they would be missed."""
    libc.malloc_trim()


@linux
def test_own_memory_is_seen_as_such() -> None:
    with Watch(resident.floor(CPU), CPU) as watch:
        block = np.ones(BLOCK, np.uint8)
    assert block.size
    assert watch.peak.anonymous is not None
    assert watch.peak.file is not None
    assert abs(watch.peak.anonymous - BLOCK) < SLACK
    assert abs(watch.peak.total - BLOCK) < SLACK
    assert watch.peak.file < SLACK


@linux
def test_pages_of_a_mapped_file_are_seen_as_such(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(BLOCK))
    with Watch(resident.floor(CPU), CPU) as watch:
        mapped = np.memmap(tmp_path / "weights", np.uint8, "r")
        mapped.max()
    assert watch.peak.anonymous is not None
    assert watch.peak.file is not None
    assert abs(watch.peak.file - BLOCK) < SLACK
    assert watch.peak.anonymous < SLACK
    assert watch.peak.total > BLOCK - SLACK


@linux
def test_what_is_freed_before_the_end_counts() -> None:
    with Watch(resident.floor(CPU), CPU) as watch:
        np.ones(BLOCK, np.uint8)
    assert watch.peak.total > BLOCK - SLACK


@linux
def test_what_was_there_before_does_not_count() -> None:
    np.ones(4 * BLOCK, np.uint8)  # an earlier high-water mark
    kept = np.ones(BLOCK, np.uint8)
    with Watch(resident.floor(CPU), CPU) as watch:
        kept += 1
    assert watch.peak.total < SLACK


def test_a_failing_block_ends_the_sampling() -> None:
    with (
        pytest.raises(ValueError, match="of the block"),
        Watch(resident.floor(CPU), CPU) as watch,
    ):
        raise ValueError("of the block")
    assert not watch._thread.is_alive()


def test_elsewhere_only_the_total_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with Watch(resident.floor(CPU), CPU) as watch:
        block = np.ones(BLOCK, np.uint8)
    assert block.size
    assert watch.peak.total > BLOCK - SLACK
    assert watch.peak.anonymous is None
    assert watch.peak.file is None
