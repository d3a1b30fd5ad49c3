"""What the bitsandbytes techniques share: swapping linear layers for bitsandbytes' own.

Stock bitsandbytes under its own name: its modules, its kernels, its choice of what to leave alone
(as `from_pretrained(quantization_config=BitsAndBytesConfig(…))` makes it), on a loaded model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from featherweight.errors import MissingExtraError, UnsupportedError
from featherweight.techniques.base import Technique, option
from featherweight.techniques.skip import skipped
from featherweight.tensors import held

if TYPE_CHECKING:
    from featherweight.ledger import Ledger
    from featherweight.machine import Machine


@dataclass(frozen=True)
class Bnb(Technique):
    """Linear layers (and GPT-2's Conv1D) as quantised bitsandbytes layers."""

    slot: ClassVar[str] = "weights"
    extra: ClassVar[str] = "bitsandbytes"

    skip: tuple[str, ...] = option((), help="modules to leave alone besides those always left")

    def config(self, skip_modules: list[str]) -> Any:
        """The BitsAndBytesConfig that says the same."""
        raise NotImplementedError

    def convert(self, linear: nn.Module, weight: torch.Tensor) -> nn.Module:
        """The quantised layer for a weight [out_features, in_features]."""
        raise NotImplementedError

    def refuse(self, name: str, weight: torch.Tensor) -> None:
        """Raise UnsupportedError if bitsandbytes would fail on this weight."""

    def check(self, model: nn.Module) -> None:
        """bitsandbytes is there, something can be converted, and it would run."""
        try:
            import bitsandbytes  # noqa: F401
        except ImportError:
            raise MissingExtraError("bitsandbytes", "bitsandbytes", "this technique") from None
        if getattr(model, "is_quantized", False):
            raise UnsupportedError(
                f"the {type(model).__name__} is quantised already"
                f" ({getattr(model, 'quantization_method', 'unknown method')})",
                hint="load it without a quantisation",
            )
        chosen = list(self._chosen(model))
        if not chosen:
            raise UnsupportedError(
                f"{type(model).__name__} has no linear layer that bitsandbytes would convert"
                + (f" (skip={','.join(self.skip)})" if self.skip else ""),
                hint="shorten skip=, or leave the technique out",
            )
        for name, module in chosen:
            self.refuse(name, _weight(module))

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Convert layer by layer, so that at most one is held twice."""
        chosen = dict(self._chosen(model))
        asked = skipped(model, self.skip)
        converted: dict[nn.Module, nn.Module] = {}  # a layer may stand in several places
        for name, module in list(model.named_modules(remove_duplicate=False)):
            if name not in chosen:
                if _is_linear(module):
                    why = "skip=" if name in asked else "bitsandbytes always leaves it"
                    ledger.receipt.record(name, "skipped", type(module).__name__, why=why)
                continue
            before = held(module).total
            if module not in converted:
                converted[module] = self._convert(module)
            new = converted[module]
            what = f"{type(module).__name__} → {type(new).__name__}"
            ledger.replace_module(name, new)
            after = held(new).total
            ledger.receipt.record(name, "changed", what, before=before, after=after)
        for name, parameter in model.named_parameters():
            if parameter.ndim == 3:
                ledger.receipt.record(
                    name, "skipped", "3-D expert weights", why="bitsandbytes has no layer for them"
                )
        self._tell_transformers(model, ledger)

    def _convert(self, module: nn.Module) -> Any:
        new: Any = self.convert(module, _weight(module))
        new.train(module.training)
        new.source_cls = type(module)  # transformers looks for it
        return new

    def _chosen(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        asked = skipped(model, self.skip)
        left = _left_by_bitsandbytes(model)
        for name, module in model.named_modules(remove_duplicate=False):
            if name and _is_linear(module) and name not in asked and name not in left:
                yield name, module

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


def _is_linear(module: Any) -> bool:
    from transformers.pytorch_utils import Conv1D

    return type(module) is nn.Linear or isinstance(module, Conv1D)


def _weight(module: Any) -> torch.Tensor:
    """[out_features, in_features], also of GPT-2's transposed Conv1D."""
    weight: torch.Tensor = module.weight.data
    return weight if isinstance(module, nn.Linear) else weight.T


def _left_by_bitsandbytes(model: Any) -> set[str]:
    """What transformers never lets bitsandbytes convert: output head, tied, kept in fp32."""
    if not hasattr(model, "get_output_embeddings"):
        return set()
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    keys = HfQuantizer.get_modules_to_not_convert(
        model, None, list(model._keep_in_fp32_modules or ())
    )
    names = (name for name, _ in model.named_modules(remove_duplicate=False))
    return {name for name in names if not should_convert_module(name, keys)}


def bias_of(module: Any) -> nn.Parameter | None:
    """A copy: bitsandbytes casts a layer's bias in place at its first call."""
    if module.bias is None:
        return None
    return nn.Parameter(module.bias.detach().clone(), requires_grad=False)
