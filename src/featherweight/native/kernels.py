"""Typed wrappers: tensors in, tensors out; shapes and types are checked before C sees a pointer.

`threads` defaults to torch's own count. All raise `NativeError` where the library is missing, or
for a tensor that is not what the docstring says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from featherweight.errors import NativeError
from featherweight.native.library import library

if TYPE_CHECKING:
    import torch

MAX_DOT_I8 = 131072  # 2^31 / (128 · 127): the longest row whose sum int32 surely holds
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


def dot_i8(
    weight: torch.Tensor, row_sums: torch.Tensor, x: torch.Tensor, threads: int | None = None
) -> torch.Tensor:
    """`weight` [N, K] int8 times `x` [K] int8, exactly: [N] int32.

    `row_sums` [N] int32 is `weight.sum(1)`. `x` must not hold -128; K is at most `MAX_DOT_I8`.
    """
    import torch

    native = library()
    rows, columns = _matrix(weight)
    if columns > MAX_DOT_I8:
        raise NativeError(f"rows of {columns} codes; int32 sums hold at most {MAX_DOT_I8}")
    out = torch.empty(rows, dtype=torch.int32)
    native.fw_dot_i8(
        _address(weight, torch.int8, (rows, columns), "weight"),
        _address(row_sums, torch.int32, (rows,), "row_sums"),
        _address(x, torch.int8, (columns,), "x"),
        out.data_ptr(),
        rows,
        columns,
        threads or torch.get_num_threads(),
    )
    return out


def dot_f32(weight: torch.Tensor, x: torch.Tensor, threads: int | None = None) -> torch.Tensor:
    """`weight` [N, K] times `x` [K], all float32: [N], summed in an order of the ISA's own."""
    import torch

    native = library()
    rows, columns = _matrix(weight)
    out = torch.empty(rows, dtype=torch.float32)
    native.fw_dot_f32(
        _address(weight, torch.float32, (rows, columns), "weight"),
        _address(x, torch.float32, (columns,), "x"),
        out.data_ptr(),
        rows,
        columns,
        threads or torch.get_num_threads(),
    )
    return out


def probe_f32(rounds: int, threads: int) -> int:
    """Do fp32 multiply-adds in registers on every thread; returns the operations done by all."""
    return library().fw_probe_f32(rounds, threads)


def probe_i8(rounds: int, threads: int) -> int:
    """Multiply an int8 matrix that fits L1 `rounds` times on every thread; returns operations."""
    return library().fw_probe_i8(rounds, threads)


def _matrix(weight: torch.Tensor) -> tuple[int, int]:
    if weight.dim() != 2:
        raise NativeError(f"weight has shape {list(weight.shape)}; a matrix is wanted")
    return weight.shape[0], weight.shape[1]


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
