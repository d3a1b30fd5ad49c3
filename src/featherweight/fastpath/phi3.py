"""Phi-3: Llama's block with q, k and v in one matrix, gate and up in another."""

from __future__ import annotations

from featherweight.fastpath.block import STACKED, Block

BLOCK = Block(
    classes=("Phi3Model",),
    q="self_attn.qkv_proj",
    k=None,
    v=None,
    qkv=lambda config: STACKED,
    gate=None,
    up="mlp.gate_up_proj",
    gate_with_up=True,
)
