"""Keeping a changed model from being saved as what it no longer is."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from featherweight.errors import UnsupportedError

if TYPE_CHECKING:
    from featherweight.ledger import Ledger


def refuse_saving(model: nn.Module, ledger: Ledger) -> None:
    """Make `save_pretrained` raise until undo.

    transformers would write the codes under the names of weights, with nothing in the config to
    say so: a checkpoint that loads without complaint, or nearly, into a model of noise.
    """
    if hasattr(model, "save_pretrained"):
        # A function of a module, so that the model can still be copied and pickled.
        ledger.set(model, "save_pretrained", partial(_refuse, ledger.receipt.recipe))


def _refuse(recipe: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        f"a model with '{recipe}' in force cannot be saved as a checkpoint yet",
        hint="undo the recipe, save, and apply it again after loading",
    )
