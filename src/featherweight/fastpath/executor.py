"""A chunk of tokens through all layers of a decoder, in native calls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch

from featherweight.fastpath.block import Block
from featherweight.fastpath.cache import GrowingLayer, Numbers, Stored
from featherweight.fastpath.weights import Weights
from featherweight.native import decoder as native

Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [B, T, rotary_dim / 2]
_FIXED = {"default", "linear", "llama3", "yarn"}  # kinds of scaling that do not look at the length
_LONGEST = 1 << 20  # positions that a table is made for


class Executor:
    """The layers of one inner model as they lie in memory now, and running them."""

    def __init__(self, inner: Any, block: Block, format: torch.dtype) -> None:
        self.block, self.format = block, format
        self.weights = Weights(inner, block)
        self.count = self.weights.count
        self._lock = threading.Lock()  # the structs say where one call's cache is
        self._tables: dict[str | None, Angles] = {}  # [positions, rotary_dim / 2]
        self._placed: list[Callable[[], Stored | None]] = [lambda: None] * self.count

    @torch.no_grad()
    def run(
        self,
        inner: Any,
        embeds: torch.Tensor,
        seen: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        past: int,
        cached: list[Any],
        states: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Embeddings [B, T, hidden] → hidden states f32 [B, T, hidden] after the last norm.

        seen is bool [B, past + T], keys and values go into `cached` (empty: nowhere). `states`
        receives what each layer is given. If a call is interrupted, the cache holds what it held
        before.
        """
        batch, tokens, _ = embeds.shape
        if position_ids is None:
            position_ids = torch.arange(past, past + tokens)[None]
        if self.block.positions is not None:
            embeds = embeds + inner.get_submodule(self.block.positions)(position_ids)
        x = embeds.to(torch.float32, copy=True).contiguous()
        angles = self._angles(inner, x, position_ids)
        step = max(1, native.PRODUCTS // (batch * self._products(past + tokens)))
        if not cached and tokens > step:
            cached = [GrowingLayer(self.format) for _ in range(self.count)]
        for layer in cached:
            layer.agree(past)
        pieces: list[list[torch.Tensor]] = []
        with self._lock:
            kept = self._place(cached, batch, tokens)
            for begin in range(0, tokens, step):
                end = min(begin + step, tokens)
                piece = x[:, begin:end].contiguous()  # x itself, where that is all
                keys = None if seen is None else seen[:, : past + end].contiguous()
                here = {kind: tuple(a[:, begin:end] for a in both) for kind, both in angles.items()}
                pieces.append(self._piece(piece, keys, here, past + begin, states is not None))
                if piece.data_ptr() != x.data_ptr() + begin * x.stride(1) * x.itemsize:
                    x[:, begin:end] = piece
        del kept
        for layer in cached:
            layer.advance(tokens)
        if states is not None:
            joined = (torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
            states += [state.to(embeds.dtype) for state in joined]
        return x

    def _piece(
        self,
        x: torch.Tensor,
        seen: torch.Tensor | None,
        angles: dict[Any, Any],
        past: int,
        collect: bool,
    ) -> list[torch.Tensor]:
        """Some of the tokens through all layers, in place; what each layer was given."""
        weights, states = self.weights, []
        batch, tokens, _ = x.shape
        chunk = native.Chunk(batch=batch, tokens=tokens, past=past)
        chunk.seen = seen.data_ptr() if seen is not None else None
        at_once = max(1, native.PRODUCTS // (batch * tokens * self._products(past + tokens)))
        for kind, run in groupby(range(self.count), key=weights.kinds.__getitem__):
            layers = list(run)
            kept = []
            if angles:
                kept = [angle.contiguous() for angle in angles[kind]]
                weights.decoder.rotary_dim = 2 * kept[0].shape[-1]
                chunk.cos, chunk.sin = (angle.data_ptr() for angle in kept)
            count = 1 if collect else len(layers)
            for first in layers[::count]:
                if collect:
                    states.append(x.clone())
                last = weights.last if first + count == self.count else None
                native.run(weights.decoder, weights.layers, first, count, chunk, x, at_once, last)
        return states

    def _products(self, length: int) -> int:
        """Multiply-adds of one layer for one token that sees so many keys."""
        decoder = self.weights.decoder
        return self.weights.multiply_adds + 2 * decoder.heads * decoder.head_dim * length

    def _angles(
        self, inner: Any, x: torch.Tensor, position_ids: torch.Tensor
    ) -> dict[str | None, Angles]:
        """By kind of layer, from the model's own rotary embedding; none if it has none."""
        if self.block.rotary is None:
            return {}
        rotary: Any = inner.get_submodule(self.block.rotary)
        found = {}
        for kind in dict.fromkeys(self.weights.kinds):
            cos, sin = self._turned(rotary, kind, x, position_ids)
            sizes = *x.shape[:2], cos.shape[-1]
            found[kind] = (cos.expand(sizes), sin.expand(sizes))
        return found

    def _turned(
        self, rotary: Any, kind: str | None, x: torch.Tensor, position_ids: torch.Tensor
    ) -> Angles:
        """Of the positions, out of a table where an angle depends on nothing but its position."""

        def angles(positions: torch.Tensor) -> Angles:
            kinds = () if kind is None else (kind,)
            cos, sin = rotary(x, positions, *kinds)
            half = cos.shape[-1] // 2
            return cos[..., :half].contiguous(), sin[..., :half].contiguous()

        type_ = rotary.rope_type if kind is None else rotary.rope_type[kind]
        low, high = (int(at) for at in position_ids.aminmax())
        if type_ not in _FIXED or low < 0 or high >= _LONGEST:
            return angles(position_ids)
        table = self._tables.get(kind)
        if table is None or table[0].shape[0] <= high:
            cos, sin = angles(torch.arange(max(512, 2 * high))[None])
            table = self._tables[kind] = (cos[0], sin[0])
        return table[0][position_ids], table[1][position_ids]

    def _place(self, cached: list[Any], batch: int, tokens: int) -> list[Stored]:
        """Say where keys and values go; without a cache, where the next layer overwrites them."""
        weights = self.weights
        heads, head_dim = weights.decoder.kv_heads, weights.decoder.head_dim
        if not cached:
            one = Numbers.room((batch, heads, tokens, head_dim), self.format)
            other = Numbers.room((batch, heads, tokens, head_dim), self.format)
            kept = [Stored(one, other)] * self.count
        else:
            kept = [layer.room(tokens, batch, heads, head_dim) for layer in cached]
        weights.decoder.cache = native.CACHES[kept[0].keys.data.dtype]
        for i, stored in enumerate(kept):
            if self._placed[i]() is not stored:
                self._placed[i] = weakref.ref(stored)
                native.place(weights.layers[i], stored.keys, stored.values)
        return kept
