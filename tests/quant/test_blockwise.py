"""Blockwise 4-bit quantisation: bytes, layout, error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from featherweight.errors import UnsupportedError
from featherweight.quant.blockwise import (
    BLOCKSIZES,
    DTYPES,
    dequantize_4bit,
    pack_nibbles,
    quantize_4bit,
    scales,
    unpack_nibbles,
)
from featherweight.quant.codebooks import FP4, INT4, NF4, codebook

NAMES = ("nf4", "fp4")


def assert_bitsandbytes(
    bnb: Any, x: torch.Tensor, name: str, blocksize: int, double: bool = False
) -> None:
    """Codes, absmax and all that belongs to nested absmax are bitsandbytes', byte for byte."""
    codes, state = bnb.quantize_4bit(
        x, blocksize=blocksize, quant_type=name, compress_statistics=double
    )
    found = quantize_4bit(x, codebook(name), blocksize, double)
    assert torch.equal(found.codes, codes.reshape(-1))
    if not double:
        assert found.absmax.dtype is torch.float32
        assert torch.equal(found.absmax, state.absmax)
        return
    assert torch.equal(found.absmax.codes, state.absmax)
    assert torch.equal(found.absmax.absmax, state.state2.absmax)
    assert torch.equal(found.absmax.code, state.state2.code)
    assert found.absmax.offset == state.offset.item()
    again = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset
    assert torch.equal(scales(found.absmax), again)


@pytest.mark.parametrize("double", [False, True], ids=["absmax", "nested"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_hard_tensors_have_the_bytes_of_bitsandbytes(
    hard: torch.Tensor, name: str, dtype: torch.dtype, double: bool, bnb: Any
):
    x = hard.clamp(-6e4, 6e4).to(dtype) if dtype is torch.float16 else hard.to(dtype)
    for blocksize in BLOCKSIZES:
        assert_bitsandbytes(bnb, x, name, blocksize, double)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.sampled_from(BLOCKSIZES),
    st.sampled_from(NAMES),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 10_000),
)
def test_any_shape_has_the_bytes_of_bitsandbytes(
    bnb: Any,
    shape: list[int],
    blocksize: int,
    name: str,
    dtype: torch.dtype,
    double: bool,
    seed: int,
):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert_bitsandbytes(bnb, x, name, blocksize, double)


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=200),
    st.sampled_from(NAMES),
    st.booleans(),
)
def test_any_values_have_the_bytes_of_bitsandbytes(
    bnb: Any, values: list[float], name: str, double: bool
):
    assert_bitsandbytes(bnb, torch.tensor(values), name, 32, double)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("double", [False, True], ids=["absmax", "nested"])
@pytest.mark.parametrize("blocksize", BLOCKSIZES[:6])  # beyond, bitsandbytes compiles
def test_what_bitsandbytes_reads_is_what_we_read(
    name: str, double: bool, blocksize: int, normal: Any, bnb: Any
):
    x = normal(48, 96)
    codes, state = bnb.quantize_4bit(
        x, blocksize=blocksize, quant_type=name, compress_statistics=double
    )
    # Flat: in 0.50, bitsandbytes' AVX-512 kernel starts a block anew at each row of 16·i values,
    # where its quantiser and its other kernels let blocks run across the ends of rows.
    state.shape = (x.numel(),)
    found = dequantize_4bit(quantize_4bit(x, codebook(name), blocksize, double))
    assert torch.equal(found.reshape(-1), bnb.dequantize_4bit(codes, state).reshape(-1))


@pytest.mark.parametrize(
    ("code", "decibels"),
    # int4 by theory: the mean square of the largest of 64 is 6.914, so the noise of steps of a
    # seventh of it is 6.914 / 49 / 12 · 63/64 (the largest itself has none).
    [(NF4, 20.74), (FP4, 18.29), (INT4, 19.365)],
    ids=["nf4", "fp4", "int4"],
)
def test_the_signal_to_noise_ratio_of_normal_numbers(
    code: torch.Tensor, decibels: float, normal: Any
):
    x = normal(1 << 20)
    noise = dequantize_4bit(quantize_4bit(x, code)) - x
    ratio = 10 * torch.log10(x.square().mean() / noise.square().mean())
    assert ratio.item() == pytest.approx(decibels, abs=0.05)


def test_the_first_value_is_in_the_high_nibble():
    x = torch.zeros(32)
    x[0], x[1], x[2] = 1.0, -1.0, 0.5
    q = quantize_4bit(x, NF4, 32)
    assert q.codes[:2].tolist() == [
        0xF0,
        0xC7,
    ]  # 0.5 is nearer to 0.44 (12) than to 0.56; zero is 7
    assert q.absmax.tolist() == [1.0]
    expected = torch.tensor([1.0, -1.0, NF4[12], 0.0])
    assert torch.equal(dequantize_4bit(q)[:4], expected)


def test_a_midpoint_goes_to_the_lower_entry():
    middle = (NF4[10] + NF4[11]) / 2
    above = middle.nextafter(torch.tensor(1.0))
    x = torch.cat([torch.stack([middle, above, -torch.tensor(1.0)]), torch.zeros(29)])
    assert quantize_4bit(x, NF4, 32).codes[0] == 10 << 4 | 11


