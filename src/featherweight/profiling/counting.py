"""The operations of one pass through a model: what each costs, and how long each takes.

Ops are seen below autograd, as they reach their kernels; what a kernel calls in turn belongs to it.
The fast path's layers are one native call and no torch op: it is seen where it is made.
"""

from __future__ import annotations

import ctypes
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from featherweight.measure.clock import wait
from featherweight.native import decoder
from featherweight.native.linear import EXACT
from featherweight.profiling import operations
from featherweight.profiling.operations import CONTRACTION, Cost

FORWARD, BACKWARD = "forward", "backward"
DECODER_LAYERS = "featherweight::decoder_layers"
_FLOATS = {0: 4, 1: 2, 2: 2}  # format of a native matrix or cache → bytes of an element
_INT8, _4BIT = 3, 4


@dataclass(frozen=True)
class Call:
    """One call of an op that works, and what it costs."""

    phase: str
    name: str
    cost: Cost


class _Watcher(TorchDispatchMode):
    """Sees every op that works, composite ones taken apart. `phase` is for the caller to set."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = FORWARD

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # inference mode hands over ops that are nothing but others
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
        if not operations.works(func):
            return func(*args, **kwargs)
        return self.op(func, args, kwargs)

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op."""
        raise NotImplementedError

    def native(self, *args: Any) -> None:
        """Run a native call: `decoder.run` with these arguments."""
        raise NotImplementedError


class Counter(_Watcher):
    """Notes every call and its cost."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        found = operations.cost(func, args, kwargs, out)
        self.calls.append(Call(self.phase, operations.name_of(func), found))
        return out

    def native(self, *args: Any) -> None:
        _run(*args)
        self.calls.append(Call(self.phase, DECODER_LAYERS, decoder_cost(*args)))


class Timer(_Watcher):
    """Adds up the seconds of each op. On a GPU, each is waited for."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)  # by phase and name

    def op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wait(self.device)
        start = time.perf_counter()
        out = func(*args, **kwargs)
        wait(self.device)
        taken = time.perf_counter() - start
        self.seconds[self.phase, operations.name_of(func)] += taken
        return out

    def native(self, *args: Any) -> None:
        start = time.perf_counter()
        _run(*args)
        self.seconds[self.phase, DECODER_LAYERS] += time.perf_counter() - start


_run = decoder.run


@contextmanager
def watching(watcher: Counter | Timer) -> Iterator[None]:
    """Let the watcher see torch's ops and the fast path's native calls."""
    decoder.run = watcher.native  # type: ignore[assignment]
    try:
        with watcher:
            yield
    finally:
        decoder.run = _run


def decoder_cost(
    made: decoder.Decoder,
    layers: ctypes.Array[decoder.Layer],
    first: int,
    count: int,
    chunk: decoder.Chunk,
    *_: Any,
) -> Cost:
    """What a call of the fast path costs: its projections and its attention over all pairs.

    Norms, rotary embedding and activation are made in the same call and not counted.
    """
    rows, length = chunk.batch * chunk.tokens, chunk.past + chunk.tokens
    flops = weights = 0
    exact = True
    for layer in layers[first : first + count]:
        flops += 4 * rows * made.heads * made.head_dim * length
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            projection = getattr(layer, name)
            flops += 2 * rows * projection.weight.rows * projection.weight.columns
            weights += _weight_bytes(projection.weight)
            quantised = projection.weight.format in (_INT8, _4BIT)
            exact &= not quantised or bool(projection.flags & EXACT)
    states = 4 * rows * made.hidden  # x, f32
    itemsize = _FLOATS.get(made.cache, 1)
    cached = 2 * chunk.batch * made.kv_heads * made.head_dim * itemsize * count  # of one position
    return Cost(
        CONTRACTION,
        flops,
        read=weights + states + cached * length,
        written=states + cached * chunk.tokens,
        arithmetic="float32" if exact else "int8",
    )


def _weight_bytes(weight: Any) -> int:
    """Of a native matrix, with its scales; 0 where a projection is part of another one."""
    numbers = weight.rows * weight.columns
    if weight.format == _4BIT:
        blocks = -(-numbers // weight.blocksize)
        return numbers // 2 + blocks * (1 if weight.absmax_codes else 4)
    if weight.format == _INT8:
        return numbers + 4 * weight.rows
    return numbers * _FLOATS[weight.format]
