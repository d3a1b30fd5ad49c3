"""Attention masks as keys that may be seen: what is left when causality is taken for granted."""

from __future__ import annotations

from typing import Any

import torch


class NotServed(Exception):
    """Why a call goes to the original forward."""


def keys_seen(mask: Any, batch: int, past: int, tokens: int) -> torch.Tensor | None:
    """bool [B, past + tokens], or None where all keys may be seen.

    mask is [B, past + tokens], or what transformers makes of it for a static cache: bool, or added
    to scores, [B or 1, 1, tokens, ≥ past + tokens]. Raises NotServed for any other.
    """
    if isinstance(mask, dict) and set(mask) == {"full_attention"}:  # by kinds of layers: just one
        mask = mask["full_attention"]
    if mask is None:
        return None
    length = past + tokens
    if not isinstance(mask, torch.Tensor) or mask.ndim not in (2, 4) or mask.shape[-1] < length:
        raise NotServed("a mask of another form")
    if mask.ndim == 2:
        if mask.shape != (batch, length):
            raise NotServed("a mask of another length")
        return None if bool(mask.all()) else mask.bool().contiguous()
    if mask.shape[1] != 1 or mask.shape[2] != tokens:
        raise NotServed("a mask for each head")
    if mask.is_floating_point():
        mask = mask > torch.finfo(mask.dtype).min / 2
    rows = mask[:, 0].bool()  # [B, tokens, ≥ length]
    seen = rows[:, -1, :length]
    causal = torch.ones(tokens, length, dtype=torch.bool).tril(past)
    if not torch.equal(rows[..., :length], seen[:, None] & causal) or bool(
        rows[..., length:].any()
    ):
        raise NotServed("a mask that is not causal")
    return None if bool(seen.all()) else seen.expand(batch, length).contiguous()
