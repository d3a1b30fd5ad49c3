"""What malloc takes from the system for the blocks of a trace: found out by asking it for them.

PyTorch gets CPU tensors from `posix_memalign`, and glibc keeps part of what is freed: holes that
nothing fits any more. The blocks of a trace are requested here in the same order from the same
malloc, in a process of its own, and never written to, so that they cost addresses and no memory.

glibc before 2.38 cuts a block of aligned memory out of a larger one and hands the slivers at its
ends to the next small objects. Where gradients are recorded such objects are the nodes of autograd,
which stay as long as activations do: then a freed block, without its slivers, is too small for the
next of its own size.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from featherweight.anatomy.trace import Trace

ALIGNMENT = 64  # of a tensor (c10/core/alignment.h)
# Requests of small objects beside a tensor: its storage's and its own description in C++ ...
DESCRIPTIONS = (104, 208)
# ... or, in training, one for each size that a sliver can have: 32, 48, 64, 80 and 96 with header.
NODES = (24, 40, 56, 72, 88)
# Blocks of this size come from mappings of their own, at first, in a process that has imported
# torch and transformers: glibc raises it with each larger one freed. `mmap_threshold` probes it.
THRESHOLD = 2 << 20
_LARGE = 64 << 10  # bytes of a block that may be the peak


def taken(trace: Trace, *, trains: bool, threshold: int = THRESHOLD) -> int | None:
    """Bytes that malloc holds at most for the blocks of a trace; None where it does not tell.

    It tells where it is glibc's, from 2.33 on.
    """
    request = {
        "events": trace.events,
        "sizes": [block.nbytes for block in trace.blocks],
        "small": NODES if trains else DESCRIPTIONS,
        "threshold": threshold,
    }
    done = subprocess.run(
        # -P: a file of the working folder must not stand in for a library
        [sys.executable, "-P", "-m", "featherweight.anatomy.malloc"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
    )
    return None if done.returncode else json.loads(done.stdout)


class _Info(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Malloc:
    """The C library's malloc; `held()` are bytes that it has from the system.

    Raises OSError where the library cannot say, or another malloc stands in its place.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError("malloc does not tell what it holds on this system")
        libc = ctypes.CDLL(None)
        if not hasattr(libc, "mallinfo2"):
            raise OSError("this C library has no mallinfo2")
        self._info, self._memalign = libc.mallinfo2, libc.posix_memalign
        self._info.restype = _Info
        self._memalign.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_size_t,
            ctypes.c_size_t,
        ]
        self.malloc, self.free = libc.malloc, libc.free
        self.malloc.restype, self.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self.free.restype, self.free.argtypes = None, [ctypes.c_void_p]
        before, block = self.held(), self.malloc(64 << 20)
        found = self.held() - before
        self.free(block)
        if not found:
            raise OSError("another malloc stands in the place of the C library's")

    def held(self) -> int:
        """Bytes of heap and mappings."""
        info = self._info()
        return info.arena + info.hblkhd

    def mappings(self) -> int:
        """Blocks that have a mapping of their own."""
        return self._info().hblks

    def aligned(self, nbytes: int) -> int:
        """A block as torch asks for it; OSError where there is none."""
        address = ctypes.c_void_p()
        if self._memalign(ctypes.byref(address), ALIGNMENT, nbytes):
            raise OSError(f"malloc gives no {nbytes} bytes")
        return address.value or 0


def mmap_threshold() -> int:
    """Bytes from which on, in this process now, malloc gives a block a mapping of its own."""
    libc, blocks, size = Malloc(), [], 128 << 10
    before = libc.mappings()
    while size < 64 << 20:
        blocks.append(libc.malloc(size))
        if libc.mappings() > before:
            break
        size += size // 16
    for block in blocks:
        libc.free(block)
    return size


def replay(events: list[int], sizes: list[int], small: list[int], threshold: int) -> int:
    """Do it in this process; the peak of bytes held, above what was held before."""
    libc = Malloc()
    libc.free(libc.malloc(threshold))  # so it is raised
    held: dict[int, list[int]] = {}
    before = peak = libc.held()
    for event in events:
        index = abs(event) - 1
        if event < 0:
            for address in held.pop(index):
                libc.free(address)
            continue
        held[index] = [libc.aligned(sizes[index]), *(libc.malloc(size) for size in small)]
        if sizes[index] >= _LARGE:
            peak = max(peak, libc.held())
    return peak - before


def main() -> None:
    """Answer the one request: JSON on standard input, a number on standard output."""
    request: dict[str, Any] = json.load(sys.stdin)
    print(replay(**request))


if __name__ == "__main__":
    main()
