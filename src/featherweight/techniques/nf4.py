"""`nf4`: 4-bit weights, NormalFloat codebook (arXiv 2305.14314), our own layers and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from featherweight.techniques.four_bit import FourBit


@dataclass(frozen=True)
class Nf4(FourBit):
    """Sixteen levels of equal probability under a normal distribution."""

    quant_type: ClassVar[str] = "nf4"


TECHNIQUE = Nf4
