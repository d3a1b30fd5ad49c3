"""All layers of a decoder in one call, on CPU tensors: `fw_decoder_layers`.

The structs mirror csrc/featherweight.h. Whoever builds them keeps the tensors alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import addressof
from functools import cache
from typing import Any

import torch

from featherweight.errors import NativeError
from featherweight.native.library import Matrix, library

SEPARATE, STACKED, BY_HEAD = 0, 1, 2
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
CACHES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
PRODUCTS = 12_000_000_000  # multiply-adds in one call, so that an interrupt waits less than 200 ms


class Norm(ctypes.Structure):
    """weight null: the norm does nothing. center: LayerNorm, otherwise RMSNorm."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("center", ctypes.c_int32),
    )


class Projection(ctypes.Structure):
    """A weight of any format, and bias f32 [rows] or null."""

    _fields_ = (
        ("weight", Matrix),
        ("bias", ctypes.c_void_p),
        ("threshold", ctypes.c_float),
        ("flags", ctypes.c_int32),
    )


class Layer(ctypes.Structure):
    """One block and its cache, [batch, kv_heads, capacity, head_dim] of `Decoder.cache`."""

    _fields_ = (
        *((name, Norm) for name in ("attention_norm", "mlp_norm")),
        *((name, Norm) for name in ("after_attention", "after_mlp", "q_norm", "k_norm")),
        *((name, Projection) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_absmax", "value_absmax")),
        ("capacity", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
    )


class Decoder(ctypes.Structure):
    """What all blocks have in common."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in (
                "hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "intermediate",
            )
        ),
        *(
            (name, ctypes.c_int32)
            for name in ("activation", "parallel", "qkv", "gate_with_up", "cache")
        ),
    )  # fmt: skip


class Chunk(ctypes.Structure):
    """The tokens of one call: x is f32 [batch, tokens, hidden]."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "tokens", "past")),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "seen", "last")),
    )


def run(
    decoder: Decoder,
    layers: ctypes.Array[Layer],
    first: int,
    count: int,
    chunk: Chunk,
    x: torch.Tensor,
    at_once: int,
    last: Norm | None = None,
) -> None:
    """Pass x [batch, tokens, hidden] through layers first … first + count, `at_once` a call.

    `last` is the norm of what comes out in the end.
    """
    call, threads = _layers(), torch.get_num_threads()
    size = ctypes.sizeof(Layer)
    base, target = addressof(layers), x.data_ptr()
    for begin in range(first, first + count, at_once):
        here = min(at_once, first + count - begin)
        chunk.last = addressof(last) if last is not None and begin + here == first + count else None
        at = base + begin * size
        if call(addressof(decoder), at, here, addressof(chunk), target, threads):
            raise MemoryError("no memory for the activations of a decoder layer")


@cache
def _layers() -> Any:
    """`fw_decoder_layers`, of a library that was built from the same structs."""
    loaded = library()
    if loaded.fw_decoder_bytes() != sum(map(ctypes.sizeof, (Decoder, Layer, Chunk))):
        raise NativeError(
            "the native library was built from other sources than this Python code",
            hint="install Featherweight again",
        )
    return loaded.fw_decoder_layers


def place(layer: Layer, keys: Any, values: Any) -> None:
    """Say where a layer's cache is: `data`, and `absmax` of codes."""
    layer.keys, layer.values = keys.data.data_ptr(), values.data.data_ptr()
    layer.key_absmax = None if keys.absmax is None else keys.absmax.data_ptr()
    layer.value_absmax = None if values.absmax is None else values.absmax.data_ptr()
    layer.capacity = keys.data.shape[2]


def norm(weight: torch.Tensor, bias: torch.Tensor | None, eps: float, center: bool) -> Norm:
    """f32 weight [n], and bias [n] or None."""
    for tensor in (weight, bias):
        if tensor is not None and (tensor.dtype is not torch.float32 or not tensor.is_contiguous()):
            raise NativeError(f"a norm's weight is {tensor.dtype}; float32, dense, is wanted")
    return Norm(weight.data_ptr(), bias.data_ptr() if bias is not None else None, eps, int(center))


def table(layers: Sequence[Layer]) -> ctypes.Array[Layer]:
    """The layers side by side, as `run` takes them."""
    return (Layer * len(layers))(*layers)
