"""bnb-int8: codes, scales and the threshold of outliers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import featherweight as fw
from featherweight.errors import RecipeError
from featherweight.techniques.bnb_int8 import BnbInt8

pytest.importorskip("bitsandbytes")


def test_codes_are_the_weights_over_their_rows_absmax(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    # bitsandbytes rounds the weights to fp16 first.
    weight = model.model.layers[1].self_attn.q_proj.weight.half().float()
    with fw.apply(model, "bnb-int8"):
        quantised = model.model.layers[1].self_attn.q_proj.weight
        scale = weight.abs().amax(1)
        assert quantised.dtype is torch.int8
        assert torch.equal(quantised.SCB, scale)
        again = quantised.data * scale[:, None] / 127
        assert ((again - weight).abs() <= scale[:, None] / 127 * 0.5001).all()


@pytest.mark.parametrize("threshold", [0.0, 6.0, 2.5])
def test_the_threshold_reaches_the_layers_and_the_config(
    tiny_llama: Path, threshold: float, read: Any
):
    model = read(tiny_llama)
    with fw.apply(model, f"bnb-int8:threshold={threshold}"):
        assert model.model.layers[0].mlp.up_proj.state.threshold == threshold
        assert model.config.quantization_config.llm_int8_threshold == threshold


@torch.no_grad()
def test_outlier_columns_are_kept_in_float(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    x = torch.ones(4, 64)
    x[:, 5] = 100.0  # drowns the rest of its row in int8, unless it is set apart
    expected = model.model.layers[0].mlp.up_proj(x)
    errors = {}
    for threshold in (0, 6):
        with fw.apply(model, f"bnb-int8:threshold={threshold}"):
            found = model.model.layers[0].mlp.up_proj(x)
            errors[threshold] = (found - expected).norm() / expected.norm()
    assert errors[6] < 0.02
    assert errors[6] < errors[0]


@pytest.mark.parametrize("threshold", [-1.0, float("nan"), float("inf")])
def test_a_threshold_that_is_none_is_refused(threshold: float):
    with pytest.raises(RecipeError, match="give a number from 0"):
        BnbInt8(threshold=threshold)
