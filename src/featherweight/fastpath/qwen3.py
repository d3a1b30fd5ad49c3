"""Qwen3: Llama's block with a norm for each head of q and k."""

from __future__ import annotations

from featherweight.fastpath.block import Block

BLOCK = Block(classes=("Qwen3Model",), q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
