"""Calls of the C library that Python lacks. The compiled library is not needed for them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cache
from typing import Any

_M_MMAP_THRESHOLD = -3  # of mallopt, in glibc's malloc.h
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of renameat2, in Linux' fcntl.h


def madvise_dontneed(address: int, nbytes: int) -> None:
    """Give back the physical pages of [address, address + nbytes): `MADV_DONTNEED`.

    Pages of a file mapping come again when next read, as the file has them; anonymous ones come
    again as zeros. `address` must be the start of a page. Raises OSError where the system refuses.
    """
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if advice is None:
        raise OSError("this system has no MADV_DONTNEED")
    if _libc().madvise(address, nbytes, advice):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def exchange(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> None:
    """Let two existing paths of one file system change places in one atomic step (`renameat2`).

    Raises OSError: ENOSYS without Linux and a C library that has the call, EINVAL where the file
    system has no exchange (network and FUSE ones, often), else as `os.rename`.
    """
    call = getattr(_libc(), "renameat2", None) if os.name == "posix" else None
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if call(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), os.fspath(a), None, os.fspath(b))


def malloc_trim() -> bool:
    """Return free heap memory to the system. False: nothing to return, or no glibc."""
    if os.name != "posix":
        return False
    trim = getattr(_libc(), "malloc_trim", None)
    return trim is not None and bool(trim(0))


def set_mmap_threshold(nbytes: int) -> bool:
    """Blocks of at least so many bytes come from the system and go back to it when freed.

    Also ends glibc's habit of raising that threshold by itself. False where glibc is absent.
    """
    if os.name != "posix":
        return False
    option = getattr(_libc(), "mallopt", None)
    return option is not None and bool(option(_M_MMAP_THRESHOLD, nbytes))


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.madvise.restype = ctypes.c_int
    if hasattr(libc, "renameat2"):
        path = ctypes.c_char_p
        libc.renameat2.argtypes = [ctypes.c_int, path, ctypes.c_int, path, ctypes.c_uint]
        libc.renameat2.restype = ctypes.c_int
    if hasattr(libc, "mallopt"):
        libc.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
        libc.mallopt.restype = ctypes.c_int
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim.argtypes = [ctypes.c_size_t]
        libc.malloc_trim.restype = ctypes.c_int
    return libc
