"""`bnb-fp4`: stock bitsandbytes 4-bit, floating-point codebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from featherweight.techniques.bnb_4bit import Bnb4bit


@dataclass(frozen=True)
class BnbFp4(Bnb4bit):
    """Sixteen levels with sign, exponent and mantissa bits."""

    quant_type: ClassVar[str] = "fp4"


TECHNIQUE = BnbFp4
