"""Blockwise 4-bit quantisation with a codebook of sixteen values.

The tensor is flattened and cut into blocks; each block is divided by its absmax, and each value
replaced by the code of the nearest entry of the codebook. Small blocks keep a large weight from
spoiling more than its neighbours. Two codes share a byte, the first in the high nibble: the layout
of bitsandbytes, whose codes and absmax these are, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from featherweight.errors import UnsupportedError
from featherweight.quant.absmax import refuse_nonfinite
from featherweight.quant.nested import Nested, nest

BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SMALLEST = 1e-38  # keeps 1 / absmax finite for a block of zeros


@dataclass(frozen=True, eq=False)
class FourBit:
    """A 4-bit tensor of n values: code[codes] · absmax of their block, in `shape`."""

    codes: torch.Tensor  # uint8 [ceil(n / 2)], element 0 in the high nibble of byte 0
    absmax: torch.Tensor | Nested  # f32 [blocks], blocks = ceil(n / blocksize)
    code: torch.Tensor  # f32 [16], the codebook
    blocksize: int
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the original


def quantize_4bit(
    weight: torch.Tensor, code: torch.Tensor, blocksize: int = 64, double: bool = False
) -> FourBit:
    """Quantise a tensor of any shape with any codebook of sixteen values in [−1, 1], in any order.

    A value halfway between two entries becomes the lower one. `double` quantises the absmax values
    too. Raises UnsupportedError for a blocksize, dtype or codebook that is not offered, and for
    weights with NaN or infinity, which no code can stand for.
    """
    _check(weight, code, blocksize)
    code = code.to(weight.device, torch.float32, copy=True)
    x = weight.detach().reshape(-1).float()
    whole = x.numel() // blocksize * blocksize
    blocks = x[:whole].reshape(-1, blocksize)
    absmax = blocks.abs().amax(1)
    scaled = (blocks * (1.0 / absmax.clamp(min=_SMALLEST))[:, None]).reshape(-1)
    if whole < x.numel():  # a last, shorter block: bitsandbytes divides here, and clamps the absmax
        last = x[whole:].abs().amax().clamp(min=_SMALLEST)
        absmax = torch.cat([absmax, last[None]])
        scaled = torch.cat([scaled, x[whole:] / last])
    nibbles = _nearest(scaled.clamp(-1, 1), code)
    return FourBit(
        codes=pack_nibbles(nibbles, fill=int(_nearest(x.new_zeros(1), code))),
        absmax=nest(absmax) if double else absmax,
        code=code,
        blocksize=blocksize,
        shape=tuple(weight.shape),
        dtype=weight.dtype,
    )


def dequantize_4bit(q: FourBit, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What the codes stand for, in `dtype` (default: that of the original), multiplied in f32."""
    count = torch.Size(q.shape).numel()
    values = q.code[unpack_nibbles(q.codes, count).long()]
    values = values * scales(q.absmax).repeat_interleave(q.blocksize)[:count]
    return values.reshape(q.shape).to(dtype or q.dtype)


def scales(absmax: torch.Tensor | Nested) -> torch.Tensor:
    """The absmax of each block, f32 [blocks], also of nested ones."""
    return absmax.values() if isinstance(absmax, Nested) else absmax


def pack_nibbles(nibbles: torch.Tensor, fill: int = 0) -> torch.Tensor:
    """Codes 0 … 15, uint8 [n] → two a byte, uint8 [ceil(n / 2)]; `fill` is the odd last one's."""
    if nibbles.numel() % 2:
        nibbles = torch.cat([nibbles, nibbles.new_tensor([fill])])
    return nibbles[0::2] << 4 | nibbles[1::2]


def unpack_nibbles(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` codes of `pack_nibbles`' bytes: uint8 [count]."""
    return torch.stack([packed >> 4, packed & 15], dim=-1).reshape(-1)[:count]


def _nearest(x: torch.Tensor, code: torch.Tensor) -> torch.Tensor:
    """The code of the entry nearest to each x, uint8; the lower one at a midpoint."""
    values, order = torch.sort(code, stable=True)
    midpoints = (values[:-1] + values[1:]) / 2
    return order.to(torch.uint8)[torch.bucketize(x, midpoints, out_int32=True)]


def _check(weight: torch.Tensor, code: torch.Tensor, blocksize: int) -> None:
    if blocksize not in BLOCKSIZES:
        raise UnsupportedError(
            f"blocksize={blocksize}", hint=f"choose one of {', '.join(map(str, BLOCKSIZES))}"
        )
    if weight.dtype not in DTYPES:
        raise UnsupportedError(
            f"weights of {weight.dtype} cannot be quantised to 4 bits",
            hint="convert them to float32, bfloat16 or float16",
        )
    if code.shape != (16,) or not 0 < float(code.abs().max()) <= 1:  # false for NaN, too
        raise UnsupportedError(
            f"a codebook of shape {tuple(code.shape)} with values up to {code.abs().max():.3g}",
            hint="give sixteen values between -1 and 1, not all zero",
        )
    refuse_nonfinite(weight)
