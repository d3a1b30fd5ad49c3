"""`lora`: low-rank adapters beside linear layers (arXiv 2106.09685), made and trained with PEFT.

On quantised layers this is QLoRA (arXiv 2305.14314): `nf4:double+lora:r=8`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from featherweight.errors import MissingExtraError, RecipeError, UnsupportedError
from featherweight.nn.frozen import FrozenLinear
from featherweight.techniques.base import Technique, option
from featherweight.techniques.cast import DTYPES
from featherweight.techniques.linears import is_linear, refuse_meta
from featherweight.techniques.saving import save_as_it_is

if TYPE_CHECKING:
    from featherweight.ledger import Ledger

ADAPTER = "default"  # PEFT's name for the only adapter


@dataclass(frozen=True)
class Lora(Technique):
    """Train two thin matrices a layer, and nothing else: W x + B(A x) · alpha / r."""

    slot: ClassVar[str] = "adapter"
    tolerance: ClassVar[float] = 0.0  # B starts at zero
    extra: ClassVar[str] = "peft"

    r: int = option(8, help="rank: rows of A and columns of B")
    alpha: int = option(16, help="what the adapters give is scaled by alpha / r")
    dropout: float = option(0.0, help="share of the adapters' inputs that training leaves out")
    target: tuple[str, ...] = option(
        (), help="last parts of names, such as q_proj (default: all linear layers but the head)"
    )
    dtype: str = option("fp32", choices=tuple(DTYPES), help="dtype of the adapters")
    rslora: bool = option(False, help="scale by alpha / √r instead (arXiv 2312.03732)")

    def __post_init__(self) -> None:
        for name in ("r", "alpha"):
            if getattr(self, name) < 1:
                raise RecipeError(
                    f"'lora:{name}' is {getattr(self, name)}",
                    hint="give a whole number from 1 upwards",
                )
        if not (math.isfinite(self.dropout) and 0 <= self.dropout < 1):
            raise RecipeError(f"'lora:dropout' is {self.dropout}", hint="give 0 or a share below 1")

    def check(self, model: Any) -> None:
        """PEFT is there, no adapter is yet, and every target is a linear layer in memory."""
        try:
            import peft  # noqa: F401
        except ImportError:
            raise MissingExtraError("peft", "peft", "'lora'") from None
        if getattr(model, "peft_config", None):
            raise UnsupportedError(
                f"the {type(model).__name__} has adapters already: {', '.join(model.peft_config)}",
                hint="undo them, or delete_adapter() them, first",
            )
        for target in self.target:
            found = [n for n, _ in model.named_modules() if _is_called(n, target)]
            other = next((n for n in found if not _adaptable(model.get_submodule(n))), None)
            if other is not None:
                raise UnsupportedError(
                    f"'{other}' ({type(model.get_submodule(other)).__name__}) is no linear layer",
                    hint=f"linear layers here: {', '.join(_kinds(model)) or 'none'}",
                )
            if not found:
                raise UnsupportedError(
                    f"{type(model).__name__} has no layer '{target}'",
                    hint=f"linear layers here: {', '.join(_kinds(model)) or 'none'}",
                )
        if not self.target and not _kinds(model):
            raise UnsupportedError(
                f"{type(model).__name__} has no linear layer", hint="leave 'lora' out"
            )
        for name, module in model.named_modules():
            if _adaptable(module) and any(_is_called(name, t) for t in self.target or [name]):
                refuse_meta(name, module.weight)

    def apply(self, model: Any, ledger: Ledger) -> None:
        """Let PEFT put the adapters in; only they are trained."""
        from peft import inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        before = dict(model.named_modules())
        _remember(model, ledger)
        inject_adapter_in_model(self.config(model), model, ADAPTER)
        if hasattr(model, "_hf_peft_config_loaded"):  # of transformers, whose Trainer looks at it
            ledger.set(model, "_hf_peft_config_loaded", True)
            save_as_it_is(model)
        for name, layer in model.named_modules():
            if isinstance(layer, BaseTunerLayer):
                self._finish(name, layer, before[name], ledger)
        trained = [p for p in model.parameters() if p.requires_grad]
        ledger.receipt.actual["trainable parameters"] = f"{sum(p.numel() for p in trained):,}"

    def config(self, model: Any) -> Any:
        """The LoraConfig that says the same."""
        from peft import LoraConfig

        return LoraConfig(
            base_model_name_or_path=getattr(model, "name_or_path", None),
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=list(self.target) or "all-linear",
            use_rslora=self.rslora,
        )

    def _finish(self, name: str, layer: Any, base: nn.Module, ledger: Ledger) -> None:
        """Dtype and mode of a new layer, and its line."""
        layer.train(base.training)
        adapters = [p for n, p in layer.named_parameters() if n.startswith("lora_")]
        for parameter in adapters:
            parameter.data = parameter.data.to(DTYPES[self.dtype])
        ledger.receipt.record(
            name,
            "changed",
            f"{type(base).__name__} + LoRA of rank {self.r}",
            before=0,
            after=sum(p.nbytes for p in adapters),
        )


def _remember(model: Any, ledger: Ledger) -> None:
    """How to take back all that PEFT changes: modules in their places, flags, and its configs."""
    children = [(module, dict(module._modules)) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def back() -> None:
        for module, before in children:
            module._modules.update(before)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        vars(model).pop("peft_config", None)

    ledger.remember(back)


def _is_called(name: str, target: str) -> bool:
    """As PEFT reads target_modules: the whole name or its last parts."""
    return name == target or name.endswith("." + target)


def _adaptable(module: nn.Module) -> bool:
    return is_linear(module) or isinstance(module, FrozenLinear)


def _kinds(model: nn.Module) -> list[str]:
    """Last parts of the names of linear layers, each once."""
    names = (name for name, module in model.named_modules() if _adaptable(module))
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names if name))


TECHNIQUE = Lora
