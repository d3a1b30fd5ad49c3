"""bitsandbytes' ops on CPU tensors, by Featherweight's kernels, on its bytes as they lie.

Each function has the signature of the op of its name (bitsandbytes/_ops.py). What it does not take
(the bytes that bitsandbytes repacked, int8 activations that are no matrix) goes to the kernel that
bitsandbytes itself would run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from featherweight.native import linear as native
from featherweight.quant.blockwise import DTYPES
from featherweight.quant.codebooks import codebook

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_codebook = cache(codebook)
_stock: dict[str, Any] = {}  # bitsandbytes' kernels by name of the op


def register() -> torch.library.Library:
    """Put the kernels in place of bitsandbytes' own, until the library is destroyed."""
    for name in _KERNELS:
        _stock[name] = torch.library.get_kernel(f"bitsandbytes::{name}", "CPU")
    library = torch.library.Library("bitsandbytes", "IMPL")
    with warnings.catch_warnings():  # torch warns of the first kernel that is overridden
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in _KERNELS.items():
            library.impl(name, kernel, "CPU", allow_override=True)
    return library


def _by_stock(name: str, *args: Any) -> Any:
    return _stock[name].call_boxed(_CPU, *args)


# 4-bit weights


def gemm_4bit(
    A: Tensor,
    B: Tensor,
    shapeB: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """A [..., K] times a 4-bit weight of shapeB [N, K], plus bias [N]: [..., N], dtype of A."""
    nested = (absmax_8bit, absmax_code, absmax_offset)
    weight = _weight(B, absmax, _codebook(quant_type), blocksize, *nested)
    return native.linear(native.four_bit(_pair(shapeB), *weight), A, bias)


def gemv_4bit(
    A: Tensor, B: Tensor, shapeB: Sequence[int], absmax: Tensor, code: Tensor, blocksize: int
) -> Tensor:
    """The same without bias and nesting. Repacked bytes have absmax bf16 [K / blocksize, N]."""
    if absmax.ndim == 2:
        return _by_stock("gemv_4bit", A, B, shapeB, absmax, code, blocksize)
    weight = _weight(B, absmax, code.float(), blocksize)
    return native.linear(native.four_bit(_pair(shapeB), *weight), A, None)


def dequantize_4bit(
    A: Tensor,
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """What 4-bit codes A stand for, in `shape` and `dtype`."""
    rows = torch.Size(shape[:-1]).numel()
    weight = _weight(A, absmax, _codebook(quant_type), blocksize)
    return native.decode(native.four_bit((rows, shape[-1]), *weight), dtype).view(shape)


def _weight(
    codes: Tensor,
    absmax: Tensor,
    code: Tensor,
    blocksize: int,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> tuple[Any, ...]:
    """What `native.four_bit` takes; to be kept while that is in use, for it holds addresses."""
    codes = codes.contiguous().view(torch.uint8)  # quant_storage may be a float dtype
    absmax = absmax.float().contiguous()
    if absmax_8bit is None or absmax_code is None or absmax_offset is None:
        return codes, absmax, None, None, 0.0, code, blocksize
    return codes, absmax_8bit, absmax, absmax_code, float(absmax_offset), code, blocksize


def _pair(shape: Sequence[int]) -> tuple[int, int]:
    rows, columns = shape
    return rows, columns


# int8 weights


def int8_vectorwise_quant(
    A: Tensor, threshold: float = 0.0
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A [M, K] → codes int8 [M, K], absmax f32 [M], and int64 [C] the columns with outliers.

    Outliers count for no absmax; with several rows, their columns have code 0 in all of them. With
    a threshold of 0 nothing is an outlier, and the columns are None.
    """
    if A.ndim != 2 or not A.numel() or A.dtype not in DTYPES:
        return _by_stock("int8_vectorwise_quant", A, threshold)
    if threshold <= 0:
        return *native.quantize_rows(A), None
    codes, absmax, found = native.quantize_but_outliers(A, _as(threshold, A.dtype))
    columns = found.nonzero().view(-1)
    if len(A) > 1 and columns.numel():
        codes.index_fill_(1, columns, 0)
    return codes, absmax, columns


@cache
def _as(threshold: float, dtype: torch.dtype) -> float:
    """The threshold as torch compares tensors of a dtype with it: rounded to that dtype."""
    return float(torch.tensor(threshold, dtype=dtype))


def int8_scaled_mm(
    A: Tensor,
    B: Tensor,
    row_stats: Tensor,
    col_stats: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Codes A [M, K] and B [N, K] with their absmax: the product plus bias [N], [M, N]."""
    if not _takes(A, B):
        return _by_stock("int8_scaled_mm", A, B, row_stats, col_stats, bias, dtype)
    return _int8_product(A, B, row_stats, col_stats, bias, dtype or torch.float16)


def int8_mixed_scaled_mm(
    A: Tensor,
    CA: Tensor,
    CB: Tensor,
    SCA: Tensor,
    SCB: Tensor,
    outlier_cols: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`int8_scaled_mm` in the dtype of A [M, K], plus A's outlier columns in float32; and those."""
    if not _takes(CA, CB) or A.ndim != 2:
        return _by_stock("int8_mixed_scaled_mm", A, CA, CB, SCA, SCB, outlier_cols, bias)
    if outlier_cols is None or not outlier_cols.numel():
        return _int8_product(CA, CB, SCA, SCB, bias, A.dtype), A.new_empty(0)
    outliers = A[:, outlier_cols].contiguous()
    out = _int8_product(CA, CB, SCA, SCB, bias, A.dtype, outlier_cols, outliers.float())
    return out, outliers


def _takes(A: Tensor, B: Tensor) -> bool:
    return A.ndim == 2 and A.numel() > 0 and B.numel() > 0 and A.shape[1] < native.LONGEST


def _int8_product(
    codes: Tensor,
    weight: Tensor,
    absmax: Tensor,
    weight_absmax: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    columns: Tensor | None = None,
    outliers: Tensor | None = None,
) -> Tensor:
    weight, weight_absmax = weight.contiguous(), weight_absmax.contiguous()
    matrix = native.int8(weight, weight_absmax)
    return native.linear_codes(
        matrix, codes.contiguous(), absmax.contiguous(), dtype, bias, columns, outliers
    )


_KERNELS: dict[str, Callable[..., Any]] = {
    kernel.__name__: kernel
    for kernel in (
        gemm_4bit,
        gemv_4bit,
        dequantize_4bit,
        int8_vectorwise_quant,
        int8_scaled_mm,
        int8_mixed_scaled_mm,
    )
}
