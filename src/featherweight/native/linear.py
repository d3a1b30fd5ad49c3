"""Products with weights of every format, on CPU tensors: what the ops of `ops.py` call.

Tensors are checked before C sees a pointer; `NativeError` says what does not fit.
"""

from __future__ import annotations

from ctypes import addressof

import torch

from featherweight.errors import NativeError
from featherweight.native.library import Matrix, library
from featherweight.quant.blockwise import BLOCKSIZES

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_I8, _4BIT = 3, 4
EXACT, _PER_BATCH = 1, 2
_PRODUCTS = 4_000_000_000  # multiply-adds in one call, so that an interrupt waits less than 200 ms
_LEAST_ROWS = 48  # in one call: fewer would spend their time on laying out weights
_QUANTISED = 1 << 25  # weights quantised in one call, likewise; blocks of any size divide it
LONGEST = 131072  # int8 products of which int32 holds fewer, whatever they are: 2^31 / 128²
_SHORT = "no memory for the activations of a linear layer"


def floats(weight: torch.Tensor) -> Matrix:
    """A weight [N, K] in float32, bfloat16 or float16."""
    rows, columns = _two(weight)
    return Matrix(_dense(weight), 0, 0, 0, 0, rows, columns, 0, 0.0, _type(weight))


def int8(weight: torch.Tensor, absmax: torch.Tensor) -> Matrix:
    """A weight int8 [N, K] with absmax f32 [N]."""
    rows, columns = _two(weight)
    if weight.dtype is not torch.int8:
        raise NativeError(f"weight is {weight.dtype}, not int8")
    return Matrix(_dense(weight), _f32(absmax, rows), 0, 0, 0, rows, columns, 0, 0.0, _I8)


