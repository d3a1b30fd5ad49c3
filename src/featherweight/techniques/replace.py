"""Putting one layer in another's place, wherever it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from featherweight.tensors import held_bytes

if TYPE_CHECKING:
    from featherweight.ledger import Ledger

# Dictionaries that go over to the new layer as they are, so that a hook's handle removes it there.
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def places(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[list[str]]:
    """All names of each wanted module, in the model's order; not of the model itself.

    Names, not modules: a caller that holds no module lets each be freed when it is replaced.
    """
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name and wanted(module):
            found.setdefault(id(module), []).append(name)
    return list(found.values())


def replace(
    model: nn.Module,
    names: list[str],
    new: Any,
    ledger: Ledger,
    *,
    why: str | None = None,
    counted: bool = True,
) -> None:
    """Put `new` at all these names of one module; one line in the receipt.

    `counted=False` leaves the bytes out: another line has them.
    """
    old = model.get_submodule(names[0])
    new.train(old.training)
    for attribute in _HOOKS:
        vars(new)[attribute] = vars(old)[attribute]
    remarks = [why] if why else []
    if len(names) > 1:
        remarks.append(f"also at {', '.join(names[1:])}")
    if "forward" in vars(old):  # set by accelerate, or by hand
        remarks.append("its patched forward is not carried over")
    before = _size(old)
    for name in names:
        ledger.replace_module(name, new)
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, nn.TransformerEncoderLayer):
            # In evaluation it hands its layers' weights to one fused kernel, unless this is 0.
            ledger.set(parent, "activation_relu_or_gelu", 0)
    ledger.receipt.record(
        names[0],
        "changed",
        f"{type(old).__name__} → {type(new).__name__}",
        why="; ".join(remarks) or None,
        before=before if counted else None,
        after=_size(new) if counted else None,
    )


def _size(module: nn.Module) -> int:
    """Bytes of a layer; of an empty one on the meta device, those that it is going to have."""
    empty = (t for t in (*module.parameters(), *module.buffers()) if t.is_meta)
    return held_bytes(module) + sum(tensor.nbytes for tensor in empty)
