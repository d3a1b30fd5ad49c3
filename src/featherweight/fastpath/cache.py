"""Where keys and values go: buffers with room to grow, inside transformers' caches."""

from __future__ import annotations

from collections.abc import Callable
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
from featherweight.quant.absmax import dequantize_absmax, quantize_absmax

FORMATS = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8,
}  # fmt: skip
_ROOM = 256  # tokens, at least, that a new buffer is larger than what is in it


class Numbers:
    """Keys or values [B, kv_heads, capacity, head_dim]; codes have an absmax for each head_dim."""

    def __init__(self, data: torch.Tensor, absmax: torch.Tensor | None = None) -> None:
        self.data, self.absmax = data, absmax

    @classmethod
    def of(cls, value: torch.Tensor, dtype: torch.dtype) -> Numbers:
        """In a format; not copied where it has that already."""
        if dtype is torch.int8:
            return cls(*quantize_absmax(value, dim=-1))
        return cls(value.to(dtype).contiguous())

    @classmethod
    def room(cls, shape: tuple[int, ...], dtype: torch.dtype) -> Numbers:
        """Not written to yet."""
        absmax = torch.empty(shape[:-1]) if dtype is torch.int8 else None
        return cls(torch.empty(shape, dtype=dtype), absmax)

    def first(self, length: int) -> torch.Tensor:
        """Of so many tokens: a view, or what codes stand for."""
        data = self.data[:, :, :length]
        if self.absmax is None:
            return data
        return dequantize_absmax(data, self.absmax[:, :, :length], dim=-1)

    def write(self, begin: int, other: Numbers) -> None:
        """Put all tokens of another of the same format behind the first ones."""
        end = begin + other.data.shape[2]
        self.data[:, :, begin:end] = other.data
        if self.absmax is not None and other.absmax is not None:
            self.absmax[:, :, begin:end] = other.absmax

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Numbers:
        """After a change of the batch."""
        absmax = None if self.absmax is None else change(self.absmax).contiguous()
        return Numbers(change(self.data).contiguous(), absmax)


class Stored:
    """Keys and values of a layer with the same room; the native library is told where they are."""

    def __init__(self, keys: Numbers, values: Numbers) -> None:
        self.keys, self.values = keys, values
        self.capacity = keys.data.shape[2]
        self.form = (keys.data.shape[0], keys.data.shape[1], keys.data.shape[3])


