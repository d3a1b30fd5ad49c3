"""What `nf4` and `fp4` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from featherweight.nn import FourBitLinear
from featherweight.quant.blockwise import BLOCKSIZES
from featherweight.techniques.base import option
from featherweight.techniques.quantiser import Quantiser


@dataclass(frozen=True)
class FourBit(Quantiser):
    """4-bit codes with one absmax a block."""

    tolerance: ClassVar[float] = 0.9
    quant_type: ClassVar[str]

    double: bool = option(False, help="quantise the absmax values too")
    blocksize: int = option(64, choices=BLOCKSIZES, help="weights that share one absmax")
    exact: bool = option(False, help="multiply float activations, not activations in 8 bits")

    def convert(self, linear: Any, weight: torch.Tensor) -> FourBitLinear:
        """A FourBitLinear."""
        return FourBitLinear.from_weight(
            weight,
            linear.bias,
            quant_type=self.quant_type,
            blocksize=self.blocksize,
            double=self.double,
            exact=self.exact,
        )

    def remark(self, new: Any) -> str | None:
        """Which layers are computed another way than was asked for."""
        if self.exact or new.in_features % 32 == 0:
            return None
        return "exact: 32 does not divide its in_features"
