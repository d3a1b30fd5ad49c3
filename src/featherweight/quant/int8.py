"""LLM.int8() (arXiv 2208.07339): 8-bit weights and activations, outliers in float.

Activations are quantised row by row (a row is a token), weights row by row (a row is an output),
and the product is one of integers. A few activations of large transformers are twenty times the
rest, always in the same few columns; in 8 bits they would drown their row. So those at or above a
threshold are taken out and multiplied in float with the dequantised weights.
"""

from __future__ import annotations

import torch

from featherweight.quant.absmax import TINY


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] → codes int8 [..., K] and absmax f32 [...]: x ≈ codes · absmax / 127.

    Codes are x · (127 / absmax) in f32, halves to even, as in bitsandbytes. A row whose absmax is
    below 1e-35 has codes of 0. A row with NaN or infinity has codes of 0 and absmax NaN, so that
    what is computed from it is NaN too.
    """
    x = x.float()
    absmax = x.abs().amax(-1)  # amax lets NaN through
    absmax = torch.where(absmax.isfinite(), absmax, torch.nan)
    scale = torch.where(absmax >= TINY, 127 / absmax, 0.0)[..., None]  # 0 for NaN too
    codes = torch.round(torch.where(scale > 0, x * scale, 0.0))
    return codes.to(torch.int8), absmax


def outliers(x: torch.Tensor, threshold: float, per_batch: bool) -> torch.Tensor:
    """Which of x [M, K] are kept in float: bool [M, K]. None if the threshold is 0.

    Row by row, |x| ≥ threshold: a row's result does not depend on the rest of the batch. With
    `per_batch`, every column in which any row has one, as bitsandbytes does.
    """
    if threshold <= 0:
        return torch.zeros_like(x, dtype=torch.bool)
    large = x.abs() >= threshold
    return large.any(0).expand_as(large) if per_batch else large


def linear_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    bias: torch.Tensor | None,
    threshold: float,
    per_batch: bool,
) -> torch.Tensor:
    """x [..., K] times weight int8 [N, K] with its absmax f32 [N], plus bias [N]: [..., N].

    Integers times integers, scaled by absmax · absmax / 127²; the outliers of x in float. The
    result has the dtype of x. A row with NaN comes out as NaN; one with infinity as NaN or, if a
    threshold sets that apart, as infinity.
    """
    rows = x.reshape(-1, x.shape[-1]).float()  # [M, K]
    apart = outliers(rows, threshold, per_batch)
    # A row's absmax is over its values below the threshold, also those in other rows' columns.
    small = rows.masked_fill(outliers(rows, threshold, per_batch=False), 0.0)
    codes, row_absmax = quantize_rows(small)
    codes = codes.masked_fill(apart, 0)
    product = codes.double() @ weight.double().T  # whole numbers below 2^53: exact
    out = product * torch.outer(row_absmax.double(), absmax.double()) / 127**2
    if apart.any():
        dequantized = weight.float() * (absmax / 127)[:, None]
        out = out + rows.masked_fill(~apart, 0.0).double() @ dequantized.double().T
    if bias is not None:
        out = out + bias.double()
    return out.to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])