class GrowingLayer(DynamicLayer):
    """Keys and values [B, kv_heads, S, head_dim] as views of buffers with a larger capacity.

    transformers' own layer copies all keys at every token. What changes them (`crop`, beam search)
    assigns `keys` and `values`, or changes the buffers as they are.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, **kwargs: Any) -> None:
        self.dtype = dtype
        self._numbers: dict[str, Numbers] = {}
        self._stored: Stored | None = None  # both, where they can be written to as they are
        self._length = 0
        super().__init__(**kwargs)

    @property
    def keys(self) -> torch.Tensor | None:
        """The keys in use, or None before there are any; a copy, of codes."""
        return self._first("keys")

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._take("keys", value)

    @property
    def values(self) -> torch.Tensor | None:
        """The values in use, or None before there are any; a copy, of codes."""
        return self._first("values")

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._take("values", value)

    def _first(self, name: str) -> torch.Tensor | None:
        numbers = self._numbers.get(name)
        return None if numbers is None else numbers.first(self._length)

    def _take(self, name: str, value: torch.Tensor | None) -> None:
        self._stored = None
        if value is None or value.ndim < 4:
            self._numbers.pop(name, None)
            self._length = 0
        else:
            self._numbers[name] = Numbers.of(value, self.dtype)
            self._length = value.shape[-2]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note the device; buffers come with the first tokens."""
        self.device = key_states.device
        self.is_initialized = True

    def room(self, tokens: int, batch: int, heads: int, head_dim: int) -> Stored:
        """The buffers of keys and values, made large enough for so many more tokens."""
        stored, needed = self._stored, self._length + tokens
        form = batch, heads, head_dim
        if stored is None or stored.capacity < needed or stored.form != form:
            stored = self._stored = self._moved(needed, form)
            self.device, self.is_initialized = torch.device("cpu"), True
        return stored

    def _moved(self, needed: int, form: tuple[int, int, int]) -> Stored:
        batch, heads, head_dim = form
        shape = batch, heads, needed + max(_ROOM, needed // 2), head_dim
        moved = []
        for name in ("keys", "values"):
            old, new = self._numbers.get(name), Numbers.room(shape, self.dtype)
            if old is not None and self._length:
                there = old.data.shape
                if (there[0], there[1], there[3]) != form:
                    raise RuntimeError(
                        f"the cache is of a batch of {there[0]}; the tokens are {batch} rows"
                    )
                new.write(0, old.each(lambda part: part[:, :, : self._length]))
            moved.append(new)
        self._numbers = dict(zip(("keys", "values"), moved, strict=True))
        return Stored(*moved)

    def advance(self, tokens: int) -> None:
        """So many tokens were written behind those in use."""
        self._length += tokens

    def agree(self, length: int) -> None:
        """Take the length of the first layer, should an interrupt have come between the two."""
        self._length = length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, for a forward pass that is transformers' own, in its dtype."""
        batch, heads, tokens, head_dim = key_states.shape
        if not torch.is_inference_mode_enabled() and any(
            numbers.data.is_inference() for numbers in self._numbers.values()
        ):
            self._stored = None  # torch does not write to those out here
        stored = self.room(tokens, batch, heads, head_dim)
        stored.keys.write(self._length, Numbers.of(key_states, self.dtype))
        stored.values.write(self._length, Numbers.of(value_states, self.dtype))
        self.advance(tokens)
        assert self.keys is not None
        assert self.values is not None
        return self.keys.to(key_states.dtype), self.values.to(value_states.dtype)

    def get_seq_length(self) -> int:
        """Tokens in use."""
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last −tokens_to_remove tokens; nothing moves."""
        if tokens_to_remove > 0:
            super().crop(tokens_to_remove)  # says why not
        self._length = max(0, self._length + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows of the batch in another order."""
        self._change(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row of the batch so often."""
        self._change(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Some rows of the batch."""
        self._change(lambda part: part[indices, ...])

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._stored = None
        if self._length:
            self._numbers = {name: n.each(change) for name, n in self._numbers.items()}
            self._stored = Stored(self._numbers["keys"], self._numbers["values"])


class FixedLayer:
    """What `GrowingLayer` offers, on a layer of a `StaticCache`."""

    def __init__(self, layer: StaticLayer, dtype: torch.dtype) -> None:
        self._layer, self._dtype = layer, dtype
        self.dtype = dtype if layer.keys is None else layer.keys.dtype

    def get_seq_length(self) -> int:
        """Tokens in use."""
        return int(self._layer.get_seq_length())

    def room(self, tokens: int, batch: int, heads: int, head_dim: int) -> Stored:
        """The whole buffers; raises NotServed if they are too short, or of another form."""
        layer: Any = self._layer
        if not layer.is_initialized:
            sample = torch.empty(batch, heads, 0, head_dim, dtype=self._dtype)
            layer.lazy_initialization(sample, sample)
        fits = self.get_seq_length() + tokens <= layer.max_cache_len
        if layer.keys.shape[:2] != (batch, heads) or not fits:
            raise NotServed("a static cache that does not fit")
        return Stored(Numbers(layer.keys), Numbers(layer.values))

    def advance(self, tokens: int) -> None:
        """So many tokens were written behind those in use."""
        self._layer.cumulative_length.add_(tokens)

    def agree(self, length: int) -> None:
        """Take the length of the first layer, should an interrupt have come between the two."""
        self._layer.cumulative_length.fill_(length)


def places_of(cache: Any, layers: int, format: torch.dtype, dtype: torch.dtype) -> list[Any]:
    """One place for keys and values a layer; raises NotServed for caches of another kind.

    The layers of a dynamic cache are `GrowingLayer`s of that format from now on; a static one has
    the dtype of the model.
    """
    found: list[Any] | None = None
    if type(cache) is StaticCache:
        found = [FixedLayer(layer, dtype) for layer in cache.layers if type(layer) is StaticLayer]
    elif type(cache) is DynamicCache:
        found = _grow(cache, layers, format)
    if not found or len(found) != layers or any(x.dtype not in FORMATS.values() for x in found):
        raise NotServed(f"a {type(cache).__name__} of this kind")
    if any(layer.dtype is not found[0].dtype for layer in found):
        raise NotServed("a cache of several formats")
    return found


def _grow(cache: DynamicCache, layers: int, format: torch.dtype) -> list[GrowingLayer] | None:
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
        layer = old if isinstance(old, GrowingLayer) else GrowingLayer(format)
        if old is not None and old is not layer and old.get_seq_length():
            layer.keys, layer.values = old.keys, old.values
            layer.device, layer.is_initialized = old.device, True
        new.append(layer)
    cache.layers = new
    return new
