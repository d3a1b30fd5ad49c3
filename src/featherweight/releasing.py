"""Giving back to the system what dropped models held.

Not in a file named `release.py`: importing that would put the module where the public function
`featherweight.release` belongs.
"""

from __future__ import annotations

import gc
import sys

import psutil

from featherweight.native import libc


def release() -> int:
    """Free what models that nobody refers to any more still hold.

    Drop the models first (`del loaded`): what a variable, a notebook's `Out`, or the traceback of
    the last error (`sys.last_value`) still refers to stays, and nothing of a living model is
    touched. Reference cycles are collected, free pages of the C heap, where the weights of
    quantised models were, go back to the system (glibc), and torch's cache of GPU memory to the
    GPU. What torch keeps for each shape of a bf16 product on a CPU, about 1 MB for each length of
    prompt, cannot be freed from here.

    Returns the bytes by which the resident memory of this process became smaller, never negative;
    memory of a GPU is not counted. 0 is a good answer: pages of a mapped checkpoint, and large
    blocks, are free as soon as the model is dropped.
    """
    process = psutil.Process()
    before = process.memory_info().rss
    gc.collect()
    libc.malloc_trim()
    torch = sys.modules.get("torch")  # not imported: it has no cache yet
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return max(0, before - process.memory_info().rss)
