"""What an op refuses before C sees a pointer, and what it says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from featherweight import native
from featherweight.errors import NativeError
from featherweight.quant.codebooks import FP4

STATUS = native.status()
pytestmark = pytest.mark.skipif(not STATUS.available, reason=STATUS.error or "")
OPS = torch.ops.featherweight

X = torch.ones(2, 64)
I8, ABSMAX = torch.ones(3, 64, dtype=torch.int8), torch.ones(3)
HALF = torch.ones(3, 64, dtype=torch.float16)


def refused(message: str, op: Any, *args: Any) -> None:
    with pytest.raises(NativeError, match=f"^{re.escape(message)}$"):
        op(*args)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, 63), "activations are [2, 63]; the last dimension must be 64"),
        (torch.ones(()), "activations are []; the last dimension must be 64"),
        (
            torch.ones(2, 64, dtype=torch.float64),
            "the dtype is torch.float64; allowed: float32, bfloat16, float16",
        ),
        (
            torch.ones(2, 64, dtype=torch.int32),
            "the dtype is torch.int32; allowed: float32, bfloat16, float16",
        ),
    ],
    ids=["width", "scalar", "double", "integer"],
)
def test_activations(x: torch.Tensor, message: str, four_bit: Any, arguments: Any) -> None:
    refused(message, OPS.linear_int8, x, I8, ABSMAX, None, 0.0, False)
    refused(message, OPS.linear_half, x, HALF, None)
    if x.ndim and x.shape[-1] == 64:  # the width of a 4-bit weight is that of x
        weight = arguments(four_bit(torch.ones(3, 64)))
        refused(message, OPS.linear_4bit, x, *weight, 3, None, False)


@pytest.mark.parametrize(
    ("grad", "message"),
    [
        (torch.ones(2, 4), "activations are [2, 4]; the last dimension must be 3"),
        (
            torch.ones(2, 3, dtype=torch.float64),
            "the dtype is torch.float64; allowed: float32, bfloat16, float16",
        ),
    ],
    ids=["width", "double"],
)
def test_gradients(grad: torch.Tensor, message: str) -> None:
    refused(message, OPS.linear_int8_backward, grad, I8, ABSMAX)
    refused(message, OPS.linear_half_backward, grad, HALF)


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (torch.ones(4), "torch.float32 [4] given; float32 [3] wanted"),
        (torch.ones(2, dtype=torch.float16), "torch.float32 [2] given; float32 [3] wanted"),
    ],
    ids=["long", "short"],
)
def test_bias(bias: torch.Tensor, message: str, four_bit: Any, arguments: Any) -> None:
    refused(message, OPS.linear_int8, X, I8, ABSMAX, bias, 0.0, False)
    refused(message, OPS.linear_half, X, HALF, bias)
    weight = arguments(four_bit(torch.ones(3, 64)))
    refused(message, OPS.linear_4bit, X, *weight, 3, bias, False)


STRIDED = "a tensor [3, 64] is strided; weights must be contiguous"


@pytest.mark.parametrize(
    ("weight", "absmax", "message"),
    [
        (I8.float(), ABSMAX, "weight is torch.float32, not int8"),
        (I8.view(torch.uint8), ABSMAX, "weight is torch.uint8, not int8"),
        (I8[0], ABSMAX, "weight has shape [64]; a matrix [N, K] is wanted"),
        (I8.T.contiguous().T, ABSMAX, STRIDED),
        (I8, ABSMAX[:2], "torch.float32 [2] given; float32 [3] wanted"),
        (I8, ABSMAX.half(), "torch.float16 [3] given; float32 [3] wanted"),
        (
            I8,
            torch.ones(6)[::2],
            "a tensor [3] is strided; weights must be contiguous",
        ),
    ],
    ids=["float", "unsigned", "rank", "strided", "few-scales", "half-scales", "strided-scales"],
)
def test_int8_weights(weight: torch.Tensor, absmax: torch.Tensor, message: str) -> None:
    refused(message, OPS.linear_int8, X, weight, absmax, None, 0.0, False)
    refused(message, OPS.linear_int8_backward, torch.ones(2, 3), weight, absmax)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (HALF.double(), "the dtype is torch.float64; allowed: float32, bfloat16, float16"),
        (HALF[None], "weight has shape [1, 3, 64]; a matrix [N, K] is wanted"),
        (HALF.T.contiguous().T, STRIDED),
    ],
    ids=["double", "rank", "strided"],
)
def test_float_weights(weight: torch.Tensor, message: str) -> None:
    refused(message, OPS.linear_half, X, weight, None)
    refused(message, OPS.linear_half_backward, torch.ones(2, 3), weight)


BLOCKSIZES = "it is a power of two from 32 upwards"
NAMES = ["codes", "absmax", "nested_absmax", "nested_code", "nested_offset", "code", "blocksize"]


NOT_4BIT = {  # what is changed, and what that leads to
    "odd-blocksize": ({"blocksize": 63}, f"blocksize is 63; {BLOCKSIZES}"),
    "small-blocksize": ({"blocksize": 16}, f"blocksize is 16; {BLOCKSIZES}"),
    "no-blocksize": ({"blocksize": 0}, f"blocksize is 0; {BLOCKSIZES}"),
    "negative-blocksize": ({"blocksize": -64}, f"blocksize is -64; {BLOCKSIZES}"),
    "other-blocksize": ({"blocksize": 32}, "torch.float32 [3] given; float32 [6] wanted"),
    "few-codes": ({"codes": 95}, "codes are torch.uint8 [95]; [3, 64] takes uint8 [96]"),
    "signed-codes": ({"codes": "int8"}, "codes are torch.int8 [96]; [3, 64] takes uint8 [96]"),
    "few-scales": ({"absmax": 2}, "torch.float32 [2] given; float32 [3] wanted"),
    "integer-scales": ({"absmax": "uint8"}, "torch.uint8 [3] given; float32 [3] wanted"),
    "short-codebook": ({"code": 15}, "torch.float32 [15] given; float32 [16] wanted"),
    "double-codebook": ({"code": "float64"}, "torch.float64 [16] given; float32 [16] wanted"),
}
NOT_NESTED = {
    "float-scales": ({"absmax": "float32"}, "nested absmax is torch.float32 [3], not uint8 [3]"),
    "few-scales": ({"absmax": 2}, "nested absmax is torch.uint8 [2], not uint8 [3]"),
    "few-outer": ({"nested_absmax": 0}, "torch.float32 [0] given; float32 [1] wanted"),
    "short-map": ({"nested_code": 255}, "torch.float32 [255] given; float32 [256] wanted"),
    "no-outer": ({"nested_absmax": None}, "torch.uint8 [3] given; float32 [3] wanted"),
    "no-map": ({"nested_code": None}, "torch.uint8 [3] given; float32 [3] wanted"),
}


@pytest.mark.parametrize(("changes", "message"), NOT_4BIT.values(), ids=NOT_4BIT)
def test_4bit_weights(changes: dict[str, Any], message: str, four_bit: Any, arguments: Any) -> None:
    check_4bit(arguments(four_bit(torch.ones(3, 64))), changes, message)


@pytest.mark.parametrize(("changes", "message"), NOT_NESTED.values(), ids=NOT_NESTED)
def test_nested_absmax(
    changes: dict[str, Any], message: str, four_bit: Any, arguments: Any
) -> None:
    check_4bit(arguments(four_bit(torch.ones(3, 64), double=True)), changes, message)


def check_4bit(arguments: tuple[Any, ...], changes: dict[str, Any], message: str) -> None:
    """A change is a number of elements to keep, a dtype, or another value."""
    weight = dict(zip(NAMES, arguments, strict=True))
    for name, change in changes.items():
        if name == "blocksize" or change is None:
            weight[name] = change
        elif isinstance(change, int):
            weight[name] = weight[name][:change]
        else:
            weight[name] = weight[name].to(getattr(torch, change))
    args = tuple(weight.values())
    refused(message, OPS.linear_4bit, X, *args, 3, None, False)
    refused(message, OPS.linear_4bit, X, *args, 3, None, True)
    refused(message, OPS.linear_4bit_backward, torch.ones(2, 3), *args, 64)
    refused(message, OPS.dequantize_4bit, *args, [3, 64], torch.float32)


def test_strided_4bit_weights(four_bit: Any, arguments: Any) -> None:
    codes, absmax, *rest = arguments(four_bit(torch.ones(3, 64)))
    message = "a tensor [{}] is strided; weights must be contiguous"
    spread = torch.ones(192, dtype=torch.uint8)[::2]
    refused(message.format(96), OPS.linear_4bit, X, spread, absmax, *rest, 3, None, False)
    args = (X, codes, torch.ones(6)[::2], *rest, 3, None, False)
    refused(message.format(3), OPS.linear_4bit, *args)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8], ids=str)
def test_dtypes_that_are_not_quantised(dtype: torch.dtype) -> None:
    message = f"the dtype is {dtype}; allowed: float32, bfloat16, float16"
    weight = torch.ones(3, 64).to(dtype)
    refused(message, OPS.quantize_int8, weight)
    refused(message, OPS.quantize_4bit, weight, FP4, 64)


def test_shapes_that_are_not_quantised() -> None:
    refused("weight has shape [64]; a matrix [N, K] is wanted", OPS.quantize_int8, torch.ones(64))


@pytest.mark.parametrize("blocksize", [0, -64, 16, 63, 96, 8192])
def test_blocksizes_that_are_not_offered(blocksize: int) -> None:
    with pytest.raises(NativeError, match=f"blocksize is {blocksize}"):
        OPS.quantize_4bit(torch.ones(3, 64), FP4, blocksize)


@pytest.mark.parametrize(
    "code",
    [FP4[:15], FP4.double(), FP4.half(), torch.ones(17)],
    ids=lambda c: f"{c.dtype}-{len(c)}",
)
def test_codebooks_that_are_none(code: torch.Tensor) -> None:
    with pytest.raises(NativeError, match=r"float32 \[16\] wanted"):
        OPS.quantize_4bit(torch.ones(3, 64), code, 64)
