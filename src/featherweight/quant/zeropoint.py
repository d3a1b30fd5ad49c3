"""Zero-point quantisation: for values that lie unevenly about zero, as after a ReLU.

Absmax wastes the codes of a sign that does not occur. Here the whole range lo … hi is spread over
the 2q + 1 codes, and the code that means zero, the zero-point, is stored:

    step = (hi − lo) / 2q
    code = round(x / step) + zero_point
    x ≈ (code − zero_point) · step

The range always includes zero, so that zero (padding) is exact and the zero-point is a code.
"""

from __future__ import annotations

import torch

from featherweight.quant.absmax import largest_code, refuse_nonfinite


def quantize_zeropoint(
    x: torch.Tensor, dim: int | None = None, bits: int = 8
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (int8, the shape of x), step (f32) and zero-point (int8).

    `dim` is what the range is taken over: None, the whole tensor, step []; 1, each row of [M, K],
    step [M]; 0, each column, step [K]. Raises UnsupportedError for bits outside 2 … 8, and for NaN
    and infinity.
    """
    q = largest_code(bits)
    refuse_nonfinite(x)
    x = x.double()  # hi − lo may be beyond float32
    low, high = (x.amin(), x.amax()) if dim is None else (x.amin(dim, True), x.amax(dim, True))
    low, high = low.clamp(max=0), high.clamp(min=0)
    scale = torch.where(high > low, 2 * q / (high - low), 0.0)
    zero_point = torch.where(high > low, torch.round(-q - low * scale), 0.0)
    codes = (torch.round(x * scale) + zero_point).clamp(-q, q).to(torch.int8)
    step = (high - low) / (2 * q)
    if dim is not None:
        step, zero_point = step.squeeze(dim), zero_point.squeeze(dim)
    return codes, step.float(), zero_point.to(torch.int8)


def dequantize_zeropoint(
    codes: torch.Tensor, step: torch.Tensor, zero_point: torch.Tensor, dim: int | None = None
) -> torch.Tensor:
    """What the codes stand for, f32; `dim` as it was for `quantize_zeropoint`."""
    if dim is not None:
        step, zero_point = step.unsqueeze(dim), zero_point.unsqueeze(dim)
    return (codes.float() - zero_point) * step


def zeropoint_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [K, N] through 8-bit integers, a by rows and b by columns: f32 [M, N].

    Zero-points need no shifted copies of the codes, only their sums:
    Σ(a − za)(b − zb) = Σab − zb·Σa − za·Σb + K·za·zb.
    """
    a_codes, a_step, a_zero = (t.double() for t in quantize_zeropoint(a, dim=1))
    b_codes, b_step, b_zero = (t.double() for t in quantize_zeropoint(b, dim=0))
    product = (  # whole numbers below 2^53: exact
        a_codes @ b_codes
        - torch.outer(a_codes.sum(1), b_zero)
        - torch.outer(a_zero, b_codes.sum(0))
        + a.shape[1] * torch.outer(a_zero, b_zero)
    )
    return (product * torch.outer(a_step, b_step)).float()
