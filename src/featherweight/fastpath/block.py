"""What a decoder's block is: the names of its parts, as data. One small file an architecture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from featherweight.native.decoder import BY_HEAD, SEPARATE, STACKED

__all__ = ["BY_HEAD", "SEPARATE", "STACKED", "Block"]


def _as_it_is(weight: Any) -> Any:
    return weight


@dataclass(frozen=True)
class Block:
    """Where the parts of a decoder are, by name, in the inner model and in each of its layers.

    None: the architecture has no such part. The defaults are Llama's.
    """

    classes: tuple[str, ...]  # names of the inner model's classes, such as "LlamaModel"

    # Of the inner model.
    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str | None = None  # an embedding of positions, added to that of tokens
    rotary: str | None = "rotary_emb"
    final_norm: str = "norm"

    # Of a layer. With q stacked or by head, k and v are in q's matrix.
    attention: str = "self_attn"  # what knows scaling, and head_dim or head_size
    q: str = "self_attn.q_proj"
    k: str | None = "self_attn.k_proj"
    v: str | None = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    mlp: str = "mlp"  # what has the activation
    gate: str | None = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    attention_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None

    # What is done with them, where it differs; functions are of the inner model's config.
    qkv: Callable[[Any], int] = lambda config: SEPARATE
    gate_with_up: bool = False  # one matrix gives the gate, then up
    parallel: Callable[[Any], bool] = lambda config: False  # attention and MLP read the same stream
    center: bool = False  # norms are LayerNorm, not RMSNorm
    norm_weight: Callable[[Any], Any] = _as_it_is  # Gemma multiplies by 1 + weight
    refuse: Callable[[Any], str | None] = lambda config: None  # a setting that is not served

    def layer_list(self, inner: Any) -> list[nn.Module]:
        """The blocks in order; a config may leave out the last ones."""
        blocks = list(inner.get_submodule(self.layers).children())
        return blocks[: getattr(inner.config, "num_hidden_layers", len(blocks))]

    @property
    def projections(self) -> dict[str, str]:
        """Names of the matrices that a layer has."""
        names = ("q", "k", "v", "o", "gate", "up", "down")
        return {name: path for name in names if (path := getattr(self, name)) is not None}

    @property
    def norms(self) -> dict[str, str]:
        """Names of the norms that a layer has."""
        names = ("attention_norm", "mlp_norm", "after_attention", "after_mlp", "q_norm", "k_norm")
        return {name: path for name in names if (path := getattr(self, name)) is not None}
