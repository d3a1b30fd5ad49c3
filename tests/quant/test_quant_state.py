"""The JSON beside 4-bit codes: bitsandbytes' own bytes, and nothing else is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from featherweight.errors import ModelError
from featherweight.quant.quant_state import LONGEST, QuantState, find

STATE = QuantState("nf4", 64, torch.bfloat16, (64, 96), 0.015625)


def written(**changes: Any) -> torch.Tensor:
    """The JSON of `STATE` with other values; None takes a key out."""
    read = json.loads(bytes(STATE.to_tensor().tolist())) | changes
    text = json.dumps({key: value for key, value in read.items() if value is not None})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def test_the_text():
    assert bytes(STATE.to_tensor().tolist()).decode() == (
        '{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 96],'
        ' "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.015625}'
    )
    assert STATE.key == "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
def test_the_bytes_of_bitsandbytes(dtype: torch.dtype, quant_type: str, double: bool):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    _, theirs = functional.quantize_4bit(
        weight, blocksize=128, quant_type=quant_type, compress_statistics=double
    )
    offset = theirs.offset.item() if double else None
    mine = QuantState(quant_type, 128, dtype, (48, 64), offset)
    expected = theirs.as_dict(packed=True)[mine.key.removeprefix("weight.")]
    assert torch.equal(mine.to_tensor(), expected)
    assert QuantState.from_tensor(expected) == mine


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quant_type": "nf3"}, "its quant_type is 'nf3'; allowed: nf4, fp4"),
        ({"quant_type": None}, "its quant_type is None"),
        ({"blocksize": 63}, "its blocksize is 63; allowed: 32, 64"),
        ({"blocksize": True}, "its blocksize is True"),
        ({"blocksize": "64"}, "its blocksize is '64'"),
        ({"dtype": "float64"}, "its dtype is 'float64'; allowed: float32, bfloat16, float16"),
        ({"shape": [64]}, r"its shape is \[64\], not that of a matrix"),
        ({"shape": [64, -1]}, r"its shape is \[64, -1\]"),
        ({"shape": [64, 1 << 40]}, "its shape is"),
        ({"shape": [64, 9.5]}, "its shape is"),
        ({"nested_blocksize": 128}, "its nested_blocksize is 128; allowed: 256"),
        ({"nested_dtype": "float16"}, "its nested_dtype is 'float16'"),
        ({"nested_offset": None}, "its nested_offset is None, not a finite number"),
        ({"nested_offset": float("nan")}, "its nested_offset is nan, not a finite number"),
    ],
)
def test_what_no_weight_can_have(changes: dict[str, Any], says: str):
    with pytest.raises(ModelError, match=says):
        QuantState.from_tensor(written(**changes))


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.zeros(4), r"it is torch.float32 \[4\], not a text in uint8"),
        (torch.zeros(LONGEST + 1, dtype=torch.uint8), "not a text in uint8"),
        (torch.zeros(2, 2, dtype=torch.uint8), "not a text in uint8"),
        (torch.full((9,), 0xFF, dtype=torch.uint8), "it is no JSON"),
        (torch.tensor(list(b"[1, 2]"), dtype=torch.uint8), "its JSON is no object"),
        (torch.zeros(0, dtype=torch.uint8), "it is no JSON"),
    ],
    ids=["dtype", "long", "matrix", "bytes", "list", "empty"],
)
def test_what_is_no_text(tensor: torch.Tensor, says: str):
    with pytest.raises(ModelError, match=says):
        QuantState.from_tensor(tensor)


def test_there_is_one():
    assert find({"weight": 0, STATE.key: 0}) == STATE.key
    with pytest.raises(ModelError, match="there is none"):
        find({"weight": 0})
    with pytest.raises(ModelError, match=r"there is weight.quant_state.*nf4, weight.*fp4"):
        find({STATE.key: 0, STATE.key.replace("nf4", "fp4"): 0})
