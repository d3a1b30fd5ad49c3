"""`bnb-nf4`: stock bitsandbytes 4-bit, NormalFloat codebook (arXiv 2305.14314)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from featherweight.techniques.bnb_4bit import Bnb4bit


@dataclass(frozen=True)
class BnbNf4(Bnb4bit):
    """Sixteen levels of equal probability under a normal distribution."""

    quant_type: ClassVar[str] = "nf4"


TECHNIQUE = BnbNf4
