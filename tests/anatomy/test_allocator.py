"""The replay of PyTorch's caching allocator: worked examples, what always holds, a GPU's word."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featherweight.anatomy.allocator import CachingAllocator, OutOfMemory

KIB, MIB = 1 << 10, 1 << 20


def mib(allocator: CachingAllocator) -> tuple[float, float]:
    """Allocated and reserved, MiB."""
    return allocator.allocated / MIB, allocator.reserved / MIB


@pytest.mark.parametrize(
    ("nbytes", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (512 * KIB, 512 * KIB, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest of the small pool
        (MIB + 1, MIB + 512, 20 * MIB),
        (3 * MIB, 3 * MIB, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # a segment of its own, in steps of 2 MiB
        (10.5 * MIB, 10.5 * MIB, 12 * MIB),  # 1.5 MiB are split off
        (15 * MIB, 16 * MIB, 16 * MIB),  # 1 MiB is not
    ],
)
def test_one_block(nbytes: float, allocated: int, reserved: int):
    allocator = CachingAllocator()
    allocator.malloc(int(nbytes))
    assert allocator.requested == nbytes
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (allocated, reserved)


def test_no_bytes_are_the_null_pointer():
    allocator = CachingAllocator()
    assert [allocator.malloc(0), allocator.malloc(0)] == [0, 0]
    allocator.free(0)
    assert mib(allocator) == (0, 0)


def test_a_segment_is_shared_until_it_is_full():
    allocator = CachingAllocator()
    for count in range(1, 7):
        allocator.malloc(3 * MIB)
        assert mib(allocator) == (3 * count, 20)
    allocator.malloc(3 * MIB)  # 2 MiB are left
    assert mib(allocator) == (21, 40)


def test_small_and_large_do_not_share():
    allocator = CachingAllocator()
    allocator.malloc(3 * MIB)
    allocator.malloc(512)
    assert mib(allocator) == (3 + 512 / MIB, 22)


def test_what_was_freed_is_used_again():
    allocator = CachingAllocator()
    handle = allocator.malloc(15 * MIB)
    allocator.free(handle)
    assert mib(allocator) == (0, 16)
    assert allocator.malloc(14 * MIB) == handle
    assert mib(allocator) == (14, 16)
    assert allocator.malloc(3 * MIB // 2) == handle + 14 * MIB  # and 0.5 MiB with it
    assert mib(allocator) == (16, 16)
    assert allocator.requested == 15.5 * MIB
    assert allocator.peak_allocated == 16 * MIB


def test_the_smallest_that_fits_and_the_lowest_of_equals():
    allocator = CachingAllocator()
    handles = [allocator.malloc(size * MIB) for size in (16, 12, 14, 12)]
    assert handles == sorted(handles)
    for handle in reversed(handles):
        allocator.free(handle)
    assert allocator.malloc(11 * MIB) == handles[1]
    assert allocator.malloc(11 * MIB) == handles[3]
    assert allocator.malloc(11 * MIB) == handles[2]
    assert mib(allocator) == (12 + 12 + 11, 54)


def test_free_neighbours_become_one():
    allocator = CachingAllocator()
    first, second, third = (allocator.malloc(5 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)  # with the 5 MiB after it
    assert allocator.malloc(9 * MIB) == third  # 1 MiB would be left: not split
    assert mib(allocator) == (5 + 10, 20)
    allocator.free(third)
    allocator.free(second)
    assert allocator.malloc(20 * MIB) == first
    assert mib(allocator) == (20, 20)


def test_only_whole_segments_are_released():
    allocator = CachingAllocator()
    kept, freed = allocator.malloc(3 * MIB), allocator.malloc(18 * MIB)
    small = allocator.malloc(512)
    allocator.free(freed)
    allocator.free(small)
    assert mib(allocator) == (3, 20 + 18 + 2)
    allocator.empty_cache()
    assert mib(allocator) == (3, 20)
    allocator.free(kept)
    allocator.empty_cache()
    assert mib(allocator) == (0, 0)
    assert allocator.peak_reserved == 40 * MIB


def test_a_limit_has_cached_segments_released_first():
    allocator = CachingAllocator(limit=40 * MIB)
    allocator.free(allocator.malloc(3 * MIB))
    allocator.malloc(30 * MIB)
    assert mib(allocator) == (30, 30)


def test_beyond_the_limit():
    allocator = CachingAllocator(limit=32 * MIB)
    allocator.free(allocator.malloc(512))
    allocator.malloc(3 * MIB)
    assert mib(allocator) == (3, 22)
    with pytest.raises(OutOfMemory) as caught:
        allocator.malloc(17 * MIB + 1)
    error = caught.value
    assert str(error) == "18.0 MiB more do not fit: 20.0 MiB of 32.0 MiB are reserved"
    assert (error.needed, error.reserved, error.limit) == (18 * MIB, 20 * MIB, 32 * MIB)
    assert mib(allocator) == (3, 20)
    allocator.malloc(12 * MIB)  # is within it: in the 17 MiB that are cached
    assert mib(allocator) == (15, 20)


def test_blocks_beyond_max_split_size_are_for_large_requests_alone():
    allocator = CachingAllocator(max_split_size=32 * MIB)
    allocator.free(allocator.malloc(54 * MIB))
    allocator.malloc(30 * MIB)
    assert mib(allocator) == (30, 84)
    allocator.malloc(34 * MIB)  # 20 MiB less than the cached block: too much to waste
    assert mib(allocator) == (64, 118)
    allocator.malloc(34 * MIB + 1)
    assert mib(allocator) == (118, 118)  # the cached block, whole


def test_as_few_oversize_blocks_are_released_as_suffice():
    allocator = CachingAllocator(limit=104 * MIB, max_split_size=32 * MIB)
    for handle in [allocator.malloc(size * MIB) for size in (3, 40, 44)]:
        allocator.free(handle)
    assert mib(allocator) == (0, 104)
    allocator.malloc(60 * MIB)  # both, as neither is large enough; not the segment of 20 MiB
    assert mib(allocator) == (60, 80)
    allocator.malloc(3 * MIB)
    assert mib(allocator) == (63, 80)


def test_the_size_of_large_segments():
    allocator = CachingAllocator(large_segment=64 * MIB)
    allocator.malloc(3 * MIB)
    allocator.malloc(50 * MIB)
    assert mib(allocator) == (53, 64)


def test_an_expandable_segment_grows_and_shrinks_by_pages():
    allocator = CachingAllocator(expandable=True)
    allocator.malloc(512)
    assert allocator.reserved == 2 * MIB
    allocator.malloc(3 * MIB)
    allocator.malloc(15 * MIB)  # to the byte: remainders are always split
    assert mib(allocator) == (18 + 512 / MIB, 2 + 20)
    last = allocator.malloc(5 * MIB)  # 2 MiB are left, the rest is on the next page
    assert mib(allocator) == (23 + 512 / MIB, 2 + 40)
    allocator.free(last)
    allocator.empty_cache()
    assert mib(allocator) == (18 + 512 / MIB, 2 + 20)


def test_a_hole_in_an_expandable_segment_is_filled_first():
    allocator = CachingAllocator(expandable=True)
    first, second, third = (allocator.malloc(20 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.empty_cache()
    assert mib(allocator) == (40, 40)
    assert allocator.malloc(24 * MIB) == third + 20 * MIB
    assert mib(allocator) == (64, 80)
    assert allocator.malloc(20 * MIB) == first
    assert mib(allocator) == (84, 100)
    for handle in (first, second):
        allocator.free(handle)
    assert allocator.malloc(40 * MIB) == first


def test_an_expandable_segment_has_a_limit_too():
    allocator = CachingAllocator(expandable=True, limit=42 * MIB)
    allocator.malloc(13 * MIB)
    freed = allocator.malloc(20 * MIB)
    with pytest.raises(OutOfMemory, match=r"20.0 MiB more do not fit: 40.0 MiB of 42.0 MiB"):
        allocator.malloc(8 * MIB)
    allocator.free(freed)
    allocator.malloc(27 * MIB)
    assert mib(allocator) == (40, 40)


def test_expandable_segments_waste_less_on_sizes_that_grow():
    native, expandable = CachingAllocator(), CachingAllocator(expandable=True)
    for size in range(10, 30):
        for allocator in (native, expandable):
            for handle in [allocator.malloc(size * layer * MIB) for layer in range(1, 6)]:
                allocator.free(handle)
        # At first 150 MiB, which make 160 in pages. From then on the native one keeps what is now
        # too small for the largest, and reserves more for them.
        assert size == 10 or expandable.reserved <= native.reserved
    assert expandable.peak_allocated == 29 * 15 * MIB
    assert expandable.peak_reserved == 440 * MIB  # 435 in pages of 20
    assert native.peak_reserved > 4 * expandable.peak_reserved


def test_what_cannot_be():
    allocator = CachingAllocator()
    handle = allocator.malloc(1)
    allocator.free(handle)
    with pytest.raises(ValueError, match="no block is allocated at 0x200000"):
        allocator.free(handle)
    with pytest.raises(ValueError, match="-1 bytes cannot be allocated"):
        allocator.malloc(-1)
    with pytest.raises(ValueError, match="large_segment is 10485760: must be > 10485760"):
        CachingAllocator(large_segment=10 * MIB)
    with pytest.raises(ValueError, match="max_split_size is 20971520: must be > 20971520"):
        CachingAllocator(max_split_size=20 * MIB)


sizes = st.one_of(st.integers(0, 2 * MIB), st.integers(0, 96).map(lambda half: half * MIB // 2))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), sizes),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.just("empty"), st.just(0)),
    ),
    max_size=80,
)
options = st.fixed_dictionaries(
    {
        "limit": st.sampled_from([None, 64 * MIB, 200 * MIB]),
        "expandable": st.booleans(),
        "large_segment": st.sampled_from([20 * MIB, 28 * MIB]),
        "max_split_size": st.sampled_from([None, 30 * MIB]),
    }
)


@given(options, steps)
def test_always(given: dict[str, Any], steps: list[tuple[str, int]]):
    allocator = CachingAllocator(**given)
    live: dict[int, int] = {}
    peaks = (0, 0)
    for kind, number in steps:
        before = allocator.allocated
        if kind == "empty":
            allocator.empty_cache()
        elif kind == "free" and live:
            handle = sorted(live)[number % len(live)]
            del live[handle]
            allocator.free(handle)
        elif kind == "malloc" and number:
            try:
                handle = allocator.malloc(number)
            except OutOfMemory:
                assert given["limit"]
                assert allocator.allocated == before
            else:
                assert handle not in live
                live[handle] = number
        assert allocator.requested == sum(live.values())
        assert allocator.reserved >= allocator.allocated >= allocator.requested
        assert allocator.reserved <= (given["limit"] or allocator.reserved)
        assert all(a + size <= b for (a, size), (b, _) in pairwise(sorted(live.items())))
        was, peaks = peaks, (allocator.peak_allocated, allocator.peak_reserved)
        assert peaks[0] >= max(was[0], allocator.allocated)
        assert peaks[1] >= max(was[1], allocator.reserved)
    for handle in live:
        allocator.free(handle)
    assert allocator.allocated == allocator.requested == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


def random_steps(count: int) -> list[tuple[str, int, int]]:
    """What to do, with which of the tensors, of how many bytes; never more than 2 GiB at once."""
    draw = random.Random(0)
    live: dict[int, int] = {}
    steps: list[tuple[str, int, int]] = []
    for name in range(count):
        nbytes = int(2 ** draw.uniform(0, 26))
        while live and (draw.random() < 0.45 or sum(live.values()) + nbytes > 2 << 30):
            freed = draw.choice(sorted(live))
            steps.append(("free", freed, live.pop(freed)))
        steps.append(("malloc", name, nbytes))
        live[name] = nbytes
        if name % 500 == 499:
            steps.append(("empty", 0, 0))
    return steps


ON_THE_GPU = """
import json, sys, torch
live, found = {}, []
for kind, name, nbytes in json.load(sys.stdin):
    if kind == "empty":
        torch.cuda.empty_cache()
    elif kind == "free":
        del live[name]
    else:
        live[name] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    stats = torch.cuda.memory_stats()
    keys = ("requested_bytes", "allocated_bytes", "reserved_bytes")
    found.append([stats[f"{key}.all.{when}"] for when in ("current", "peak") for key in keys])
json.dump(found, sys.stdout)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ("", {}),
        ("expandable_segments:True", {"expandable": True}),
        ("max_split_size_mb:32", {"max_split_size": 32 * MIB}),
    ],
)
def test_a_gpu_says_the_same(settings: str, options: dict[str, Any]):
    steps = random_steps(2000)
    env = {key: value for key, value in os.environ.items() if not key.endswith("ALLOC_CONF")}
    if settings:
        env["PYTORCH_CUDA_ALLOC_CONF"] = settings
    found = subprocess.run(
        [sys.executable, "-c", ON_THE_GPU],
        input=json.dumps(steps),
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    allocator = CachingAllocator(**options)
    handles: dict[int, int] = {}
    for step, (real, (kind, name, nbytes)) in enumerate(zip(json.loads(found), steps, strict=True)):
        if kind == "empty":
            allocator.empty_cache()
        elif kind == "free":
            allocator.free(handles.pop(name))
        else:
            handles[name] = allocator.malloc(nbytes)
        ours = [allocator.requested, allocator.allocated, allocator.reserved]
        assert (step, ours) == (step, real[:3])
        assert [allocator.peak_allocated, allocator.peak_reserved] == real[4:]
