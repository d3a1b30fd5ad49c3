"""What the quantisers share: which linear layers they convert, and converting them one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from featherweight.errors import UnsupportedError
from featherweight.techniques.base import Technique, option
from featherweight.techniques.replace import places, replace
from featherweight.techniques.skip import skipped

if TYPE_CHECKING:
    from featherweight.ledger import Ledger


@dataclass(frozen=True)
class Linears(Technique):
    """Linear layers (and GPT-2's Conv1D) as quantised layers."""

    slot: ClassVar[str] = "weights"
    by: ClassVar[str]  # whose layers: "bitsandbytes"

    skip: tuple[str, ...] = option((), help="modules to leave alone besides those always left")

    def convert(self, linear: nn.Module, weight: torch.Tensor) -> nn.Module:
        """The quantised layer for a weight [out_features, in_features]."""
        raise NotImplementedError

    def convert_named(self, name: str, linear: nn.Module) -> nn.Module:
        """`convert` for the layer of this name."""
        return self.convert(linear, weight_of(linear))

    def left(self, model: nn.Module) -> dict[str, str]:
        """Names of the linear layers that are left alone whatever `skip` says, and why."""
        raise NotImplementedError

    def refuse(self, name: str, weight: torch.Tensor) -> None:
        """Raise UnsupportedError if this weight cannot be quantised."""

    def remark(self, new: nn.Module) -> str | None:
        """What the receipt should say of a converted layer."""
        return None

    def check(self, model: nn.Module) -> None:
        """Not quantised yet, and something can be converted."""
        before = quantised(model)
        if before:
            raise UnsupportedError(
                f"the {type(model).__name__} is quantised already ({before})",
                hint="load it without a quantisation, or undo that first",
            )
        for name in self.chosen(model):
            self.refuse(name, weight_of(model.get_submodule(name)))

    def chosen(self, model: nn.Module) -> list[str]:
        """Names of the layers that are converted; raises UnsupportedError if there is none."""
        reasons = self._reasons(model)
        chosen = [names[0] for names in places(model, is_linear) if not _first(names, reasons)]
        if not chosen:
            raise UnsupportedError(
                f"{type(model).__name__} has no linear layer that {self.by} would convert"
                + (f" (skip={','.join(self.skip)})" if self.skip else ""),
                hint=self.hint_if_none(model),
            )
        return chosen

    def hint_if_none(self, model: nn.Module) -> str:
        """What to do when there is nothing to convert."""
        return "shorten skip=, or leave the technique out"

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Convert layer by layer, so that at most one is held twice."""
        self.convert_all(model, ledger)

    def convert_all(self, model: nn.Module, ledger: Ledger, aside: str | None = None) -> None:
        """Convert the linear layers; say nothing of the one that is set aside."""
        reasons = self._reasons(model)
        for names in places(model, is_linear):
            if aside in names:
                continue
            why = _first(names, reasons)
            module = model.get_submodule(names[0])
            if why:
                ledger.receipt.record(names[0], "skipped", type(module).__name__, why=why)
                continue
            new = self.convert_named(names[0], module)
            replace(model, names, new, ledger, why=self.remark(new))
        name_experts(model, ledger, f"{self.by} has no layer for them")

    def _reasons(self, model: nn.Module) -> dict[str, str]:
        """Why a linear layer is not converted, by name."""
        return self.left(model) | dict.fromkeys(skipped(model, self.skip), "skip=")


def _first(names: list[str], reasons: dict[str, str]) -> str | None:
    """A layer that is left at one of its places is left at all."""
    return next((reasons[name] for name in names if name in reasons), None)


def is_linear(module: Any) -> bool:
    """A plain `nn.Linear` (subclasses may do more), or GPT-2's Conv1D."""
    from transformers.pytorch_utils import Conv1D

    return type(module) is nn.Linear or isinstance(module, Conv1D)


def weight_of(module: Any) -> torch.Tensor:
    """[out_features, in_features], also of GPT-2's transposed Conv1D; of an embedding [V, K]."""
    weight: torch.Tensor = module.weight.data
    return weight if isinstance(module, nn.Linear | nn.Embedding) else weight.T


def always_left(model: Any) -> set[str]:
    """What transformers never lets a quantiser convert: output head, tied, kept in fp32."""
    if not hasattr(model, "get_output_embeddings"):
        return set()
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    keys = HfQuantizer.get_modules_to_not_convert(
        model, None, list(model._keep_in_fp32_modules or ())
    )
    names = (name for name, _ in model.named_modules(remove_duplicate=False))
    return {name for name in names if not should_convert_module(name, keys)}


def quantised(model: Any) -> str | None:
    """How the model is quantised already, if it is."""
    from featherweight.nn.quantised import QuantisedLinear

    if getattr(model, "is_quantized", False):
        return str(getattr(model, "quantization_method", "unknown method"))
    kinds = {type(m).__name__ for m in model.modules() if isinstance(m, QuantisedLinear)}
    return ", ".join(sorted(kinds)) or None


def refuse_meta(name: str, weight: torch.Tensor) -> None:
    """Raise UnsupportedError for a weight without data, as of a module offloaded by accelerate."""
    if weight.is_meta:
        raise UnsupportedError(
            f"'{name}' is on the meta device: its weight is not in memory",
            hint="load the model without offloading",
        )


def name_experts(model: nn.Module, ledger: Ledger, why: str) -> None:
    """A line for every 3-D parameter, in which a mixture of experts keeps most of its weights.

    Not for those of convolutions, nor for what only looks so: positions [1, S, D].
    """
    for prefix, module in model.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and len(parameter) > 1:
                name, size = f"{prefix}.{key}".lstrip("."), parameter.nbytes
                what = "3-D expert weights"
                ledger.receipt.record(name, "skipped", what, why=why, before=size, after=size)
