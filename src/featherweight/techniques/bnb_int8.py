"""`bnb-int8`: stock bitsandbytes LLM.int8() (arXiv 2208.07339)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from featherweight.machine import Machine
from featherweight.techniques.base import option
from featherweight.techniques.bnb import Bnb, bias_of
from featherweight.techniques.threshold import check_threshold


@dataclass(frozen=True)
class BnbInt8(Bnb):
    """int8 weights and activations, outlier columns in float.

    Outliers are found over the whole batch, so a row's result depends on its neighbours.
    """

    tolerance: ClassVar[float] = 0.5

    threshold: float = option(6.0, help="activations at least this large are outliers; 0: none")

    def __post_init__(self) -> None:
        check_threshold("bnb-int8", self.threshold)

    def config(self, skip_modules: list[str]) -> Any:
        """As `BitsAndBytesConfig(load_in_8bit=True)`."""
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_8bit=True,
            llm_int8_threshold=self.threshold,
            llm_int8_skip_modules=skip_modules,
        )

    def convert(self, linear: nn.Module, weight: torch.Tensor) -> nn.Module:
        """A Linear8bitLt; bitsandbytes quantises when the parameter is moved to its device."""
        import bitsandbytes as bnb

        out_features, in_features = weight.shape
        with torch.device("meta"):
            new: Any = bnb.nn.Linear8bitLt(
                in_features,
                out_features,
                bias=False,
                has_fp16_weights=False,
                threshold=self.threshold,
            )
        codes: Any = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
        new.weight = codes.to(weight.device)
        new.register_parameter("bias", bias_of(linear))
        new.source_cls = type(linear)  # transformers looks for it
        return new

    def notes(self, machine: Machine, device: str) -> list[str]:
        """What happens at each call on a CPU."""
        if device != "cpu":
            return []
        if "avx512f" in machine.features:
            return ["bitsandbytes rounds activations to fp16 and finds outliers at each call"]
        return ["bitsandbytes converts whole int8 weights to fp32 at each call on this processor"]


TECHNIQUE = BnbInt8
