"""What the attention techniques share: switching a transformers model's attention, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from featherweight.errors import UnsupportedError
from featherweight.techniques.base import Technique, configs

if TYPE_CHECKING:
    from featherweight.ledger import Ledger


@dataclass(frozen=True)
class Attention(Technique):
    """Run every attention layer of the model through one implementation."""

    slot: ClassVar[str] = "attention"
    tolerance: ClassVar[float] = 1e-3
    implementation: ClassVar[str]  # the name transformers knows it by

    def check(self, model: Any) -> None:
        """Refuse models whose attention cannot be chosen, or cannot be this one."""
        if not hasattr(model, "set_attn_implementation"):
            raise UnsupportedError(
                f"the attention of a {type(model).__name__} cannot be set",
                hint="attention techniques need a transformers model",
            )
        if not model._can_set_attn_implementation():
            raise UnsupportedError(
                f"{type(model).__name__} does not go through transformers' attention interface",
                hint=f"it keeps '{model.config._attn_implementation}'; leave the technique out",
            )

    def apply(self, model: Any, ledger: Ledger) -> None:
        """Set the implementation on the model and its submodels, and see that it took."""
        set_implementation(model, self.implementation, ledger)
        ledger.receipt.actual["attention"] = self.implementation


def set_implementation(model: Any, name: str, ledger: Ledger) -> None:
    """Switch to the implementation that transformers knows by `name`; UnsupportedError if it won't.

    `set_attn_implementation` only logs what it leaves as it was, so the result is read back.
    """
    parts = configs(model, "_attn_implementation_internal")
    before = [(config, config._attn_implementation_internal) for config in parts]

    def back() -> None:
        for config, implementation in before:
            config._attn_implementation_internal = implementation

    ledger.remember(back)
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        back()
        raise UnsupportedError(
            f"{type(model).__name__} cannot use '{name}' attention: {_first_sentence(error)}",
            hint="leave the technique out or choose another attention",
        ) from None
    left = {c._attn_implementation for c in parts if c._attn_implementation != name}
    if left:
        back()
        raise UnsupportedError(
            f"a part of {type(model).__name__} keeps '{', '.join(map(str, left))}' attention",
            hint="leave the technique out",
        )
    for config, implementation in before:
        ledger.receipt.record(
            type(config).__name__,
            "kept" if implementation == name else "changed",
            f"already {name}" if implementation == name else f"{implementation} → {name}",
        )


def _first_sentence(error: Exception) -> str:
    return str(error).strip().split(". ")[0].splitlines()[0]
