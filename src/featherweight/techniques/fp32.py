"""`fp32`: weights and arithmetic in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from featherweight.techniques.cast import Cast


@dataclass(frozen=True)
class Fp32(Cast):
    """Exact for every checkpoint; four bytes a weight."""

    dtype: ClassVar[torch.dtype] = torch.float32
    tolerance: ClassVar[float] = 0.0


TECHNIQUE = Fp32
