"""GPT-NeoX (Pythia): attention and MLP side by side, q, k and v head by head, partly rotated."""

from __future__ import annotations

from featherweight.fastpath.block import BY_HEAD, Block

BLOCK = Block(
    classes=("GPTNeoXModel",),
    embedding="embed_in",
    final_norm="final_layer_norm",
    attention="attention",
    q="attention.query_key_value",
    k=None,
    v=None,
    o="attention.dense",
    gate=None,
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    qkv=lambda config: BY_HEAD,
    parallel=lambda config: config.use_parallel_residual,
    center=True,
)
