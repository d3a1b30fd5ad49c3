"""`eager`: attention written out in torch operations; memory quadratic in length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from featherweight.techniques.attention import Attention


@dataclass(frozen=True)
class Eager(Attention):
    """The plain reference; the only one that can return attention weights."""

    implementation: ClassVar[str] = "eager"


TECHNIQUE = Eager
