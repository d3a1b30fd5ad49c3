"""The values that codes stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featherweight.errors import UnsupportedError
from featherweight.quant.codebooks import DYNAMIC, FP4, INT4, NF4, codebook, int8_table


@pytest.mark.parametrize(("name", "code"), [("nf4", NF4), ("fp4", FP4)])
def test_the_codebooks_are_bitsandbytes(name: str, code: torch.Tensor, bnb: Any):
    assert torch.equal(code, bnb.get_4bit_type(name, device="cpu"))


def test_the_dynamic_map_is_bitsandbytes(bnb: Any):
    assert torch.equal(DYNAMIC, bnb.create_dynamic_map())


def test_the_dynamic_map_is_finest_at_zero_and_has_no_minus_one():
    assert DYNAMIC.dtype is torch.float32
    assert DYNAMIC.numel() == DYNAMIC.unique().numel() == 256
    assert (DYNAMIC.diff() > 0).all()
    assert DYNAMIC[127] == 0
    assert DYNAMIC[255] == 1
    assert DYNAMIC[0] == -DYNAMIC[254]
    assert DYNAMIC[128].item() == pytest.approx(0.55e-6)


def test_nf4_lies_at_quantiles_of_the_normal_distribution():
    """Eight from 0 upwards and eight downwards, evenly spaced in probability (QLoRA)."""
    tail = (1 / 32 + 1 / 30) / 2  # what is cut off at each end
    normal = torch.distributions.Normal(0.0, 1.0)
    upwards = normal.icdf(torch.linspace(1 - tail, 0.5, 9, dtype=torch.float64)[:-1])
    downwards = -normal.icdf(torch.linspace(1 - tail, 0.5, 8, dtype=torch.float64)[:-1])
    expected = torch.cat([downwards, torch.zeros(1), upwards.flip(0)]) / upwards.max()
    torch.testing.assert_close(NF4.double(), expected.double(), rtol=0, atol=3e-7)


def test_fp4_is_a_sign_and_three_bits():
    twelfths = [0, 1 / 16, 8, 12, 4, 6, 2, 3]
    torch.testing.assert_close(FP4[:8] * 12, torch.tensor(twelfths))
    assert torch.equal(FP4[8:], -FP4[:8])
    assert not FP4.signbit()[8]


def test_int4_is_the_integers_from_minus_seven_to_seven():
    torch.testing.assert_close(INT4[:15] * 7, torch.arange(-7.0, 8))


def test_a_codebook_is_a_copy():
    codebook("nf4")[0] = 5
    assert NF4[0] == codebook("nf4")[0] == -1


def test_an_unknown_codebook_is_refused():
    with pytest.raises(UnsupportedError, match="no codebook 'nf5'; choose one of nf4, fp4, int4"):
        codebook("nf5")


@pytest.mark.parametrize(
    ("name", "table", "largest"),
    [
        ("nf4", [-112, -78, -59, -44, -32, -21, -10, 0, 9, 18, 28, 38, 49, 63, 81, 112], 112),
        ("fp4", [0, 1, 80, 120, 40, 60, 20, 30, 0, -1, -80, -120, -40, -60, -20, -30], 120),
        # All of 70, 77 … 126 are exact: the largest.
        ("int4", [*range(-126, 127, 18), 126], 126),
    ],
)
def test_the_integer_table_of_a_codebook(name: str, table: list[int], largest: int):
    found, step = int8_table(codebook(name))
    assert found.dtype is torch.int8
    assert found.tolist() == table
    assert step == pytest.approx(1 / largest, rel=1e-15)


@given(st.lists(st.floats(-1, 1, width=32), min_size=16, max_size=16).filter(any))
def test_no_other_step_has_a_smaller_error(values: list[float]):
    code = torch.tensor(values)
    table, step = int8_table(code)
    assert table.abs().max() <= 127
    largest = code.double().abs().max()
    assert 63.99 < largest / step < 127.01
    error = (table.double() * step - code.double()).square().sum()
    for q in range(64, 128):
        other = torch.round(code.double() / largest * q) * largest / q
        assert error <= (other - code.double()).square().sum() + 1e-9
