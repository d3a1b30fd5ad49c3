"""GPTBigCode (StarCoder): GPT-2's block with one head of keys and values for all queries."""

from __future__ import annotations

from dataclasses import replace

from featherweight.fastpath import gpt2
from featherweight.fastpath.block import BY_HEAD, STACKED

BLOCK = replace(
    gpt2.BLOCK,
    classes=("GPTBigCodeModel",),
    qkv=lambda config: STACKED if config.multi_query else BY_HEAD,
)
