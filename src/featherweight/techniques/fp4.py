"""`fp4`: 4-bit weights, floating-point codebook, our own layers and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from featherweight.techniques.four_bit import FourBit


@dataclass(frozen=True)
class Fp4(FourBit):
    """Sixteen levels with sign, exponent and mantissa bits."""

    quant_type: ClassVar[str] = "fp4"


TECHNIQUE = Fp4
