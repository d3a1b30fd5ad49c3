"""What the bitsandbytes techniques share: swapping linear layers for bitsandbytes' own.

Stock bitsandbytes under its own name: its modules, its kernels, its choice of what to leave alone
(as `from_pretrained(quantization_config=BitsAndBytesConfig(…))` makes it), on a loaded model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from featherweight.errors import MissingExtraError
from featherweight.integrations.bitsandbytes import enabled
from featherweight.techniques.kernel import kernel
from featherweight.techniques.linears import Linears, always_left, refuse_meta

if TYPE_CHECKING:
    from featherweight.ledger import Ledger
    from featherweight.machine import Machine


@dataclass(frozen=True)
class Bnb(Linears):
    """Linear layers (and GPT-2's Conv1D) as quantised bitsandbytes layers."""

    by: ClassVar[str] = "bitsandbytes"
    extra: ClassVar[str] = "bitsandbytes"

    def config(self, skip_modules: list[str]) -> Any:
        """The BitsAndBytesConfig that says the same."""
        raise NotImplementedError

    def left(self, model: nn.Module) -> dict[str, str]:
        """What transformers keeps from bitsandbytes."""
        return dict.fromkeys(always_left(model), "bitsandbytes always leaves it")

    def check(self, model: nn.Module) -> None:
        """bitsandbytes is there, something can be converted, and it would run."""
        try:
            import bitsandbytes  # noqa: F401
        except ImportError:
            raise MissingExtraError("bitsandbytes", "bitsandbytes", "this technique") from None
        super().check(model)

    def refuse(self, name: str, weight: torch.Tensor) -> None:
        """Weights that are not there."""
        refuse_meta(name, weight)

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Convert layer by layer, and tell transformers."""
        super().apply(model, ledger)
        if enabled():
            runs = f"{kernel(model)}: Featherweight's backend of bitsandbytes is on"
            ledger.receipt.actual["bitsandbytes' products"] = runs
        self._tell_transformers(model, ledger)

    def _tell_transformers(self, model: Any, ledger: Ledger) -> None:
        """Make saving, PEFT and Trainer treat the model as one loaded with bitsandbytes."""
        if not hasattr(model, "get_output_embeddings"):
            return
        from transformers.quantizers import AutoHfQuantizer

        left = [c.module for c in ledger.receipt.changes if c.action == "skipped"]
        config = self.config(left)
        quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
        bits = "4bit" if config.load_in_4bit else "8bit"
        ledger.set(model, "hf_quantizer", quantizer)
        ledger.set(model, "is_quantized", True)
        ledger.set(model, "quantization_method", config.quant_method)
        ledger.set(model, f"is_loaded_in_{bits}", True)
        ledger.set(model.config, "quantization_config", config)

    def notes(self, machine: Machine, device: str) -> list[str]:
        """What makes stock bitsandbytes slow on a CPU."""
        raise NotImplementedError


def bias_of(module: Any) -> nn.Parameter | None:
    """A copy: bitsandbytes casts a layer's bias in place at its first call."""
    if module.bias is None:
        return None
    return nn.Parameter(module.bias.detach().clone(), requires_grad=False)
