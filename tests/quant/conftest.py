"""bitsandbytes as the measure, and tensors that are hard to quantise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from featherweight.quant.codebooks import FP4, NF4


@pytest.fixture(scope="session")
def bnb() -> Any:
    """`bitsandbytes.functional`: its kernels for the CPU say what the bytes have to be."""
    return pytest.importorskip(
        "bitsandbytes.functional", reason="compares with bitsandbytes, an optional extra"
    )


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Random numbers of N(0, scale²), the same at every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.fixture(name="normal", scope="session")
def normal_fixture() -> Callable[..., torch.Tensor]:
    """`normal(*shape, seed=0, scale=1)`: the same random numbers at every run."""
    return normal


def zero_rows() -> torch.Tensor:
    x = normal(6, 512)
    x[[0, 3, 5]] = 0  # the last one, too
    return x


def one_huge() -> torch.Tensor:
    x = normal(8, 512)
    x[3, 77] = -60_000.0  # float16 holds it
    return x


def denormals() -> torch.Tensor:
    """Rows from 1e-37 downwards: their absmax is too small to divide 1 by."""
    rows = [normal(256, seed=i) * 10.0**-power for i, power in enumerate(range(37, 46))]
    return torch.stack(rows)


def midpoints() -> torch.Tensor:
    """Halfway between neighbours of each codebook, and the floats next to that, absmax 1."""
    values = []
    for code in (NF4, FP4):
        levels = code.sort().values
        middle = (levels[:-1] + levels[1:]) / 2
        up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
        values += [middle, middle.nextafter(up), middle.nextafter(down)]
    row = torch.cat([torch.tensor([1.0]), *values])
    return torch.cat([row, torch.zeros(-row.numel() % 32)]).repeat(40)


HARD: dict[str, Callable[[], torch.Tensor]] = {
    "normal": lambda: normal(48, 256),
    "weights": lambda: normal(64, 192, scale=0.02),
    "heavy tails": lambda: normal(32, 256) ** 5,
    "zeros": lambda: torch.zeros(8, 512),
    "zero rows": zero_rows,
    "one huge": one_huge,
    "near the end of float32": lambda: normal(4, 512) * 1e36,
    "denormals": denormals,
    "midpoints": midpoints,
    "constant": lambda: torch.full((4, 160), -0.3),
    "minus zero": lambda: torch.where(normal(4, 160) > 0, -0.0, 1.0),
    "one value": lambda: torch.tensor([-0.7]),
    "odd": lambda: normal(7, 33),
    "a zero tail": lambda: torch.cat([normal(4096), torch.zeros(5)]),
    "a tail": lambda: normal(3, 4099),
}


@pytest.fixture(params=HARD)
def hard(request: pytest.FixtureRequest) -> torch.Tensor:
    """Each of the tensors that are hard to quantise, f32."""
    return HARD[request.param]()