def four_bit(
    shape: tuple[int, int],
    codes: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    nested_offset: float,
    code: torch.Tensor,
    blocksize: int,
) -> Matrix:
    """A weight of `shape` [N, K] as 4-bit codes in flat order, with absmax nested or not."""
    rows, columns = shape
    count = rows * columns
    blocks = -(-count // blocksize) if blocksize >= 32 and not blocksize & (blocksize - 1) else 0
    if not blocks and count:
        raise NativeError(f"blocksize is {blocksize}; it is a power of two from 32 upwards")
    if codes.dtype is not torch.uint8 or codes.numel() != (count + 1) // 2:
        raise NativeError(
            f"codes are {codes.dtype} {list(codes.shape)}; [{rows}, {columns}] takes uint8"
            f" [{(count + 1) // 2}]"
        )
    if nested_absmax is None or nested_code is None:
        outer, inner, nested = _f32(absmax, blocks), 0, 0
    elif absmax.dtype is torch.uint8 and absmax.numel() == blocks:
        inner, nested = _dense(absmax), _f32(nested_code, 256)
        outer = _f32(nested_absmax, -(-blocks // 256))
    else:
        raise NativeError(
            f"nested absmax is {absmax.dtype} {list(absmax.shape)}, not uint8 [{blocks}]"
        )
    return Matrix(
        _dense(codes), outer, _f32(code, 16), inner, nested, rows, columns, blocksize,
        nested_offset, _4BIT,
    )  # fmt: skip


def linear(
    weight: Matrix,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    threshold: float = 0.0,
    per_batch: bool = False,
    exact: bool = False,
) -> torch.Tensor:
    """x [..., K] times the weight [N, K], plus bias [N]: [..., N] in the dtype of x."""
    call = library().fw_linear
    rows: int = weight.rows
    columns: int = weight.columns
    x, type_, m = _rows(x, columns)
    out = x.new_empty((*x.shape[:-1], rows))
    bias_at = None
    if bias is not None:
        bias = bias.float()
        bias_at = _f32(bias, rows)
    address, source, target, itemsize = addressof(weight), x.data_ptr(), out.data_ptr(), x.itemsize
    flags = (EXACT if exact else 0) | (_PER_BATCH if per_batch else 0)
    threads = torch.get_num_threads()
    most = max(_LEAST_ROWS, _PRODUCTS // (rows * columns or 1))
    if per_batch:
        most = m  # outliers of a batch are found over all of it
    while m > 0:
        count = min(m, most)
        if call(address, source, target, bias_at, count, type_, threshold, flags, threads):
            raise MemoryError(_SHORT)
        m -= count
        source += count * columns * itemsize
        target += count * rows * itemsize
    return out


def linear_codes(
    weight: Matrix,
    x: torch.Tensor,
    absmax: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    columns: torch.Tensor | None = None,
    outliers: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows that are codes already, x int8 [M, K] with absmax f32 [M], times a weight int8 [N, K].

    Plus bias [N]; plus outliers f32 [M, C], what was taken out of the columns int64 [C] of x, times
    those columns of the weight: [M, N] in `dtype`. K is less than `LONGEST`.
    """
    call = library().fw_linear_codes
    m, k = _two(x)
    rows: int = weight.rows
    if x.dtype is not torch.int8 or k != weight.columns or k >= LONGEST or weight.format != _I8:
        raise NativeError(
            f"activations are {x.dtype} {list(x.shape)} and weights [{rows}, {weight.columns}]",
            hint=f"allowed: int8 with int8, the last dimensions equal and less than {LONGEST}",
        )
    out = x.new_empty((m, rows), dtype=dtype)
    type_, threads, bias_at = _type(out), torch.get_num_threads(), None
    if bias is not None:
        bias = bias.float()
        bias_at = _f32(bias, rows)
    count, columns_at, outliers_at = 0, None, 0
    if columns is not None and outliers is not None and columns.numel():
        count, columns_at = columns.numel(), _dense(columns)
        outliers_at = _f32(outliers, m * count)
        low, high = (int(at) for at in columns.aminmax())
        if columns.dtype is not torch.int64 or low < 0 or high >= k:
            raise NativeError(f"columns are {columns.dtype} from {low} to {high}, of {k}")
    source, scales, target = _dense(x), _f32(absmax, m), out.data_ptr()
    most = max(_LEAST_ROWS, _PRODUCTS // (rows * k or 1))
    for first in range(0, m, most):
        if call(
            addressof(weight), source + first * k, scales + 4 * first, columns_at,
            outliers_at + 4 * first * count, count, target + first * rows * out.itemsize, bias_at,
            min(most, m - first), type_, threads,
        ):  # fmt: skip
            raise MemoryError(_SHORT)
    return out


def backward(weight: Matrix, grad: torch.Tensor) -> torch.Tensor:
    """grad [..., N] times the weight [N, K]: [..., K] in the dtype of grad."""
    call = library().fw_linear_backward
    rows: int = weight.rows
    columns: int = weight.columns
    grad, type_, m = _rows(grad, rows)
    out = grad.new_empty((*grad.shape[:-1], columns))
    if not rows:
        return out.zero_()
    source, target, itemsize = grad.data_ptr(), out.data_ptr(), grad.itemsize
    threads = torch.get_num_threads()
    most = max(_LEAST_ROWS, _PRODUCTS // (rows * columns or 1))
    while m > 0:
        count = min(m, most)
        if call(addressof(weight), source, target, count, type_, threads):
            raise MemoryError(_SHORT)
        m -= count
        source += count * rows * itemsize
        target += count * columns * itemsize
    return out


def decode(weight: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """The weight [N, K] as numbers."""
    out = torch.empty((weight.rows, weight.columns), dtype=dtype)
    library().fw_decode(addressof(weight), out.data_ptr(), _type(out), torch.get_num_threads())
    return out


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [N, K] → codes int8 [N, K] and absmax f32 [N], as `quant.int8.quantize_rows`."""
    return quantize_but_outliers(x, 0.0)[:2]


def quantize_but_outliers(
    x: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize_rows` of what is smaller than a threshold > 0; and the columns of the rest.

    An outlier, |x| ≥ threshold, has code 0; the columns, bool [K], are those that hold one.
    """
    rows, columns = _two(x)
    x = x.contiguous()
    codes = torch.empty((rows, columns), dtype=torch.int8)
    absmax = torch.zeros(rows)
    found = torch.zeros(columns, dtype=torch.bool)
    call, type_, threads = library().fw_quantize_rows, _type(x), torch.get_num_threads()
    most = max(1, _QUANTISED // (columns or 1))
    for first in range(0, rows, most):
        at = first * columns
        if call(
            x.data_ptr() + at * x.itemsize, type_, min(most, rows - first), columns, threshold,
            codes.data_ptr() + at, absmax.data_ptr() + 4 * first, found.data_ptr(), threads,
        ):  # fmt: skip
            raise MemoryError(_SHORT)
    return codes, absmax, found


def quantize_4bit(
    weight: torch.Tensor, code: torch.Tensor, blocksize: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight of any shape → codes uint8 [ceil(n / 2)] and absmax f32 [blocks].

    As `quant.blockwise.quantize_4bit`; raises NativeError for a weight that is not finite.
    """
    if blocksize not in BLOCKSIZES:
        allowed = ", ".join(map(str, BLOCKSIZES))
        raise NativeError(f"blocksize is {blocksize}", hint=f"allowed: {allowed}")
    weight = weight.contiguous()
    n = weight.numel()
    _f32(code, 16)
    order = torch.argsort(code, stable=True)
    midpoints = ((code[order[:-1]] + code[order[1:]]) / 2).contiguous()
    codes = torch.empty((n + 1) // 2, dtype=torch.uint8)
    absmax = torch.empty(-(-n // blocksize))
    ranks = order.to(torch.uint8)
    call, type_, threads = library().fw_quantize_4bit, _type(weight), torch.get_num_threads()
    for first in range(0, n, _QUANTISED):
        if call(
            weight.data_ptr() + first * weight.itemsize, type_, min(_QUANTISED, n - first),
            blocksize, midpoints.data_ptr(), ranks.data_ptr(), codes.data_ptr() + first // 2,
            absmax.data_ptr() + 4 * (first // blocksize), threads,
        ):  # fmt: skip
            raise NativeError(
                "a weight is infinite or NaN, which has no code",
                hint="leave it out of the quantisation, or mend the checkpoint",
            )
    return codes, absmax


def _rows(x: torch.Tensor, columns: int) -> tuple[torch.Tensor, int, int]:
    if not x.ndim or x.shape[-1] != columns:
        raise NativeError(f"activations are {list(x.shape)}; the last dimension must be {columns}")
    if not x.is_contiguous():
        x = x.contiguous()
    return x, _type(x), x.numel() // columns if columns else x.shape[:-1].numel()


def _type(x: torch.Tensor) -> int:
    try:
        return _TYPES[x.dtype]
    except KeyError:
        raise NativeError(
            f"the dtype is {x.dtype}", hint="allowed: float32, bfloat16, float16"
        ) from None


def _two(weight: torch.Tensor) -> tuple[int, int]:
    if weight.ndim != 2:
        raise NativeError(f"weight has shape {list(weight.shape)}; a matrix [N, K] is wanted")
    rows, columns = weight.shape
    return rows, columns


def _f32(tensor: torch.Tensor, count: int) -> int:
    if tensor.dtype is not torch.float32 or tensor.numel() != count:
        raise NativeError(f"{tensor.dtype} {list(tensor.shape)} given; float32 [{count}] wanted")
    return _dense(tensor)


def _dense(tensor: torch.Tensor) -> int:
    if not tensor.is_contiguous():
        raise NativeError(f"a tensor {list(tensor.shape)} is strided; weights must be contiguous")
    return tensor.data_ptr()
