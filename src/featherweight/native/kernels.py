"""Probes of the machine; shapes and types are checked before C sees a pointer.

`threads` defaults to torch's own count. All raise `NativeError` where the library is missing, or
for a tensor that is not what the docstring says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from featherweight.errors import NativeError
from featherweight.native.library import library

if TYPE_CHECKING:
    import torch

_SLICE = 1 << 28  # bytes read in one call, to stay under 200 ms at 2 GB/s


def sum_words(data: torch.Tensor, threads: int | None = None) -> int:
    """Sum modulo 2^64 of the native 64-bit words of a contiguous CPU tensor's bytes.

    A last word that is not whole is filled up with zero bytes. Reads every byte once, in order.
    """
    import torch

    native = library()
    address = _address(data, data.dtype, tuple(data.shape), "data")
    nbytes = data.numel() * data.element_size()
    threads = threads or torch.get_num_threads()
    total = 0
    for start in range(0, nbytes, _SLICE):
        total += native.fw_sum_words(address + start, min(_SLICE, nbytes - start), threads)
    return total % (1 << 64)


def probe_f32(rounds: int, threads: int) -> int:
    """Do fp32 multiply-adds in registers on every thread; returns the operations done by all."""
    return library().fw_probe_f32(rounds, threads)


def probe_i8(rounds: int, threads: int) -> int:
    """Do int8 multiply-adds in registers on every thread; returns the operations done by all."""
    return library().fw_probe_i8(rounds, threads)


def _address(tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str) -> int:
    """The address of a dense CPU tensor that is exactly what the kernel expects."""
    fits = tensor.dtype == dtype and tuple(tensor.shape) == shape
    if not fits or tensor.device.type != "cpu" or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise NativeError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}, {layout}, on {tensor.device}",
            hint=f"give it as {dtype} {list(shape)}, contiguous, on the CPU",
        )
    return tensor.data_ptr()
