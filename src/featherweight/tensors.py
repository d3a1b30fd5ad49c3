"""What a model or a cache holds in memory: every tensor, each piece of memory counted once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from featherweight.residency import Mappings

# What configs call their number of experts.
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def held_tensors(root: Any) -> Iterator[torch.Tensor]:
    """Every tensor reachable from a module, cache or container.

    Parameters and buffers are not all: quantised layers keep scales in attributes of parameters
    (`weight.quant_state.absmax`) or in state objects (`layer.state.SCB`).
    """
    seen: set[int] = set()
    stack = [root]
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            yield value
            stack.extend(vars(value).values())
        elif isinstance(value, dict):
            stack.extend(value.values())
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
        elif isinstance(value, nn.Module) or _may_hold_tensors(value):
            stack.extend(vars(value).values())


def _may_hold_tensors(value: Any) -> bool:
    """Whether to look inside: plain state objects, not code, configs or library machinery."""
    kind = type(value)
    home = kind.__module__
    if not hasattr(value, "__dict__") or isinstance(value, type) or callable(value):
        return False
    return not home.startswith(("builtins", "torch.", "types")) and "config" not in home


@dataclass(frozen=True)
class Held:
    """Bytes of memory held, and those of them that are views of a memory-mapped file."""

    total: int
    mapped: int


def held(root: Any) -> Held:
    """Bytes of all tensors of a module or cache: each storage once, so tied weights once."""
    mappings = Mappings()
    pieces = _pieces(root)
    return Held(
        total=sum(_nbytes(tensor) for tensor in pieces),
        mapped=sum(_nbytes(tensor) for tensor in pieces if mappings.file_of(tensor)),
    )


def held_bytes(root: Any) -> int:
    """`held(root).total`, without looking up the mapped files."""
    return sum(_nbytes(tensor) for tensor in _pieces(root))


def decoded_bytes(model: Any) -> int | None:
    """Least bytes of weights that a decoder reads for one token: all but an untied input embedding.

    None where it depends on the token: models that choose among experts.
    """
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in EXPERTS):
        return None
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tied = outputs is None or inputs.weight.data_ptr() == outputs.weight.data_ptr()
    return held_bytes(model) - (0 if tied else held_bytes(inputs))


def _pieces(root: Any) -> Collection[torch.Tensor]:
    """One tensor for each storage."""
    found: dict[tuple[str, int], torch.Tensor] = {}
    for tensor in held_tensors(root):
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.device.type != "meta":
            found[str(storage.device), storage.data_ptr()] = tensor
    return found.values()


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
