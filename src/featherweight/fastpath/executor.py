"""A chunk of tokens through all layers of a decoder, in native calls."""

from __future__ import annotations

import threading
from itertools import groupby
from typing import Any

import torch

from featherweight.fastpath.block import Block
from featherweight.fastpath.cache import GrowingLayer
from featherweight.fastpath.weights import Weights
from featherweight.native import decoder as native

Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [B, T, rotary_dim / 2]


class Executor:
    """The layers of one inner model as they lie in memory now, and running them."""

    def __init__(self, inner: Any, block: Block) -> None:
        self.block = block
        self.weights = Weights(inner, block)
        self.count = self.weights.count
        self._lock = threading.Lock()  # the structs say where one call's cache is

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
            cached = [GrowingLayer() for _ in range(self.count)]
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
            cos, sin = rotary(x, position_ids) if kind is None else rotary(x, position_ids, kind)
            sizes = *x.shape[:2], cos.shape[-1] // 2
            found[kind] = tuple(angle[..., : sizes[2]].expand(sizes) for angle in (cos, sin))
        return found

    def _place(self, cached: list[Any], batch: int, tokens: int) -> list[torch.Tensor]:
        """Say where keys and values go; without a cache, where the next layer overwrites them."""
        weights = self.weights
        heads, head_dim = weights.decoder.kv_heads, weights.decoder.head_dim
        kept = []
        if not cached:
            kept = [torch.empty(batch, heads, tokens, head_dim) for _ in range(2)]
        for i in range(self.count):
            keys, values = (
                cached[i].room(tokens, batch, heads, head_dim, torch.float32) if cached else kept
            )
            layer = weights.layers[i]
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            layer.capacity = keys.shape[2]
        return kept
