"""What `bnb-nf4` and `bnb-fp4` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from featherweight.errors import UnsupportedError
from featherweight.machine import Machine
from featherweight.techniques.base import option
from featherweight.techniques.bnb import Bnb, bias_of

if TYPE_CHECKING:
    from featherweight.ledger import Ledger

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Bnb4bit(Bnb):
    """4-bit codes with one absmax a block, computed in a float dtype."""

    tolerance: ClassVar[float] = 0.9
    quant_type: ClassVar[str]

    double: bool = option(False, help="quantise the absmax values too")
    compute: str | None = option(
        None, choices=tuple(DTYPES), help="dtype of the arithmetic; the model's own by default"
    )
    blocksize: int = option(64, choices=BLOCKSIZES, help="weights that share one absmax")

    def _compute_dtype(self, weight_dtype: torch.dtype) -> torch.dtype:
        return DTYPES[self.compute] if self.compute else weight_dtype

    def config(self, skip_modules: list[str], dtype: torch.dtype) -> Any:
        """As `BitsAndBytesConfig(load_in_4bit=True, …)`; the blocksize is kept per tensor."""
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.quant_type,
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=self._compute_dtype(dtype),
            llm_int8_skip_modules=skip_modules,
        )

    def refuse(self, name: str, weight: torch.Tensor) -> None:
        """bitsandbytes' packed CPU kernel asserts on shapes that it cannot tile."""
        from bitsandbytes.functional import has_avx512bf16

        out_features, in_features = weight.shape
        fits = out_features % 32 == 0 and in_features % max(2, self.blocksize) == 0
        if weight.device.type == "cpu" and has_avx512bf16() and not fits:
            raise UnsupportedError(
                f"'{name}' is [{out_features}, {in_features}]; on this processor bitsandbytes takes"
                f" only out_features divisible by 32 and in_features by {self.blocksize}",
                hint=f"add skip={name}, or choose a smaller blocksize",
            )

    def convert(self, linear: nn.Module, weight: torch.Tensor) -> nn.Module:
        """A Linear4bit; bitsandbytes quantises when the parameter is moved to its device."""
        import bitsandbytes as bnb

        out_features, in_features = weight.shape
        with torch.device("meta"):
            new = bnb.nn.Linear4bit(
                in_features,
                out_features,
                bias=False,
                compute_dtype=self._compute_dtype(weight.dtype),
                compress_statistics=self.double,
                quant_type=self.quant_type,
            )
        codes: Any = bnb.nn.Params4bit(
            weight,
            requires_grad=False,
            blocksize=self.blocksize,
            compress_statistics=self.double,
            quant_type=self.quant_type,
            module=new,
        )
        new.weight = codes.to(weight.device)
        new.register_parameter("bias", bias_of(linear))
        return new

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Convert, and say in what dtype bitsandbytes will really compute."""
        from bitsandbytes.functional import has_avx512bf16

        super().apply(model, ledger)
        weight = next(p for p in model.parameters() if p.is_floating_point())
        asked = str(self._compute_dtype(weight.dtype)).removeprefix("torch.")
        packed = weight.device.type == "cpu" and has_avx512bf16()
        actual = "bfloat16, all that its kernel for this processor has" if packed else asked
        ledger.receipt.actual[f"4-bit products asked for in {asked}"] = actual

    def notes(self, machine: Machine, device: str) -> list[str]:
        """What happens at each call on a CPU."""
        if device != "cpu":
            return []
        if "avx512_bf16" in machine.features:
            return [
                "on this processor bitsandbytes multiplies 4-bit weights in bf16 and keeps absmax"
                " in bf16, whatever is asked for"
            ]
        return ["bitsandbytes dequantises whole weights at each call on this processor"]
