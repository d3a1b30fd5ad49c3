"""What `bf16` and `fp16` share: `compute=fp32`, half storage with arithmetic in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from featherweight.errors import UnsupportedError
from featherweight.nn import HalfEmbedding, HalfLinear
from featherweight.techniques.base import option
from featherweight.techniques.cast import Cast, cast, short
from featherweight.techniques.kernel import kernel
from featherweight.techniques.linears import is_linear, name_experts, refuse_meta, weight_of
from featherweight.techniques.replace import places, replace
from featherweight.techniques.saving import save_as_it_is
from featherweight.techniques.tied import Group, groups, is_embedding

if TYPE_CHECKING:
    from featherweight.ledger import Ledger


@dataclass(frozen=True)
class Half(Cast):
    """Two bytes a weight."""

    compute: str | None = option(
        None,
        choices=("fp32",),
        help="halve the weights of linear layers and embeddings alone, and compute in float32",
    )

    def check(self, model: nn.Module) -> None:
        """With `compute=fp32`: there is something to halve."""
        if self.compute is None:
            super().check(model)
            return
        chosen = [names[0] for names in places(model, _can_be_halved)]
        for name in chosen:
            refuse_meta(name, weight_of(model.get_submodule(name)))
        if not chosen:
            raise UnsupportedError(
                f"{type(model).__name__} has no linear layer or embedding to keep in"
                f" {short(self.dtype)}",
                hint="leave 'compute=fp32' out",
            )

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """With `compute=fp32`: halve weight by weight, and see that the rest is in float32."""
        if self.compute is None:
            super().apply(model, ledger)
            return
        for group in groups(model, _can_be_halved):
            if group.others:
                why = f"its weight is also used by {', '.join(group.others)}"
                for names in group.places:
                    what = type(model.get_submodule(names[0])).__name__
                    ledger.receipt.record(names[0], "skipped", what, why=why)
            else:
                self._halve(model, group, ledger)
        name_experts(model, ledger, "compute=fp32 has no layer for them")
        cast(model, torch.float32, ledger)
        ledger.receipt.actual["dtype"] = f"float32, from weights in {short(self.dtype)}"
        ledger.receipt.actual[f"products with {short(self.dtype)} weights"] = kernel(model)
        save_as_it_is(model)

    def _halve(self, model: nn.Module, group: Group, ledger: Ledger) -> None:
        """Replace the modules of one weight by modules of one half weight."""
        shared: nn.Parameter | None = None
        for names in group.places:
            new = self._half_of(names[0], model.get_submodule(names[0]), shared)
            why = f"the same weight as {group.places[0][0]}" if shared is not None else None
            replace(model, names, new, ledger, why=why, counted=shared is None)
            shared = new.weight

    def _half_of(self, name: str, module: Any, weight: nn.Parameter | None) -> Any:
        """A module that computes with `weight`, or with the module's own, rounded."""
        original = weight_of(module) if weight is None else weight
        try:
            if is_linear(module):
                new: Any = HalfLinear.from_weight(original, module.bias, dtype=self.dtype)
            else:
                new = HalfEmbedding.from_weight(
                    original, module.padding_idx, weight_dtype=self.dtype
                )
        except UnsupportedError as error:
            raise UnsupportedError(
                f"'{name}.weight' cannot be kept in {short(self.dtype)}: {error.message}",
                hint="use 'bf16', which has float32's range, or mend the checkpoint",
            ) from None
        if weight is not None:
            new.weight = weight
        return new


def _can_be_halved(module: nn.Module) -> bool:
    return is_linear(module) or is_embedding(module)
