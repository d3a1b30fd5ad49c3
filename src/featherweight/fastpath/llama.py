"""Llama and what is built like it: RMSNorm, rotary positions, grouped queries, a gated MLP."""

from __future__ import annotations

from featherweight.fastpath.block import Block

BLOCK = Block(classes=("LlamaModel", "MistralModel", "Qwen2Model"))
