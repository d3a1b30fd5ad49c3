"""What a technique is: a frozen dataclass of options that can be checked on a model and applied.

One technique is one file of this package; the file's name, `_` read as `-`, is the technique's
name in a recipe. Files that define no `TECHNIQUE` hold what several techniques share.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import nn

    from featherweight.ledger import Ledger
    from featherweight.machine import Machine


@dataclass(frozen=True)
class Technique:
    """One named change to a loaded model. Subclasses add options as dataclass fields.

    Options may be `bool` (a bare word in a recipe), `int`, `float`, `str` or `tuple[str, ...]`;
    `option(choices=…)` restricts them.
    """

    # What it decides, one technique a slot: "dtype", "attention", "weights", "adapter",
    # "activations", "forward".
    slot: ClassVar[str]
    tolerance: ClassVar[float]  # of `verify`: largest allowed relative RMS difference of outputs
    extra: ClassVar[str | None] = None  # the optional dependency it needs, if any

    def check(self, model: nn.Module) -> None:
        """Raise `UnsupportedError` if the model cannot have this technique; change nothing."""

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Change the model through the ledger, which can put everything back."""
        raise NotImplementedError

    def trial(self, model: nn.Module) -> AbstractContextManager[None]:
        """Goes around a forward pass that must leave the changed model as it is."""
        return nullcontext()

    def notes(self, machine: Machine, device: str) -> list[str]:
        """What explains this technique's figures on this machine; a line each."""
        return []


def configs(model: nn.Module, attribute: str) -> list[Any]:
    """The configs of a model and of its submodels that have the attribute, each once."""
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [config for config in found.values() if hasattr(config, attribute)]


def option(default: Any, *, choices: tuple[Any, ...] | None = None, help: str = "") -> Any:
    """A dataclass field for a technique's option, with the values it may take."""
    return field(default=default, metadata={"choices": choices, "help": help})
