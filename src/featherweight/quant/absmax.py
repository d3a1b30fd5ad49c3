"""Absmax quantisation: divide by the largest magnitude, round to integers.

With b bits the codes are −q … q, q = 2^(b−1) − 1 (127 for 8 bits), zero is exact, and

    code = round(x · q / absmax)        x ≈ code · absmax / q

The error of a value is at most half a step, absmax / 2q. One large value makes the step large for
all that share its absmax: therefore one absmax a row or column (vector-wise) or a block.
"""

from __future__ import annotations

import torch

from featherweight.errors import UnsupportedError

# Below this, 127 / absmax nears the end of float32; such values are as good as zero.
TINY = 1e-35


def quantize_absmax(
    x: torch.Tensor, dim: int | None = None, bits: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8, the shape of x) and absmax (f32).

    `dim` is what the absmax is taken over, as in `torch.amax`: None, the whole tensor, absmax [];
    1, one for each row of [M, K], absmax [M]; 0, one for each column, absmax [K].
    Raises UnsupportedError for bits outside 2 … 8, and for NaN and infinity.
    """
    q = largest_code(bits)
    refuse_nonfinite(x)
    x = x.float()
    absmax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.where(absmax >= TINY, q / absmax, 0.0)  # nothing but zeros: codes of zero
    codes = torch.round(x * scale).to(torch.int8)  # round() takes halves to the even neighbour
    return codes, absmax if dim is None else absmax.squeeze(dim)


def dequantize_absmax(
    codes: torch.Tensor, absmax: torch.Tensor, dim: int | None = None, bits: int = 8
) -> torch.Tensor:
    """What the codes stand for, f32; `dim` and `bits` as they were for `quantize_absmax`."""
    if dim is not None:
        absmax = absmax.unsqueeze(dim)
    return codes.float() * (absmax / largest_code(bits))


def vectorwise_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [M, K] times b [K, N] through 8-bit integers: f32 [M, N].

    One absmax for each row of a and each column of b, so that the sum over K has integers alone,
    and the outer product of the absmax values scales the result (LLM.int8(), arXiv 2208.07339).
    """
    a_codes, a_absmax = quantize_absmax(a, dim=1)
    b_codes, b_absmax = quantize_absmax(b, dim=0)
    product = a_codes.double() @ b_codes.double()  # whole numbers below 2^53: exact
    scales = torch.outer(a_absmax, b_absmax).double() / 127**2
    return (product * scales).float()


def largest_code(bits: int) -> int:
    """q = 2^(bits−1) − 1."""
    if not 2 <= bits <= 8:
        raise UnsupportedError(f"bits={bits}", hint="int8 holds codes of 2 to 8 bits")
    return 2 ** (bits - 1) - 1


def refuse_nonfinite(x: torch.Tensor) -> None:
    """Raise UnsupportedError if x has NaN or infinity, which no code stands for."""
    if not x.isfinite().all():
        raise UnsupportedError(
            f"a tensor of shape {tuple(x.shape)} has NaN or infinity, which no code stands for",
            hint="leave it out of the quantisation, or mend the checkpoint",
        )
