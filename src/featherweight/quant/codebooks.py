"""Codebooks: which real number each code stands for, on a scale where a block's largest is 1."""

from __future__ import annotations

import torch

from featherweight.errors import UnsupportedError

# 4-bit NormalFloat: quantiles of N(0, 1), eight of them from 0 upwards and eight downwards, so
# that zero is exact (QLoRA, arXiv 2305.14314, appendix E). Sorted; bitsandbytes' values.
NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)

# 4-bit float as bitsandbytes has it: a sign bit, then three bits in an order of their own (the
# code is the bit pattern, so the values are not sorted); twelfths, but for the smallest.
_FP4_POSITIVE = torch.tensor([0, 0.0625, 8, 12, 4, 6, 2, 3]) / 12
FP4 = torch.cat([_FP4_POSITIVE, -_FP4_POSITIVE])
FP4[8] = 0.0  # two codes for zero; neither is -0.0

# Symmetric 4-bit integers, for comparison: codes 0 … 14 are −7 … 7 sevenths. The last code
# repeats its neighbour and is never chosen.
INT4 = torch.tensor([*range(-7, 8), 7]) / 7

_CODEBOOKS = {"nf4": NF4, "fp4": FP4, "int4": INT4}


def codebook(name: str) -> torch.Tensor:
    """The codebook `nf4`, `fp4` or `int4`: f32 [16], a copy, indexed by code.

    Raises UnsupportedError for another name.
    """
    if name not in _CODEBOOKS:
        raise UnsupportedError(
            f"there is no codebook '{name}'", hint=f"choose one of {', '.join(_CODEBOOKS)}"
        )
    return _CODEBOOKS[name].clone()


def _dynamic() -> torch.Tensor:
    """The signed dynamic map: relative precision near 1, seven decades of range towards 0.

    Decade i from the top has 2^(6-i) values a sign, evenly spaced: the exponent is written in
    unary, and the bits that it leaves are the fraction (arXiv 1511.04561; bitsandbytes' 8-bit map).
    """
    values = [0.0, 1.0]  # 1 has no negative twin: there are 256 codes
    for exponent in range(-6, 1):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + 6) + 1)
        centres = (edges[:-1] + edges[1:]) / 2 * 10**exponent
        values += [*centres.tolist(), *(-centres).tolist()]
    return torch.tensor(sorted(values))


DYNAMIC = _dynamic()  # f32 [256], sorted


def int8_table(code: torch.Tensor) -> tuple[torch.Tensor, float]:
    """A codebook in integers: int8 [16] and a step, with `code` ≈ table · step.

    With it, integer instructions can multiply 4-bit weights. The step is max|code| / q for the q
    in 64 … 127 whose table has the least sum of squared errors; the largest q of equals.
    """
    exact = code.double()
    largest = exact.abs().max()
    best: tuple[float, torch.Tensor, float] | None = None
    for q in range(127, 63, -1):
        step = float(largest) / q
        table = torch.round(exact / step)
        error = float((table * step - exact).square().sum())
        if best is None or error < best[0] - 1e-12:  # less is the codebook's own rounding
            best = error, table, step
    assert best is not None
    return best[1].to(torch.int8), best[2]
