"""A layer of each format, made from a weight."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from featherweight.nn import FourBitLinear, HalfLinear, Int8Linear

LINEARS: dict[str, Callable[..., Any]] = {
    "int8": partial(Int8Linear.from_weight, threshold=0.0),
    "int8-outliers": partial(Int8Linear.from_weight, threshold=2.0),
    "int8-per-batch": partial(Int8Linear.from_weight, threshold=2.0, per_batch=True),
    "nf4": partial(FourBitLinear.from_weight, quant_type="nf4"),
    "nf4-double": partial(FourBitLinear.from_weight, quant_type="nf4", double=True),
    "nf4-exact": partial(FourBitLinear.from_weight, quant_type="nf4", exact=True),
    "fp4-32": partial(FourBitLinear.from_weight, quant_type="fp4", blocksize=32),
    "bf16": partial(HalfLinear.from_weight, dtype=torch.bfloat16),
    "fp16": partial(HalfLinear.from_weight, dtype=torch.float16),
}
# Rounding activations to 8 bits is the largest difference from a layer of the same weights.
EXACT = {"nf4-exact", "bf16", "fp16"}


@pytest.fixture(params=LINEARS, scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    """Each format in turn."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def make(kind: str) -> Callable[..., Any]:
    """`make(weight, bias)`: a layer of the format."""
    return LINEARS[kind]


@pytest.fixture(scope="session")
def tolerance(kind: str) -> float:
    """Of the norm of the outputs, against the dequantised layer in float32."""
    return 1e-5 if kind in EXACT else 0.02


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """N(0, 1), always the same."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(name="numbers", scope="session")
def numbers_fixture() -> Callable[..., torch.Tensor]:
    """`numbers(*shape, seed=0)`."""
    return numbers
