"""GPT-2: LayerNorm, learned positions, a plain MLP, biases; weights as Conv1D."""

from __future__ import annotations

from featherweight.fastpath.block import STACKED, Block

BLOCK = Block(
    classes=("GPT2Model",),
    layers="h",
    embedding="wte",
    positions="wpe",
    rotary=None,
    final_norm="ln_f",
    attention="attn",
    q="attn.c_attn",
    k=None,
    v=None,
    o="attn.c_proj",
    gate=None,
    up="mlp.c_fc",
    down="mlp.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    qkv=lambda config: STACKED,
    center=True,
    refuse=lambda config: "cross-attention" if config.add_cross_attention else None,
)
