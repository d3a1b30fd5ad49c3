"""Double quantisation: the absmax values of a 4-bit tensor, themselves in 8 bits.

One f32 absmax for 64 weights costs half a bit a weight. Absmax values are alike and positive; less
their mean, they are quantised with the dynamic map in blocks of 256: 0.127 bit a weight (QLoRA,
arXiv 2305.14314, section 3). Byte for byte what bitsandbytes writes as `nested_*`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from featherweight.errors import UnsupportedError
from featherweight.quant.codebooks import DYNAMIC

BLOCKSIZE = 256  # absmax values that share one absmax of their own
BINS = 65536  # that values are rounded to first, see `_codes_of_bins`


@dataclass(frozen=True, eq=False)
class Nested:
    """Absmax values in 8 bits: values = code[codes] · absmax of their block + offset."""

    codes: torch.Tensor  # uint8 [blocks]
    absmax: torch.Tensor  # f32 [ceil(blocks / 256)]
    code: torch.Tensor  # f32 [256], the dynamic map
    offset: float  # mean of the absmax values, a number that f32 holds

    def values(self) -> torch.Tensor:
        """The absmax values again, f32 [blocks]."""
        scale = self.absmax.repeat_interleave(BLOCKSIZE)[: self.codes.numel()]
        return self.code[self.codes.long()] * scale + self.offset


def nest(absmax: torch.Tensor) -> Nested:
    """Quantise absmax values, f32 [blocks].

    Raises UnsupportedError if their sum is beyond float32.
    """
    offset = float(absmax.mean()) if absmax.numel() else 0.0
    if not math.isfinite(offset):
        raise UnsupportedError(
            "the absmax values are too large for their mean to be a float32",
            hint="quantise without double",
        )
    count = absmax.numel()
    blocks = -(-count // BLOCKSIZE)
    centred = torch.nn.functional.pad(absmax - offset, (0, blocks * BLOCKSIZE - count))
    centred = centred.reshape(blocks, BLOCKSIZE)
    largest = centred.abs().amax(1) if blocks else centred.new_zeros(0)
    codes = _codes_of_bins().to(absmax.device)[_bins(centred * (1 / largest)[:, None])]
    return Nested(codes.reshape(-1)[:count], largest, DYNAMIC.to(absmax.device, copy=True), offset)


def _bins(x: torch.Tensor) -> torch.Tensor:
    """In which of 65536 equal steps from −1 to 1 each x falls, rounded to the nearest."""
    x = x.clamp(-1, 1).nan_to_num(nan=-1.0)  # a block of zeros is 0 · inf: bin 0
    return ((x + 1) * 0.5 * (BINS - 1) + 0.5).long()


@cache
def _codes_of_bins() -> torch.Tensor:
    """The code nearest to the centre of each bin, uint8 [65536].

    bitsandbytes' CPU kernel looks codes up in such a table instead of comparing with the 255
    midpoints. So a value within 1/65535 of a midpoint may get the neighbour's code, and the seven
    codes nearest to 0, which lie closer together than the bins, are never used: 0 becomes 2e-5.
    """
    centres = torch.arange(BINS).float() * 2 / (BINS - 1) - 1
    midpoints = (DYNAMIC[:-1] + DYNAMIC[1:]) * 0.5
    return torch.bucketize(centres, midpoints).to(torch.uint8)
