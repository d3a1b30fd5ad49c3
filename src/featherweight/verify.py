"""A cheap check that a changed model still answers as the original did.

One batch of sequences of different lengths, padded left and padded right; outputs are compared on
real tokens only. It finds what is broken (a mask ignored, a weight misplaced), not what is a
little worse: that is what the quality figures of `compare` are for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from featherweight.errors import UnsupportedError, VerificationError
from featherweight.techniques.base import Technique

LENGTHS = (32, 17, 5)
# Relative RMS difference between two correct programs of one model, by dtype of the original.
ROUNDING = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def batches(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """The two inputs: `input_ids` and `attention_mask`, each [3, 32]."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedError(
            f"verify cannot make inputs for a {type(model).__name__}",
            hint="it needs a transformers model that reads token ids",
        )
    vocabulary = config.get_text_config().vocab_size
    longest = max(LENGTHS)
    ids = torch.randint(
        0, vocabulary, (len(LENGTHS), longest), generator=torch.Generator().manual_seed(0)
    )
    columns = torch.arange(longest)
    lengths = torch.tensor(LENGTHS)[:, None]
    masks = {"right": columns < lengths, "left": columns >= longest - lengths}
    device = next(model.parameters()).device
    return {
        side: {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
        for side, mask in masks.items()
    }


@torch.no_grad()  # inference tensors would stay in the model: caches, packed weights
def outputs(model: nn.Module) -> dict[str, torch.Tensor]:
    """Logits, or hidden states where there are none, of the real tokens: [tokens, width]."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    found = {}
    try:
        for side, inputs in batches(model).items():
            if getattr(model.config, "is_encoder_decoder", False):
                inputs["decoder_input_ids"] = inputs["input_ids"]
            answer = model(**inputs)
            values = answer.logits if hasattr(answer, "logits") else answer.last_hidden_state
            if values.ndim == 3 and values.shape[:2] == inputs["attention_mask"].shape:
                values = values[inputs["attention_mask"].bool()]
            found[side] = values.float().cpu().clone()
    finally:
        for module, was in training.items():
            module.training = was
    return found


def tolerance(model: nn.Module, techniques: Iterable[Technique]) -> float:
    """Largest relative RMS difference that passes."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return ROUNDING.get(dtype, 1e-3) + sum(technique.tolerance for technique in techniques)


def compare(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], allowed: float, recipe: str
) -> dict[str, float]:
    """RMS difference over the original's standard deviation, by side; raises VerificationError."""
    found = {}
    for side, original in before.items():
        changed = after[side]
        if not original.isfinite().all():
            raise VerificationError(
                f"outputs are not finite (batch padded on the {side}) before any change",
                hint="see that the model works, then verify",
            )
        if not changed.isfinite().all():
            raise VerificationError(
                f"'{recipe}' makes outputs that are not finite (batch padded on the {side})",
                hint="leave out a technique, or keep a wider dtype",
            )
        difference = (changed - original).pow(2).mean().sqrt()
        found[side] = (difference / original.std().clamp_min(1e-12)).item()
        if found[side] > allowed:
            raise VerificationError(
                f"'{recipe}' changes outputs by {found[side]:.3g} of their spread"
                f" (batch padded on the {side}), more than the {allowed:.3g} allowed",
                hint="the model does not work with this recipe; leave out a technique",
            )
    return found
