"""`checkpointing`: keep the inputs of layers for backward, and compute the rest again.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), as transformers
has it: one checkpoint a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from featherweight.errors import UnsupportedError
from featherweight.techniques.base import Technique

if TYPE_CHECKING:
    from featherweight.ledger import Ledger


@dataclass(frozen=True)
class Checkpointing(Technique):
    """Less memory for activations while training, for one more forward pass; else no change."""

    slot: ClassVar[str] = "activations"
    tolerance: ClassVar[float] = 0.0

    def check(self, model: Any) -> None:
        """The model's layers can be checkpointed, and are not yet."""
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise UnsupportedError(
                f"the layers of a {type(model).__name__} cannot be checkpointed",
                hint="leave 'checkpointing' out",
            )

    def apply(self, model: Any, ledger: Ledger) -> None:
        """Let transformers switch it on; it works in training mode alone."""
        if checkpoints(model):
            ledger.receipt.record(type(model).__name__, "kept", "already checkpointed")
            return
        modules = [*model.modules()]
        before = [dict(vars(module)) for module in modules]
        _method(model, "enable")()
        for module, was in zip(modules, before, strict=True):
            _remember(module, was, ledger)
        ledger.receipt.record(type(model).__name__, "changed", "layers are checkpointed")


def checkpoints(model: Any) -> bool:
    """Whether any layer of a model is checkpointed."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _remember(module: Any, was: dict[str, Any], ledger: Ledger) -> None:
    """How to take back the attributes that a module has gained, or whose values have changed."""
    now = vars(module)
    changed = {name for name, value in now.items() if name not in was or was[name] is not value}

    def back() -> None:
        for name in changed:
            if name in was:
                vars(module)[name] = was[name]
            else:
                vars(module).pop(name, None)

    if changed:
        ledger.remember(back)


def _method(model: Any, what: str) -> Any:
    """`activation_checkpointing_enable`, which transformers before 5.2x call by another name."""
    new = getattr(model, f"activation_checkpointing_{what}", None)
    return new or getattr(model, f"gradient_checkpointing_{what}")


TECHNIQUE = Checkpointing
