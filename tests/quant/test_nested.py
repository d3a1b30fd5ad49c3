"""Double quantisation: absmax values in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featherweight.errors import UnsupportedError
from featherweight.quant.blockwise import quantize_4bit, scales
from featherweight.quant.codebooks import DYNAMIC, NF4
from featherweight.quant.nested import Nested, nest


def assert_bitsandbytes(bnb: Any, absmax: torch.Tensor) -> None:
    """Codes and their absmax as bitsandbytes has them after it took the mean away."""
    offset = absmax.mean()
    codes, state = bnb.quantize_blockwise(absmax - offset, blocksize=256)
    found = nest(absmax)
    assert torch.equal(found.codes, codes)
    assert torch.equal(found.absmax, state.absmax)
    assert found.offset == offset.item()
    assert torch.equal(found.values(), bnb.dequantize_blockwise(codes, state) + offset)


def ramp() -> torch.Tensor:
    """Every float in steps finer than the 65536 bins, over −1 … 1 about a mean of 1."""
    return torch.linspace(0, 2, 400_000)


def at_the_ends_of_bins() -> torch.Tensor:
    """A bin and a half to each side of each midpoint, in steps of 1/128 bin.

    Each value has its negative beside it, and each block −1 and 1: so the mean is 1, and a block's
    largest distance from it 1.
    """
    midpoints = (DYNAMIC[:-1] + DYNAMIC[1:]) / 2
    x = (midpoints[:, None] + torch.arange(-192, 193) / 128 * 2 / 65535).reshape(-1)
    x = x[: x.numel() // 127 * 127].reshape(-1, 127)
    ones = torch.ones(x.shape[0], 1)
    return 1 + torch.cat([x, -x, ones, -ones], 1).reshape(-1)


HARD: dict[str, Callable[[], torch.Tensor]] = {
    "one": lambda: torch.tensor([3.0]),
    "all the same": lambda: torch.full((300,), 0.1),
    "zeros": lambda: torch.zeros(513),
    "a ramp": ramp,
    "a fine ramp": lambda: ramp() * 1e-3 + 1,
    "at the ends of bins": at_the_ends_of_bins,
    "a block that is the mean": lambda: torch.cat([torch.ones(256), torch.tensor([0.5, 1.5])]),
    "one huge": lambda: torch.cat([torch.rand(600), torch.tensor([1e30])]),
    "denormals": lambda: torch.arange(700.0) * 1e-42,
    "on the codes": lambda: DYNAMIC + 1,
    "between the codes": lambda: torch.cat([(DYNAMIC[:-1] + DYNAMIC[1:]) / 2, torch.ones(1)]) + 1,
}


@pytest.mark.parametrize("name", HARD)
def test_hard_values_have_the_bytes_of_bitsandbytes(name: str, bnb: Any):
    assert_bitsandbytes(bnb, HARD[name]())


@given(
    st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=600),
    st.sampled_from([1, 1e-3, 3]),
)
def test_any_values_have_the_bytes_of_bitsandbytes(bnb: Any, values: list[float], scale: float):
    assert_bitsandbytes(bnb, torch.tensor(values) * scale)


@given(st.integers(1, 2000), st.floats(0, 1), st.integers(0, 10_000))
def test_any_number_of_blocks_has_the_bytes_of_bitsandbytes(
    bnb: Any, count: int, spread: float, seed: int
):
    random = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    assert_bitsandbytes(bnb, 1 + spread * random)


def test_values_come_back_within_the_gaps_of_the_map(normal: Any):
    absmax = normal(4096, 64).abs().amax(1)
    nested = nest(absmax)
    assert (nested.codes.dtype, nested.codes.numel()) == (torch.uint8, 4096)
    assert nested.absmax.numel() == 16
    assert nested.offset == pytest.approx(absmax.mean().item())
    largest = (absmax - nested.offset).reshape(16, 256).abs().amax(1)
    assert torch.equal(nested.absmax, largest)
    # The widest gap of the map is 0.9 / 64; a bin is 2 / 65535.
    bound = largest * (0.9 / 128 + 1 / 65535) * 1.001
    assert ((nested.values() - absmax).reshape(16, 256).abs() <= bound[:, None]).all()


def test_the_cost_falls_from_a_half_to_an_eighth_of_a_bit(normal: Any):
    q = quantize_4bit(normal(1024, 1024), NF4, 64, double=True)
    assert isinstance(q.absmax, Nested)
    bits = 8 * (q.absmax.codes.nbytes + q.absmax.absmax.nbytes) / q.codes.numel() / 2
    assert bits == pytest.approx(0.127, abs=5e-4)


def test_zero_about_the_mean_has_no_code_of_its_own():
    """The bins of bitsandbytes' CPU kernel are wider than the map's gaps there."""
    nested = nest(torch.tensor([0.0, 1.0, 2.0]))
    assert nested.codes.tolist() == [0, 131, 255]
    assert nested.values()[1].item() == pytest.approx(1 + 2.125e-5, abs=1e-7)


def test_nesting_costs_little_signal(normal: Any):
    x = normal(512, 512)
    single, double = (quantize_4bit(x, NF4, 64, double) for double in (False, True))
    assert torch.equal(single.codes, double.codes)
    relative = (scales(double.absmax) / single.absmax - 1).abs()
    assert relative.max() < 0.02
    assert relative.mean() > 1e-4  # it is not free


def test_values_too_large_for_a_mean_are_refused():
    with pytest.raises(UnsupportedError, match="quantise without double"):
        nest(torch.full((4,), 3e38))


def test_what_belongs_to_it_is_its_own():
    nested = nest(torch.ones(3))
    nested.code.zero_()
    assert DYNAMIC[255] == 1
