"""`bf16`: weights and arithmetic in bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from featherweight.machine import Machine
from featherweight.techniques.half import Half


@dataclass(frozen=True)
class Bf16(Half):
    """float32's range in two bytes; fast only where the processor multiplies bfloat16."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    tolerance: ClassVar[float] = 0.06

    def notes(self, machine: Machine, device: str) -> list[str]:
        """Why it is slow, where it is."""
        if device != "cpu" or machine.has_fast_bf16 or self.compute:
            return []
        return ["this processor has no bfloat16 arithmetic: torch converts at every step"]


TECHNIQUE = Bf16
