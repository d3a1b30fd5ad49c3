"""What `int8`, `nf4` and `fp4` share: the output head, and the dtype of what is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from featherweight.errors import RecipeError, UnsupportedError
from featherweight.nn import HalfLinear, Int8Embedding, Int8Linear
from featherweight.techniques.base import option
from featherweight.techniques.cast import DTYPES, cast, short
from featherweight.techniques.kernel import kernel
from featherweight.techniques.linears import Linears, always_left, is_linear, refuse_meta, weight_of
from featherweight.techniques.replace import replace
from featherweight.techniques.saving import save_as_it_is, tell_transformers
from featherweight.techniques.skip import skipped
from featherweight.techniques.tied import Group, groups, is_embedding

if TYPE_CHECKING:
    from featherweight.ledger import Ledger


@dataclass(frozen=True)
class Quantiser(Linears):
    """Linear layers as our own quantised layers."""

    by: ClassVar[str] = "Featherweight"

    head: str | None = option(
        None, choices=("int8",), help="quantise the output head too, and what it is tied to"
    )
    rest: str | None = option(
        None, choices=tuple(DTYPES), help="dtype of what is not quantised (default: as it was)"
    )

    def head_layer(self, linear: Any) -> Int8Linear:
        """The quantised output head."""
        return Int8Linear.from_weight(weight_of(linear), linear.bias)

    def convert_named(self, name: str, linear: Any) -> nn.Module:
        """A refusal names the layer."""
        with named(name):
            return self.convert(linear, weight_of(linear))

    def left(self, model: nn.Module) -> dict[str, str]:
        """What transformers always leaves, and weights that are not of one layer alone."""
        head = _head_name(model)
        reasons = dict.fromkeys(always_left(model), "transformers always leaves it")
        for group in groups(model, is_linear):
            users = [names[0] for names in group.places] + group.others
            for names in group.places:
                others = [user for user in users if user != names[0]]
                if others:
                    reasons[names[0]] = f"its weight is also used by {', '.join(others)}"
        if head and self.head:
            for names in _head_group(model, head).places:
                for name in names:
                    reasons.pop(name, None)
        elif head:
            reasons[head] = "the output head; head=int8 quantises it"
        return reasons

    def check(self, model: nn.Module) -> None:
        """With `head`: there is one, and it can be quantised."""
        super().check(model)
        if self.head:
            self._check_head(model)

    def _check_head(self, model: nn.Module) -> None:
        head = _head_name(model)
        if head is None:
            raise UnsupportedError(
                f"{type(model).__name__} has no output head that is a plain linear layer",
                hint="leave 'head=int8' out",
            )
        group = _head_group(model, head)
        if group.others:
            raise UnsupportedError(
                f"the weight of '{head}' is also used by {', '.join(group.others)},"
                " which is no plain linear layer or embedding",
                hint="leave 'head=int8' out",
            )
        for names in group.places:
            refuse_meta(names[0], weight_of(model.get_submodule(names[0])))
        asked = skipped(model, self.skip)
        contrary = next((n for names in group.places for n in names if n in asked), None)
        if contrary:
            raise RecipeError(
                f"skip= leaves '{contrary}' alone and head=int8 quantises it",
                hint="keep one of them",
            )

    def refuse(self, name: str, weight: torch.Tensor) -> None:
        """Weights that are not there."""
        refuse_meta(name, weight)

    def hint_if_none(self, model: nn.Module) -> str:
        """Also where `compute=fp32` has replaced the linear layers."""
        if any(isinstance(module, HalfLinear) for module in model.modules()):
            return "quantise first: 'nf4+bf16:compute=fp32'"
        return super().hint_if_none(model)

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """The head first, while its ties can be seen; then layer by layer; then the rest."""
        self._quantise_head(model, ledger)
        self.convert_all(model, ledger)
        self.finish(model, ledger)

    def skeleton(self, model: nn.Module, ledger: Ledger) -> None:
        """Layer by layer on a model without weights, which are still to be loaded."""
        self.chosen(model)  # raises if there are none
        self.convert_all(model, ledger, aside=_head_name(model) if self.head else None)

    def after_loading(self, model: nn.Module, ledger: Ledger) -> None:
        """What `skeleton` has left: the head, once it has its weight and its ties, and the rest."""
        if self.head:
            self._check_head(model)
        self._quantise_head(model, ledger)
        self.finish(model, ledger)

    def finish(self, model: nn.Module, ledger: Ledger) -> None:
        """What is not quantised, and the account of what is."""
        if self.rest:
            cast(model, DTYPES[self.rest], ledger)
            ledger.receipt.actual["dtype"] = short(DTYPES[self.rest])
        ledger.receipt.actual["quantised products"] = kernel(model)
        save_as_it_is(model)
        tell_transformers(model, ledger)

    def _quantise_head(self, model: nn.Module, ledger: Ledger) -> None:
        """With `head`: it and the embeddings that are tied to it, all on the same codes."""
        head = _head_name(model)
        if not self.head or not head:
            return
        places = _head_group(model, head).places
        places.sort(key=lambda names: head not in names)  # the head has the line with the bytes
        codes: Int8Linear | None = None
        for names in places:
            module: Any = model.get_submodule(names[0])
            if codes is None:
                with named(names[0]):
                    codes = self.head_layer(module)
                replace(model, names, codes, ledger)
                continue
            new = self._sharing(codes, module)
            why = f"tied: the same codes as {head}"
            replace(model, names, new, ledger, why=why, counted=False)

    def _sharing(self, codes: Int8Linear, module: Any) -> nn.Module:
        """A layer of the module's kind on the codes of the head."""
        if is_linear(module):
            new: Any = Int8Linear.from_codes(
                codes.weight.data,
                codes.absmax,
                module.bias,
                threshold=codes.threshold,
                per_batch=codes.per_batch,
            )
        else:
            rows, columns = module.weight.shape
            dtype = module.weight.dtype
            new = Int8Embedding(rows, columns, module.padding_idx, dtype, device="meta")
        new.weight, new.absmax = codes.weight, codes.absmax
        return new


@contextmanager
def named(name: str) -> Iterator[None]:
    """Say of which layer a refusal inside the block is."""
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(
            f"'{name}' cannot be quantised: {error.message}", hint=f"add skip={name}"
        ) from None


def _head_name(model: Any) -> str | None:
    """The name of the output head that transformers knows, if it is a linear layer."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None or not is_linear(head):
        return None
    return next((name for name, module in model.named_modules() if module is head), None)


def _head_group(model: nn.Module, head: str) -> Group:
    """The head and what shares its weight."""
    found = groups(model, lambda module: is_linear(module) or is_embedding(module))
    return next(group for group in found if any(head in names for names in group.places))
