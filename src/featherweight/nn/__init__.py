"""Layers of light weights, for any `nn.Module`: import them from here."""

from __future__ import annotations

from featherweight.integrations.when_imported import when_imported
from featherweight.nn.four_bit import FourBitLinear
from featherweight.nn.half import HalfEmbedding, HalfLinear
from featherweight.nn.int8 import Int8Embedding, Int8Linear

__all__ = ["FourBitLinear", "HalfEmbedding", "HalfLinear", "Int8Embedding", "Int8Linear"]

# PEFT learns of these layers when it is there, and is not imported for their sake.
when_imported("peft", "featherweight.integrations.peft")
