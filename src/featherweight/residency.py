"""Which tensors are views of a memory-mapped file, and giving their pages back to the system.

transformers leaves tensors whose dtype needs no change as views of the mapped safetensors file.
Their pages can be dropped at any time and come again unchanged from the file; except pages that
were written to since (private copies), which exist nowhere else and must stay.
"""

from __future__ import annotations

import bisect
import mmap
import sys
from dataclasses import dataclass

import numpy as np
import torch

from featherweight.native import libc

PRESENT, SWAPPED, FILE_PAGE = (np.uint64(1 << bit) for bit in (63, 62, 61))


@dataclass(frozen=True)
class _Range:
    start: int
    end: int
    path: str


class Mappings:
    """The files mapped into this process at the moment of construction; none outside Linux."""

    def __init__(self) -> None:
        self._ranges: list[_Range] = []
        if sys.platform == "linux":
            with open("/proc/self/maps") as maps:
                for line in maps:
                    address, _, _, _, inode, *path = line.split(None, 5)
                    if inode != "0" and path:
                        start, end = (int(part, 16) for part in address.split("-"))
                        self._ranges.append(_Range(start, end, path[0].rstrip("\n")))
        self._starts = [r.start for r in self._ranges]

    def file_of(self, tensor: torch.Tensor) -> str | None:
        """Path of the file whose mapping holds the tensor's storage; None for other memory."""
        if tensor.device.type != "cpu":
            return None
        storage = tensor.untyped_storage()
        at = bisect.bisect_right(self._starts, storage.data_ptr()) - 1
        if at < 0 or not storage.nbytes():
            return None
        found = self._ranges[at]
        inside = storage.data_ptr() + storage.nbytes() <= found.end
        return found.path if inside else None


def give_back(tensor: torch.Tensor) -> int:
    """Drop the resident pages of a mapped tensor's storage; returns the bytes given back.

    Only whole pages that still are the file's are dropped: what was written to the tensor stays.
    """
    storage = tensor.untyped_storage()
    page = mmap.PAGESIZE
    first = -(-storage.data_ptr() // page)
    last = (storage.data_ptr() + storage.nbytes()) // page
    if last <= first:
        return 0
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(first * 8)
        entries = np.frombuffer(pagemap.read((last - first) * 8), dtype=np.uint64)
    held = (entries & (PRESENT | SWAPPED)) != 0
    droppable = ~(held & ((entries & FILE_PAGE) == 0))
    edges = np.flatnonzero(np.diff(np.concatenate(([0], droppable.view(np.int8), [0]))))
    for start, end in edges.reshape(-1, 2):
        libc.madvise_dontneed(int(first + start) * page, int(end - start) * page)
    return int((held & droppable).sum()) * page
