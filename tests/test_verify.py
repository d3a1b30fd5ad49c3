"""The check that a changed model still answers as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw
from featherweight import verify
from featherweight.errors import UnsupportedError, VerificationError
from featherweight.recipe import Recipe, registry
from featherweight.techniques import flash


@pytest.mark.parametrize("recipe", [*registry(), "bf16+bnb-nf4:double+flash"])
def test_what_works_passes_on_both_paddings(tiny: Path, recipe: str, read: Any, state: Any):
    if recipe == "fastpath" and "bert" in str(tiny):
        pytest.skip("it knows decoders alone")
    model = read(tiny)
    before = state(model)
    with fw.apply(model, recipe, verify=True) as applied:
        found = applied.receipt.verified
        assert found.keys() == {"right", "left"}
        limit = verify.tolerance(model, Recipe.parse(recipe))
        assert all(0 <= value <= limit for value in found.values())
        assert (max(found.values()) == 0) is (
            recipe in ("fp32", "sdpa", "flash", "lora", "checkpointing")
        )
        assert "verified, relative difference of outputs: right" in str(applied.receipt)
    assert state(model) == before


def test_without_asking_nothing_is_verified(tiny_llama: Path, read: Any):
    assert fw.apply(read(tiny_llama), "bf16").receipt.verified is None


def test_a_mask_that_is_ignored_is_caught_and_undone(
    tiny: Path, read: Any, state: Any, monkeypatch: pytest.MonkeyPatch
):
    model = read(tiny)
    before = state(model)
    right = flash.flash_attention

    def without_mask(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        return right(module, query, key, value, None, **more)

    monkeypatch.setattr(flash, "flash_attention", without_mask)
    with pytest.raises(VerificationError, match=r"changes outputs by 0.\d+ of their spread"):
        fw.apply(model, "flash", verify=True)
    assert state(model) == before


def break_weight(model: Any, monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """bf16 that spoils one of the weights it casts."""
    kind = registry()["bf16"]
    whole = kind.apply

    def spoiling(self: Any, model: Any, ledger: Any) -> None:
        whole(self, model, ledger)
        ledger.replace_data(model.model.norm.weight, change(model.model.norm.weight.data))

    monkeypatch.setattr(kind, "apply", spoiling)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weight: weight * float("nan"), "makes outputs that are not finite .*right"),
        (lambda weight: weight * float("inf"), "makes outputs that are not finite"),
        (lambda weight: -weight, "changes outputs by 2 of their spread .*more than the 0.061"),
        (lambda weight: weight * 1.1, "changes outputs by 0.1"),
    ],
    ids=["nan", "inf", "sign", "scale"],
)
def test_broken_outputs_are_caught_and_undone(
    tiny_llama: Path,
    change: Any,
    says: str,
    read: Any,
    state: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    model = read(tiny_llama)
    before = state(model)
    break_weight(model, monkeypatch, change)
    with pytest.raises(VerificationError, match=says):
        fw.apply(model, "bf16", verify=True)
    assert state(model) == before


def test_a_model_of_nan_cannot_be_verified(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(VerificationError, match=r"not finite .*before any change"):
        fw.apply(model, "bf16", verify=True)
    assert model.dtype is torch.float32


def test_batches_are_padded_on_each_side():
    class Model(nn.Linear):
        class config:
            vocab_size = 50

            @classmethod
            def get_text_config(cls) -> Any:
                return cls

    made = verify.batches(Model(1, 1))
    assert made["right"]["attention_mask"].sum(1).tolist() == [32, 17, 5]
    assert made["right"]["attention_mask"][:, :5].all()
    assert made["left"]["attention_mask"][:, -5:].all()
    for side in made.values():
        assert side["input_ids"].shape == side["attention_mask"].shape == (3, 32)
        assert side["input_ids"].max() < 50


def test_outputs_are_of_real_tokens_only(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    found = verify.outputs(model)
    assert found["right"].shape == found["left"].shape == (32 + 17 + 5, 384)
    inputs = verify.batches(model)["right"]
    with torch.no_grad():
        first = model(**inputs).logits[0]
    torch.testing.assert_close(found["right"][:32], first)


def test_outputs_leave_every_training_flag(tiny_gpt2: Path, read: Any, state: Any):
    model = read(tiny_gpt2)
    model.transformer.h[1].train()
    before = {name: module.training for name, module in model.named_modules()}
    first, second = verify.outputs(model), verify.outputs(model)
    assert torch.equal(first["left"], second["left"])  # no dropout meanwhile
    assert {name: module.training for name, module in model.named_modules()} == before


def test_outputs_leave_no_inference_tensors(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    with fw.apply(model, "bnb-nf4", verify=True):
        assert not any(p.is_inference() for p in model.parameters())


def test_a_plain_module_cannot_be_verified():
    with pytest.raises(UnsupportedError, match="verify cannot make inputs for a Linear"):
        fw.apply(nn.Linear(2, 2), "bf16", verify=True)


def test_a_classifier_of_as_many_labels_as_tokens_is_compared_whole(tiny_bert: Path):
    from transformers import BertForSequenceClassification

    model = BertForSequenceClassification.from_pretrained(tiny_bert, num_labels=32).eval()
    assert verify.outputs(model)["right"].shape == (3, 32)


def test_narrow_originals_are_allowed_their_rounding(tiny_llama: Path, read: Any):
    techniques = Recipe.parse("flash")
    wide = verify.tolerance(read(tiny_llama), techniques)
    narrow = verify.tolerance(read(tiny_llama, dtype=torch.bfloat16), techniques)
    assert wide == pytest.approx(2e-3)
    assert narrow == pytest.approx(0.061)
