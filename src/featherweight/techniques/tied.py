"""Weights that several modules share: an output head tied to the input embedding, mostly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from featherweight.techniques.replace import places


@dataclass
class Group:
    """Modules that have one weight; most weights are of one module alone."""

    places: list[list[str]] = field(default_factory=list)  # all names of each module
    others: list[str] = field(default_factory=list)  # who else uses it, and is not wanted


def groups(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[Group]:
    """The wanted modules, together with those that share their `weight`, in the model's order."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            users.setdefault(id(parameter), []).append(name)
    found: dict[tuple[int, bool], Group] = {}
    for names in places(model, wanted):
        module = model.get_submodule(names[0])
        transposed = not isinstance(module, nn.Linear | nn.Embedding)  # Conv1D: not the same weight
        group = found.setdefault((id(module.weight), transposed), Group())
        group.places.append(names)
    for (weight, _), group in found.items():
        wanted_names = {names[0] for names in group.places}
        group.others = [name for name in users.get(weight, ()) if name not in wanted_names]
    return list(found.values())


def is_embedding(module: Any) -> bool:
    """A plain `nn.Embedding`: no subclass, which may scale, and no renormalising at each call."""
    return type(module) is nn.Embedding and module.max_norm is None
