"""Where keys and values go: buffers with room to grow, inside transformers' caches."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticCache,
    StaticLayer,
)

from featherweight.fastpath.masks import NotServed

_ROOM = 256  # tokens, at least, that a new buffer is larger than what is in it


class GrowingLayer(DynamicLayer):
    """Keys and values [B, kv_heads, S, head_dim] as views of buffers with a larger capacity.

    transformers' own layer copies all keys at every token. What changes them (`crop`, beam search)
    assigns `keys` and `values`, here as there.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._buffers: dict[str, torch.Tensor] = {}  # [B, kv_heads, capacity, head_dim]
        self._lengths = {"keys": 0, "values": 0}
        super().__init__(**kwargs)

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys in use, or None before there are any."""
        return self._view("keys")

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._take("keys", value)

    @property
    def values(self) -> torch.Tensor | None:
        """The values in use, or None before there are any."""
        return self._view("values")

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._take("values", value)

    def _view(self, name: str) -> torch.Tensor | None:
        buffer = self._buffers.get(name)
        return None if buffer is None else buffer[:, :, : self._lengths[name]]

    def _take(self, name: str, value: torch.Tensor | None) -> None:
        """A shorter view of the buffer shortens it; anything else becomes a buffer of its own."""
        buffer = self._buffers.get(name)
        if value is None or value.ndim < 4:
            self._buffers.pop(name, None)
            self._lengths[name] = 0
            return
        same = (
            buffer is not None
            and value.data_ptr() == buffer.data_ptr()
            and value.stride() == buffer.stride()
            and value.shape[:2] == buffer.shape[:2]
        )
        if not same:
            self._buffers[name] = value.contiguous()
        self._lengths[name] = value.shape[-2]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note the device; buffers come with the first tokens."""
        self.device = key_states.device
        self.is_initialized = True

    def room(
        self, tokens: int, batch: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of keys and values, made large enough for so many more tokens."""
        length = self._lengths["keys"]
        buffers: Any = [self._buffers.get(name) for name in ("keys", "values")]
        needed = length + tokens
        if length and buffers[0].shape[:2] + buffers[0].shape[3:] != (batch, heads, head_dim):
            raise RuntimeError(
                f"the cache is of a batch of {buffers[0].shape[0]}; the tokens are {batch} rows"
            )
        wanted = batch, heads, head_dim, dtype
        if any(b is None or b.shape[2] < needed or _form(b) != wanted for b in buffers):
            capacity = needed + max(_ROOM, needed // 2)
            for name, old in zip(("keys", "values"), buffers, strict=True):
                self._buffers[name] = torch.empty(batch, heads, capacity, head_dim, dtype=dtype)
                if old is not None and length:
                    self._buffers[name][:, :, :length] = old[:, :, :length]
        self.device, self.is_initialized = torch.device("cpu"), True
        return self._buffers["keys"], self._buffers["values"]

    def advance(self, tokens: int) -> None:
        """So many tokens were written behind those in use."""
        for name in ("keys", "values"):
            self._lengths[name] += tokens

    def agree(self, length: int) -> None:
        """Take the length of the first layer, should an interrupt have come between the two."""
        for name in self._buffers:
            self._lengths[name] = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, for a forward pass that is transformers' own, in its dtype."""
        batch, heads, tokens, head_dim = key_states.shape
        self.room(tokens, batch, heads, head_dim, torch.float32)
        for name, states in (("keys", key_states), ("values", value_states)):
            length = self._lengths[name]
            self._buffers[name][:, :, length : length + tokens] = states
        self.advance(tokens)
        assert self.keys is not None
        assert self.values is not None
        return self.keys.to(key_states.dtype), self.values.to(value_states.dtype)

    def get_seq_length(self) -> int:
        """Tokens in use."""
        return self._lengths["keys"]


def _form(buffer: torch.Tensor) -> tuple[Any, ...] | None:
    """What must be as asked for; None where the buffer cannot be written to here."""
    if buffer.is_inference() and not torch.is_inference_mode_enabled():
        return None
    batch, heads, _, head_dim = buffer.shape
    return batch, heads, head_dim, buffer.dtype


class FixedLayer:
    """What `GrowingLayer` offers, on a layer of a `StaticCache`."""

    def __init__(self, layer: StaticLayer) -> None:
        self._layer = layer

    def get_seq_length(self) -> int:
        """Tokens in use."""
        return int(self._layer.get_seq_length())

    def room(
        self, tokens: int, batch: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole buffers; raises NotServed if they are too short, or of another form."""
        layer: Any = self._layer
        if not layer.is_initialized:
            sample = torch.empty(batch, heads, 0, head_dim, dtype=dtype)
            layer.lazy_initialization(sample, sample)
        fits = self.get_seq_length() + tokens <= layer.max_cache_len
        if layer.keys.dtype is not dtype or layer.keys.shape[:2] != (batch, heads) or not fits:
            raise NotServed("a static cache that does not fit")
        return layer.keys, layer.values

    def advance(self, tokens: int) -> None:
        """So many tokens were written behind those in use."""
        self._layer.cumulative_length.add_(tokens)

    def agree(self, length: int) -> None:
        """Take the length of the first layer, should an interrupt have come between the two."""
        self._layer.cumulative_length.fill_(length)


def places_of(cache: Any, layers: int, dtype: torch.dtype) -> list[Any]:
    """One place for keys and values a layer; raises NotServed for caches of another kind.

    The layers of a dynamic cache are `GrowingLayer`s from now on.
    """
    if type(cache) is StaticCache and dtype is torch.float32:
        fixed = [FixedLayer(layer) for layer in cache.layers if type(layer) is StaticLayer]
        if len(fixed) == layers:
            return fixed
    elif type(cache) is DynamicCache:
        grown = _grow(cache, layers)
        if grown is not None:
            return grown
    raise NotServed(f"a {type(cache).__name__} of this kind")


def _grow(cache: DynamicCache, layers: int) -> list[GrowingLayer] | None:
    found: Any = cache.layers
    if len(found) == layers and all(type(layer) is GrowingLayer for layer in found):
        return found
    sliding = [layer for layer in found if type(layer) is DynamicSlidingWindowLayer]
    if any(layer.get_seq_length() for layer in sliding):
        return None  # what lies before the window is gone
    if any(type(x) not in (DynamicLayer, DynamicSlidingWindowLayer, GrowingLayer) for x in found):
        return None
    new: Any = []
    for old in [*found, *([None] * (layers - len(found)))]:
        layer = old if isinstance(old, GrowingLayer) else GrowingLayer()
        if old is not None and old is not layer and old.get_seq_length():
            layer.keys, layer.values = old.keys, old.values
            layer.device, layer.is_initialized = old.device, True
        new.append(layer)
    cache.layers = new
    return new
