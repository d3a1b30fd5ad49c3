"""What bitsandbytes writes beside the codes of a 4-bit weight: the tensor `weight.quant_state.*`.

It is JSON in UTF-8, one byte an element, under a key that ends with the codebook's name:
`weight.quant_state.bitsandbytes__nf4`. With it stand `weight.absmax`, `weight.quant_map` and, for
nested absmax, `weight.nested_absmax` and `weight.nested_quant_map`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from featherweight.errors import ModelError
from featherweight.quant import nested
from featherweight.quant.blockwise import BLOCKSIZES, DTYPES

PREFIX = "weight.quant_state.bitsandbytes__"
QUANT_TYPES = ("nf4", "fp4", "int4")  # bitsandbytes knows the first two
STATISTICS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
LONGEST = 4096  # bytes of JSON; bitsandbytes writes 200
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class QuantState:
    """The numbers of a 4-bit weight that are no tensors."""

    quant_type: str
    blocksize: int
    dtype: torch.dtype  # of the weight that was quantised
    shape: tuple[int, int]  # [N, K]
    nested_offset: float | None = None  # None: absmax values are float32

    @property
    def key(self) -> str:
        """The tensor's name in a layer's state dict."""
        return PREFIX + self.quant_type

    def to_tensor(self) -> torch.Tensor:
        """uint8 [bytes], to the byte as bitsandbytes writes it."""
        written: dict[str, Any] = {
            "quant_type": self.quant_type,
            "blocksize": self.blocksize,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
        }
        if self.nested_offset is not None:
            written["nested_blocksize"] = nested.BLOCKSIZE
            written["nested_dtype"] = "float32"
            written["nested_offset"] = self.nested_offset
        return torch.frombuffer(bytearray(json.dumps(written).encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> QuantState:
        """Read `to_tensor`'s bytes; raises ModelError for anything that no weight can have."""
        if tensor.dtype is not torch.uint8 or tensor.ndim != 1 or tensor.numel() > LONGEST:
            raise ModelError(f"it is {tensor.dtype} {list(tensor.shape)}, not a text in uint8")
        try:
            read = json.loads(bytes(tensor.tolist()))
        except ValueError as error:
            raise ModelError(f"it is no JSON: {error}") from None
        if not isinstance(read, dict):
            raise ModelError("its JSON is no object")
        offset = None
        if "nested_blocksize" in read:
            _one_of(read, "nested_blocksize", (nested.BLOCKSIZE,))
            _one_of(read, "nested_dtype", ("float32",))
            offset = read.get("nested_offset")
            if not isinstance(offset, int | float) or not math.isfinite(offset):
                raise ModelError(f"its nested_offset is {offset!r}, not a finite number")
            offset = float(offset)
        shape = read.get("shape")
        if (
            not isinstance(shape, list)
            or len(shape) != 2
            or not all(type(size) is int and 0 < size < 1 << 31 for size in shape)
        ):
            raise ModelError(f"its shape is {shape!r}, not that of a matrix")
        return cls(
            quant_type=_one_of(read, "quant_type", QUANT_TYPES),
            blocksize=_one_of(read, "blocksize", BLOCKSIZES),
            dtype=_DTYPES[_one_of(read, "dtype", tuple(_DTYPES))],
            shape=(shape[0], shape[1]),
            nested_offset=offset,
        )


def find(names: Mapping[str, Any]) -> str:
    """The key of the quant state among a layer's; raises ModelError unless there is just one."""
    found = [name for name in names if name.startswith(PREFIX)]
    if len(found) != 1:
        listed = ", ".join(found) if found else "none"
        raise ModelError(f"one tensor '{PREFIX}nf4' or '…fp4' is needed; there is {listed}")
    return found[0]


def _one_of(read: dict[str, Any], key: str, allowed: tuple) -> Any:
    value = read.get(key)
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise ModelError(f"its {key} is {value!r}; allowed: {', '.join(map(str, allowed))}")
    return value
