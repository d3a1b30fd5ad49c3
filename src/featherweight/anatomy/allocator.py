"""What PyTorch's CUDA caching allocator would reserve, replayed without a GPU and without torch.

The rules of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, torch 2.0 to 2.13:
sizes in bytes, one device, one stream. Left out, as they are off by default: graph-private pools,
roundup_power2_divisions and garbage_collection_threshold.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from contextlib import suppress

from featherweight.errors import FeatherweightError

MIN_BLOCK = 512  # kMinBlockSize: what every size is rounded up to
SMALL = 1 << 20  # kSmallSize: the largest size that comes from the small pool
SMALL_SEGMENT = 2 << 20  # kSmallBuffer
MIN_LARGE = 10 << 20  # kMinLargeAlloc: from here on a segment of its own
ROUND_LARGE = 2 << 20  # kRoundLarge: what such a segment is rounded up to
ROUNDING = 20 << 20  # max_non_split_rounding_size: what an oversize block may waste, exclusive
_SPACE = 1 << 60  # addresses of an expandable segment: more than any device has


class OutOfMemory(FeatherweightError):
    """Segments may not grow by `needed` bytes: `reserved` are held, `limit` are allowed."""

    def __init__(self, needed: int, reserved: int, limit: int) -> None:
        self.needed, self.reserved, self.limit = needed, reserved, limit
        more, held, allowed = (f"{n / 2**20:,.1f} MiB" for n in (needed, reserved, limit))
        super().__init__(f"{more} more do not fit: {held} of {allowed} are reserved")


class CachingAllocator:
    """Replays allocations and frees; counts bytes as `torch.cuda.memory_stats` does.

    limit: bytes that segments may take together, as the memory of a device; None: no limit.
    expandable: `expandable_segments`. Each pool has one segment, mapped in pages of 2 MiB (small
      pool) or of `large_segment`. It has no end; torch's has, at 9/8 of the device's memory.
    large_segment: `large_segment_size_mb`, 20 MiB where torch has no such option.
    max_split_size: `max_split_size_mb`; None: blocks of any size are split.

    Segments get ever higher addresses. cudaMalloc may hand a freed range out again, which matters
    only between free blocks of one size.
    """

    def __init__(
        self,
        *,
        limit: int | None = None,
        expandable: bool = False,
        large_segment: int = 20 << 20,
        max_split_size: int | None = None,
    ) -> None:
        if large_segment <= MIN_LARGE:
            raise ValueError(f"large_segment is {large_segment}: must be > {MIN_LARGE}")
        if max_split_size is not None and max_split_size <= large_segment:
            raise ValueError(f"max_split_size is {max_split_size}: must be > {large_segment}")
        self.allocated = 0  # bytes of live blocks, unsplit remainders included
        self.requested = 0  # bytes that live blocks were asked for
        self.reserved = 0  # bytes of segments
        self.peak_allocated = self.peak_reserved = 0  # most so far
        self._limit, self._expandable = limit, expandable
        self._max_split = max_split_size or 1 << 63
        self._small, self._large = _Pool(SMALL_SEGMENT), _Pool(large_segment)
        self._live: dict[int, _Block] = {}  # by address
        self._next = SMALL_SEGMENT  # address of the next segment; 0 is the null pointer
        if expandable:
            for pool, above in ((self._small, 1), (self._large, 2 * _SPACE)):
                start = _round_up(above, pool.page)
                pool.add(_Block(start, _SPACE // pool.page * pool.page, pool, mapped=False))

    def malloc(self, nbytes: int) -> int:
        """Address of a new block, which is its handle; 0, the null pointer, for 0 bytes.

        Raises OutOfMemory if `limit` is in the way even after all cached segments are released.
        """
        if nbytes < 0:
            raise ValueError(f"{nbytes} bytes cannot be allocated")
        if nbytes == 0:
            return 0
        size = _round_up(nbytes, MIN_BLOCK)
        pool = self._small if size <= SMALL else self._large
        block = self._cached(pool, size) or self._grown(pool, size)
        rest = block.size - size
        packed = pool is self._small or self._expandable
        if rest >= MIN_BLOCK if packed else rest > SMALL and size < self._max_split:
            pool.add(block.cut(size))
        block.live, block.requested = True, nbytes
        self._live[block.address] = block
        self.requested += nbytes
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block.address

    def free(self, handle: int) -> None:
        """Return a block to its pool, whole with the free blocks beside it."""
        if handle == 0:
            return
        block = self._live.pop(handle, None)
        if block is None:
            raise ValueError(f"no block is allocated at {handle:#x}")
        self.requested -= block.requested
        self.allocated -= block.size
        block.live = False
        block.pool.merge(block)

    def empty_cache(self) -> None:
        """Release segments that are free as a whole, or pages of expandable ones."""
        for pool in (self._large, self._small):
            for _, address in pool.order.copy():
                block = pool.free[address]
                if self._expandable:
                    self._unmap(block)
                elif block.prev is None and block.next is None:
                    self._release(block)

    def _cached(self, pool: _Pool, size: int) -> _Block | None:
        """The smallest free block of at least `size`, the lowest of equals (get_free_block)."""
        at = bisect_left(pool.order, (size, 0))
        if at == len(pool.order):
            return None
        if self._expandable:  # a block counts for what it could grow to
            while at + 1 < len(pool.order) and pool.at(at + 1).room() < pool.at(at).room():
                at += 1
        block = pool.at(at)  # if it is oversize, it is for oversize requests, and nearly as large
        most = self._max_split if size < self._max_split else size + ROUNDING
        if block.size >= most:
            return None
        pool.remove(block)
        return block

    def _grown(self, pool: _Pool, size: int) -> _Block:
        """A block of new memory; cached memory makes room for it only if it must."""
        grow = self._mapped if self._expandable else self._segment
        with suppress(OutOfMemory):
            return grow(pool, size)
        if self._release_oversize(pool, size):
            with suppress(OutOfMemory):
                return grow(pool, size)
        self.empty_cache()
        return grow(pool, size)

    def _reserve(self, nbytes: int) -> None:
        if self._limit is not None and self.reserved + nbytes > self._limit:
            raise OutOfMemory(nbytes, self.reserved, self._limit)
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _segment(self, pool: _Pool, size: int) -> _Block:
        """A new segment (get_allocation_size)."""
        nbytes = pool.page if size < MIN_LARGE else _round_up(size, ROUND_LARGE)
        self._reserve(nbytes)
        block = _Block(self._next, nbytes, pool)
        self._next += _round_up(nbytes, SMALL_SEGMENT)
        return block

    def _release(self, block: _Block) -> None:
        block.pool.remove(block)
        self.reserved -= block.size

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
        """Release one oversize block that suffices, or else the largest until they do."""
        if self._expandable:
            return False
        wanted = max(size, self._max_split)
        at = min(bisect_left(pool.order, (wanted, 0)), len(pool.order) - 1)
        released = 0
        while released < wanted and at >= 0 and pool.at(at).size >= self._max_split:
            released += pool.at(at).size
            self._release(pool.at(at))
            at -= 1
        return released >= wanted

    def _mapped(self, pool: _Pool, size: int) -> _Block:
        """As low a block of an expandable segment as there is room, with its pages mapped."""
        block = pool.lowest(size)
        if not block.mapped:
            self._map(block, min(size, block.size))
        while block.size < size and (hole := block.next):
            self._map(hole, min(size - block.size, hole.size))
            block = hole  # which took over what was free before it
        pool.remove(block)
        return block

    def _map(self, block: _Block, nbytes: int) -> None:
        """Map pages for the first `nbytes` of an unmapped block, which becomes free."""
        nbytes = _round_up(nbytes, block.pool.page)
        self._reserve(nbytes)
        block.pool.remove(block)
        if nbytes < block.size:
            block.pool.add(block.cut(nbytes))
        block.mapped = True
        block.pool.merge(block)

    def _unmap(self, block: _Block) -> None:
        """Unmap the pages that lie within a free block as a whole."""
        pool = block.pool
        first = _round_up(block.address, pool.page)
        nbytes = (block.address + block.size - first) // pool.page * pool.page
        if nbytes <= 0:
            return
        pool.remove(block)
        if block.address < first:
            before, block = block, block.cut(first - block.address)
            pool.add(before)
        if nbytes < block.size:
            pool.add(block.cut(nbytes))
        block.mapped = False
        pool.merge(block)
        self.reserved -= nbytes


class _Block:
    """A range of addresses within a segment, linked with those before and after it."""

    __slots__ = ("address", "live", "mapped", "next", "pool", "prev", "requested", "size")

    def __init__(self, address: int, size: int, pool: _Pool, mapped: bool = True) -> None:
        self.address, self.size, self.pool, self.mapped = address, size, pool, mapped
        self.live, self.requested = False, 0
        self.prev: _Block | None = None
        self.next: _Block | None = None

    def cut(self, size: int) -> _Block:
        """Keep `size` bytes; the rest, as a block of its own."""
        rest = _Block(self.address + size, self.size - size, self.pool, self.mapped)
        rest.prev, rest.next = self, self.next
        rest.link()
        self.size = size
        return rest

    def link(self) -> None:
        """Have its neighbours know it."""
        if self.prev is not None:
            self.prev.next = self
        if self.next is not None:
            self.next.prev = self

    def room(self) -> int:
        """Bytes it has, or would have with the unmapped pages after it."""
        after = self.next
        return self.size + (after.size if after is not None and not after.mapped else 0)


class _Pool:
    """The free and the unmapped blocks of one class of sizes."""

    def __init__(self, page: int) -> None:
        self.page = page  # bytes of a segment, or of a page of an expandable one
        self.order: list[tuple[int, int]] = []  # size and address of free blocks, sorted
        self.free: dict[int, _Block] = {}  # by address
        self.unmapped: list[_Block] = []  # by address

    def at(self, index: int) -> _Block:
        return self.free[self.order[index][1]]

    def add(self, block: _Block) -> None:
        if block.mapped:
            insort(self.order, (block.size, block.address))
            self.free[block.address] = block
        else:
            insort(self.unmapped, block, key=lambda each: each.address)

    def remove(self, block: _Block) -> None:
        if block.mapped:
            del self.order[bisect_left(self.order, (block.size, block.address))]
            del self.free[block.address]
        else:
            self.unmapped.remove(block)

    def merge(self, block: _Block) -> None:
        """Add a block, after it took over its neighbours that are as it is."""
        for other in (block.prev, block.next):
            if other is None or other.live or other.mapped != block.mapped:
                continue
            self.remove(other)
            block.size += other.size
            if other is block.prev:
                block.address, block.prev = other.address, other.prev
            else:
                block.next = other.next
        block.link()
        self.add(block)

    def lowest(self, size: int) -> _Block:
        """First of the lowest free or unmapped blocks with `size` bytes, one at least unmapped."""
        for hole in self.unmapped:
            before = hole.prev
            first = hole if before is None or before.live else before
            room, block = first.size, first.next
            while room < size and block is not None and not block.live:
                room, block = room + block.size, block.next
            if room >= size:
                break
        return first  # the last unmapped block has no end


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
