"""`fp16`: weights and arithmetic in float16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from featherweight.machine import Machine
from featherweight.techniques.half import Half


@dataclass(frozen=True)
class Fp16(Half):
    """Two bytes a weight; more digits than bf16, values end at 65,504."""

    dtype: ClassVar[torch.dtype] = torch.float16
    tolerance: ClassVar[float] = 0.01

    def notes(self, machine: Machine, device: str) -> list[str]:
        """Why it is slow, where it is."""
        if device != "cpu" or machine.has_fast_fp16 or self.compute:
            return []
        return ["this processor has no float16 arithmetic: torch converts at every step"]


TECHNIQUE = Fp16
