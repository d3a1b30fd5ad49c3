"""A linear layer of 4-bit weights, as the kernels compute it.

The codebook is written in 8-bit integers (`int8_table`) and the activations are quantised in
blocks no longer than the weights'. Then the sum over a block is one of integers, scaled once by
absmax · step of the weights and the scale of the activations.
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from featherweight.quant.blockwise import FourBit, dequantize_4bit, scales, unpack_nibbles
from featherweight.quant.codebooks import int8_table
from featherweight.quant.int8 import quantize_rows


def quantize_blocks(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] → codes int8 [..., K] and scale f32 [..., K / block]: x ≈ codes · scale.

    Each block is quantised as `quantize_rows` does a row; scale = absmax / 127, NaN for a block
    with NaN or infinity.
    """
    codes, absmax = quantize_rows(x.unflatten(-1, (x.shape[-1] // block, block)))
    return codes.flatten(-2), absmax / 127


def linear_4bit(
    x: torch.Tensor, q: FourBit, bias: torch.Tensor | None, exact: bool
) -> torch.Tensor:
    """x [..., K] times a 4-bit weight [N, K], plus bias [N]: [..., N] in the dtype of x.

    `exact` multiplies float activations with dequantised weights, all in f32. So do widths that no
    32 divides, where blocks of the weight would run across its rows.
    """
    features = q.shape[1]
    if exact or features % 32:
        out = linear(x.float(), dequantize_4bit(q, torch.float32))
        return (out if bias is None else out + bias.float()).to(x.dtype)
    block = 64 if features % 64 == 0 and q.blocksize % 64 == 0 else 32
    codes, scale = quantize_blocks(x, block)
    table, step = int8_table(q.code.cpu())
    count = torch.Size(q.shape).numel()
    weight = table.to(x.device)[unpack_nibbles(q.codes, count).long()]
    # A kernel sums integers within a block and scales the sum; scaling first differs by nothing
    # that float64 can lose.
    weight = weight.double() * scales(q.absmax).double().repeat_interleave(q.blocksize)[:count]
    out = linear(
        codes.double() * scale.double().repeat_interleave(block, -1),
        weight.reshape(q.shape) * step,
    )
    return (out if bias is None else out + bias.double()).to(x.dtype)
