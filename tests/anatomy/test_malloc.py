"""What malloc keeps: asked of the real one, for traces whose answer can be worked out."""

from __future__ import annotations

import sys

import pytest

from featherweight.anatomy import malloc
from featherweight.anatomy.malloc import Malloc, mmap_threshold, taken
from featherweight.anatomy.trace import Block, Trace

MIB = 1 << 20
SLACK = MIB // 2  # the heap grows by 132 KiB more than is asked for
linux = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc is asked")


def trace(*steps: tuple[str, int]) -> Trace:
    """`("a", 8)` requests block a of 8 MiB, `("a", 0)` frees it."""
    found, indices = Trace(), dict[str, int]()
    for name, mib in steps:
        if mib:
            indices[name] = len(found.blocks)
            found.blocks.append(Block(mib * MIB, "temporaries", "", "", len(found.events)))
        found.events.append((1 if mib else -1) * (1 + indices[name]))
    return found


@linux
def test_large_blocks_go_back_to_the_system() -> None:
    steps = trace(("a", 100), ("a", 0), ("b", 40), ("b", 0), ("c", 80))
    held = taken(steps, trains=False)
    assert held is not None
    assert abs(held - 100 * MIB) < SLACK


@linux
def test_a_hole_below_what_lives_stays_held() -> None:
    """8 MiB are freed under a block of 1 MiB: 12 MiB do not fit, and are added on top."""
    steps = trace(("x", 16), ("x", 0), ("hole", 8), ("pin", 1), ("hole", 0), ("more", 12))
    assert steps.allocated().max() == 16 * MIB
    held = taken(steps, trains=False)
    assert held is not None
    assert abs(held - 21 * MIB) < SLACK


@linux
def test_a_smaller_block_takes_the_hole() -> None:
    steps = trace(("x", 16), ("x", 0), ("hole", 8), ("pin", 1), ("hole", 0), ("less", 7))
    held = taken(steps, trains=False)
    assert held is not None
    assert abs(held - 16 * MIB) < SLACK


@linux
def test_the_threshold_is_probed_in_a_process_as_it_is() -> None:
    libc = Malloc()
    libc.free(libc.malloc(20 * MIB))
    raised = mmap_threshold()
    assert raised >= 19 * MIB
    before = libc.mappings()
    block = libc.malloc(2 * raised)
    assert libc.mappings() == before + 1
    libc.free(block)


@linux
def test_a_block_that_no_machine_has_is_no_answer() -> None:
    steps = Trace([Block(1 << 62, "temporaries", "", "", 0)], [1])
    assert taken(steps, trains=True) is None


def test_elsewhere_there_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(OSError, match="does not tell"):
        malloc.replay([1], [MIB], [], MIB)
