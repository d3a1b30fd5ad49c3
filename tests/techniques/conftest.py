"""The layers of a model, before and after a technique of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from featherweight.nn import FourBitLinear, HalfLinear, Int8Linear
from featherweight.techniques.linears import is_linear


@pytest.fixture(scope="session")
def linears() -> Callable[[nn.Module], dict[str, Any]]:
    """`linears(model)`: the layers that could be converted, by name."""
    return lambda model: {name: m for name, m in model.named_modules() if is_linear(m)}


@pytest.fixture(scope="session")
def light() -> Callable[[nn.Module], dict[str, Any]]:
    """`light(model)`: the converted layers, by name."""
    kinds = (Int8Linear, FourBitLinear, HalfLinear)
    return lambda model: {name: m for name, m in model.named_modules() if isinstance(m, kinds)}
