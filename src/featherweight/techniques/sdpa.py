"""`sdpa`: torch's scaled_dot_product_attention, which picks a kernel by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from featherweight.techniques.attention import Attention


@dataclass(frozen=True)
class Sdpa(Attention):
    """What transformers uses by default. Which kernel runs is torch's choice at each call."""

    implementation: ClassVar[str] = "sdpa"


TECHNIQUE = Sdpa
