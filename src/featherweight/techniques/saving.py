"""Telling transformers that a model is quantised, and how it is saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from featherweight.ledger import Ledger


def save_as_it_is(model: nn.Module) -> None:
    """See that `save_pretrained` writes a checkpoint that transformers can read, or refuses."""
    if hasattr(model, "save_pretrained"):
        from featherweight.saving import watch_saving

        watch_saving()


def tell_transformers(model: Any, ledger: Ledger) -> None:
    """Make `half()`, Trainer and PEFT treat the model as a quantised one."""
    if not hasattr(model, "get_output_embeddings"):
        return
    from featherweight.integrations.transformers import QuantConfig, Quantizer

    if not hasattr(model, "hf_quantizer"):  # else it is transformers that loads the model
        config = QuantConfig(ledger.receipt.recipe)
        ledger.set(model, "hf_quantizer", Quantizer(config, pre_quantized=False))
        ledger.set(model, "is_quantized", True)
        ledger.set(model, "quantization_method", config.quant_method)
        ledger.set(model.config, "quantization_config", config)
    # How PEFT knows that a model is trained through adapters. Also of 4-bit weights: for
    # `is_loaded_in_4bit` transformers would import bitsandbytes to count parameters.
    ledger.set(model, "is_loaded_in_8bit", True)