def test_blocks_run_across_the_ends_of_rows():
    x = torch.ones(3, 24)
    x[1, 7] = 100.0  # element 31: the last of the first block
    x[2, 23] = 8.0  # in the third, of 8
    q = quantize_4bit(x, NF4, 32)
    assert q.absmax.tolist() == [100, 1, 8]
    assert q.codes.numel() == 36
    again = dequantize_4bit(q)
    assert again.shape == (3, 24)
    assert torch.equal(again[1, 8:], torch.ones(16))


def test_a_block_of_zeros_is_zeros_and_its_neighbours_keep_their_precision(normal: Any):
    x = normal(4, 64)
    x[2] = 0
    for code in (NF4, FP4, INT4):
        again = dequantize_4bit(quantize_4bit(x, code))
        assert torch.equal(again[2], torch.zeros(64))
        assert torch.equal(again[0], dequantize_4bit(quantize_4bit(x[0], code)))


def test_one_huge_value_spoils_its_block_alone(normal: Any):
    x = normal(8, 64)
    spoilt = x.clone()
    spoilt[3, 5] = 1e6
    before, after = (dequantize_4bit(quantize_4bit(t, NF4)) for t in (x, spoilt))
    others = torch.arange(8) != 3
    assert torch.equal(before[others], after[others])
    assert not after[3, :5].any()  # drowned
    assert after[3, 5] == 1e6


@given(
    st.integers(1, 300),
    st.sampled_from([32, 64, 128]),
    st.sampled_from(["nf4", "fp4", "int4"]),
    st.floats(-30, 30),
    st.integers(0, 10_000),
)
def test_no_value_is_off_by_more_than_half_the_widest_gap(
    count: int, blocksize: int, name: str, power: float, seed: int
):
    x = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 10**power
    code = codebook(name)
    q = quantize_4bit(x, code, blocksize)
    gap = code.sort().values.diff().max()
    largest = scales(q.absmax).repeat_interleave(blocksize)[:count]
    assert ((dequantize_4bit(q) - x).abs() <= largest * gap / 2 * 1.0001).all()


@given(st.permutations(range(16)), st.sampled_from(["nf4", "int4"]), st.integers(0, 10_000))
def test_the_order_of_a_codebook_is_free(order: list[int], name: str, seed: int):
    x = torch.randn(130, generator=torch.Generator().manual_seed(seed))
    code = codebook(name)
    shuffled = quantize_4bit(x, code[order], 64)
    assert torch.equal(shuffled.code, code[order])
    assert torch.equal(dequantize_4bit(shuffled), dequantize_4bit(quantize_4bit(x, code, 64)))


@given(st.lists(st.integers(0, 15), max_size=50), st.integers(0, 15))
def test_packing_and_unpacking_are_inverse(nibbles: list[int], fill: int):
    packed = pack_nibbles(torch.tensor(nibbles, dtype=torch.uint8), fill)
    assert packed.dtype is torch.uint8
    assert packed.numel() == (len(nibbles) + 1) // 2
    assert unpack_nibbles(packed, len(nibbles)).tolist() == nibbles
    if len(nibbles) % 2:
        assert packed[-1] & 15 == fill


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_the_original_and_of_the_answer(dtype: torch.dtype, normal: Any):
    x = normal(5, 64).to(dtype)
    q = quantize_4bit(x, NF4)
    assert (q.dtype, q.shape, q.blocksize) == (dtype, (5, 64), 64)
    exact = dequantize_4bit(q, torch.float32)
    assert dequantize_4bit(q).dtype is dtype
    assert torch.equal(dequantize_4bit(q), exact.to(dtype))
    assert torch.equal(
        exact, NF4[unpack_nibbles(q.codes, 320).long()].reshape(5, 64) * q.absmax[:, None]
    )


def test_an_empty_tensor_is_quantised_to_nothing():
    for double in (False, True):
        q = quantize_4bit(torch.zeros(0, 64), NF4, double=double)
        assert q.codes.numel() == scales(q.absmax).numel() == 0
        assert dequantize_4bit(q).shape == (0, 64)


def test_quantising_leaves_the_weight_and_the_codebook_alone(normal: Any):
    weight = torch.nn.Parameter(normal(4, 64))
    before = weight.detach().clone()
    q = quantize_4bit(weight, NF4)
    q.code.zero_()
    assert torch.equal(weight, before)
    assert NF4[0] == -1
    assert not q.absmax.requires_grad


@pytest.mark.parametrize("blocksize", [0, 16, 48, 8192])
def test_other_blocksizes_are_refused(blocksize: int):
    with pytest.raises(UnsupportedError, match=f"blocksize={blocksize}; choose one of 32, 64, 128"):
        quantize_4bit(torch.ones(64), NF4, blocksize)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused(value: float, dtype: torch.dtype):
    x = torch.ones(3, 64, dtype=dtype)
    x[1, 2] = value
    with pytest.raises(UnsupportedError, match=r"shape \(3, 64\) has NaN or infinity"):
        quantize_4bit(x, NF4)


def test_integers_and_doubles_are_refused():
    for dtype in (torch.int8, torch.float64):
        with pytest.raises(UnsupportedError, match=f"weights of {dtype}.*convert them to float32"):
            quantize_4bit(torch.ones(64, dtype=dtype), NF4)


@pytest.mark.parametrize(
    "code",
    [torch.ones(15), NF4 * 7, torch.full((16,), float("nan")), torch.zeros(16)],
    ids=["fifteen", "too large", "nan", "zeros"],
)
def test_what_is_no_codebook_is_refused(code: torch.Tensor):
    with pytest.raises(UnsupportedError, match="give sixteen values between -1 and 1"):
        quantize_4bit(torch.ones(64), code)
