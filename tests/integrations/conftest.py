"""Models whose linear layers are ours, made without recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from featherweight.nn import FourBitLinear, HalfLinear, Int8Linear
from featherweight.techniques.linears import is_linear, weight_of

KINDS: dict[str, Callable[..., nn.Module]] = {
    "nf4": lambda w, b: FourBitLinear.from_weight(w, b, quant_type="nf4", double=True),
    "exact": lambda w, b: FourBitLinear.from_weight(w, b, quant_type="nf4", exact=True),
    "int8": Int8Linear.from_weight,
    "half": HalfLinear.from_weight,
}


def lighten(model: Any, kind: str) -> Any:
    """Every linear layer but the output head as a layer of this kind, in place."""
    for name, module in list(model.named_modules()):
        if is_linear(module) and not name.endswith("lm_head"):
            new = KINDS[kind](weight_of(module), module.bias)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
    model.is_loaded_in_8bit = True  # as transformers' quantisers say it to PEFT
    return model


@pytest.fixture(name="lighten", scope="session")
def lighten_fixture() -> Callable[[Any, str], Any]:
    """`lighten(model, kind)`: nf4 (nested absmax), exact (nf4, float activations), int8, half."""
    return lighten


@pytest.fixture(scope="session")
def stir() -> Callable[[Any], None]:
    """`stir(model)`: adapters of random numbers, so that they change what the model says."""

    @torch.no_grad()
    def fill(model: Any, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                values = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.copy_(values.to(parameter.dtype))

    return fill
