"""Gemma 3: norms before and after both parts, and of each head; windows in most layers."""

from __future__ import annotations

from typing import Any

from featherweight.fastpath.block import Block


def _refuse(config: Any) -> str | None:
    if getattr(config, "attn_logit_softcapping", None):
        return "scores that are capped (attn_logit_softcapping)"
    if getattr(config, "use_bidirectional_attention", False):
        return "attention in both directions"
    return None


BLOCK = Block(
    classes=("Gemma3TextModel",),
    mlp_norm="pre_feedforward_layernorm",
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
    q_norm="self_attn.q_norm",
    k_norm="self_attn.k_norm",
    norm_weight=lambda weight: 1 + weight.float(),
    refuse=_refuse,
)
