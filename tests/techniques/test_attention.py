"""eager and sdpa really switch; models that cannot are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import featherweight as fw
from featherweight.errors import UnsupportedError


class Operations(TorchDispatchMode):
    """Names of the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def fused(names: set[str]) -> set[str]:
    return {name for name in names if "scaled_dot_product" in name}


def test_eager_and_sdpa_run_different_kernels_to_the_same_end(tiny: Path, read: Any, answer: Any):
    model = read(tiny)
    expected = answer(model)
    for recipe in ("eager", "sdpa"):
        with fw.apply(model, recipe) as applied, Operations() as ran:
            torch.testing.assert_close(answer(model), expected, rtol=1e-4, atol=1e-4)
            assert model.config._attn_implementation == recipe
            assert applied.receipt.actual == {"attention": recipe}
        assert bool(fused(ran.names)) is (recipe == "sdpa")
    assert model.config._attn_implementation == "sdpa"


def test_the_receipt_says_what_was_switched_and_what_was_so_already(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    applied = fw.apply(model, "sdpa")
    (line,) = applied.receipt.changes
    assert (line.module, line.action, line.what) == ("LlamaConfig", "kept", "already sdpa")
    (line,) = fw.apply(model, "eager").receipt.changes
    assert (line.module, line.action, line.what) == ("LlamaConfig", "changed", "sdpa → eager")


def test_only_eager_returns_attention_weights(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    ids = torch.ones(1, 5, dtype=torch.long)
    with fw.apply(model, "eager"):
        first = model(ids, output_attentions=True).attentions[0]
        assert first.shape == (1, 4, 5, 5)
        torch.testing.assert_close(first.sum(-1), torch.ones(1, 4, 5))


def test_a_model_of_its_own_attention_is_refused(state: Any):
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=384, hidden_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = DebertaV2Model(config).eval()
    before = state(model)
    for recipe in ("sdpa", "flash", "fp16+eager"):
        with pytest.raises(UnsupportedError, match="does not go through transformers' attention"):
            fw.apply(model, recipe)
    applied = fw.apply(model, "fp16+sdpa", on_fallback="warn")
    assert applied.receipt.notes[0].startswith("sdpa left out: DebertaV2Model does not go through")
    applied.undo()
    assert state(model) == before


def test_an_implementation_that_the_model_has_not_is_refused(state: Any):
    from transformers import MambaConfig, MambaModel

    model = MambaModel(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1))
    implementation = model.config._attn_implementation
    for recipe in ("sdpa", "flash"):
        with pytest.raises(UnsupportedError, match="MambaModel"):
            fw.apply(model, recipe)
    assert model.config._attn_implementation == implementation


def test_submodels_are_switched_too(tiny_llama: Path, read: Any):
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    small["num_attention_heads"] = 2
    config = CLIPConfig(
        text_config=small | {"vocab_size": 64},
        vision_config=small | {"image_size": 8, "patch_size": 4},
    )
    model = CLIPModel(config)
    parts = [model.config, model.text_model.config, model.vision_model.config]
    with fw.apply(model, "eager") as applied:
        assert [part._attn_implementation for part in parts] == ["eager"] * 3
        assert len(applied.receipt.changes) == 3
    assert [part._attn_implementation for part in parts] == ["sdpa"] * 3


def test_a_plain_module_is_refused():
    with pytest.raises(UnsupportedError, match="attention techniques need a transformers model"):
        fw.apply(nn.Linear(2, 2), "sdpa")
