"""head=int8: the output head, and the embedding that it is tied to."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw
from featherweight.errors import RecipeError, UnsupportedError
from featherweight.nn import Int8Embedding, Int8Linear

RECIPES = ["int8:head=int8", "nf4:head=int8", "fp4:double:head=int8"]


def untied(tiny_config: Any) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(tie_word_embeddings=False)).eval()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tied_head_and_embedding_have_the_same_codes(
    recipe: str, tiny_llama: Path, tiny_gpt2: Path, read: Any, answer: Any
):
    for folder in (tiny_llama, tiny_gpt2):
        model = read(folder)
        weight, expected = model.lm_head.weight.clone(), answer(model)
        place = "transformer.wte" if folder is tiny_gpt2 else "model.embed_tokens"
        with fw.apply(model, recipe) as applied:
            head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
            assert type(head) is Int8Linear
            assert type(embedding) is Int8Embedding
            assert head.weight is embedding.weight
            assert head.absmax is embedding.absmax
            step = weight.abs().amax(1, keepdim=True) / 127
            assert ((head.dequantize() - weight).abs() <= step * 0.501).all()
            assert torch.equal(embedding(torch.arange(384)), head.dequantize())
            lines = {c.module: c for c in applied.receipt.changes}
            assert lines["lm_head"].bytes_before == 4 * weight.numel()
            assert lines["lm_head"].bytes_after == weight.numel() + 4 * 384
            assert lines[place].why == "tied: the same codes as lm_head"
            assert lines[place].bytes_before is lines[place].bytes_after is None
            found = answer(model)
            assert (found - expected).norm() < 0.6 * expected.norm()
            model.tie_weights()
            assert head.weight is embedding.weight
            assert torch.equal(answer(model), found)
            again = copy.deepcopy(model)
            assert again.get_output_embeddings().weight is again.get_input_embeddings().weight


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_untied_head_leaves_the_embedding(recipe: str, tiny_config: Any, answer: Any):
    model = untied(tiny_config)
    embedding = model.model.embed_tokens
    with fw.apply(model, recipe):
        assert type(model.lm_head) is Int8Linear
        assert model.model.embed_tokens is embedding


@torch.no_grad()
def test_the_head_is_near_the_original(tiny_config: Any):
    model = untied(tiny_config)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = model.lm_head(x)
    with fw.apply(model, "nf4:head=int8"):
        error = (model.lm_head(x) - expected).norm() / expected.norm()
        assert 0.001 < error < 0.02


def test_the_heads_threshold_is_that_of_the_technique(tiny_config: Any):
    model = untied(tiny_config)
    for recipe, threshold, per_batch in (
        ("int8:head=int8:threshold=3", 3.0, False),
        ("int8:head=int8:compat=bitsandbytes", 6.0, True),
        ("nf4:head=int8", 6.0, False),
    ):
        with fw.apply(model, recipe):
            assert model.lm_head.threshold == threshold
            assert model.lm_head.per_batch is per_batch


def test_the_head_alone_can_be_quantised(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    with fw.apply(model, "int8:head=int8:skip=layers") as applied:
        changed = [c.module for c in applied.receipt.changes if c.action == "changed"]
        assert changed == ["lm_head", "model.embed_tokens"]


def test_rest_is_what_a_light_embedding_gives(tiny_llama: Path, read: Any, answer: Any):
    model = read(tiny_llama)
    with fw.apply(model, "nf4:head=int8:rest=bf16"):
        assert model.model.embed_tokens(torch.tensor([1])).dtype is torch.bfloat16
        assert answer(model).dtype is torch.bfloat16


def test_float32_arithmetic_is_what_it_gives_too(tiny_llama: Path, read: Any, answer: Any):
    model = read(tiny_llama, dtype=torch.bfloat16)
    with fw.apply(model, "int8:head=int8"):
        assert model.model.embed_tokens(torch.tensor([1])).dtype is torch.bfloat16
        with fw.apply(model, "bf16:compute=fp32", on_fallback="warn") as applied:
            assert "no linear layer or embedding" in applied.receipt.notes[0]
    with fw.apply(model, "nf4:head=int8:rest=fp32"):
        assert model.model.embed_tokens(torch.tensor([1])).dtype is torch.float32
        assert answer(model).dtype is torch.float32
    assert answer(model).dtype is torch.bfloat16


def test_masked_language_models_have_a_head_too(answer: Any):
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 384, "hidden_size": 64, "num_hidden_layers": 1}
    config = BertConfig(**sizes, num_attention_heads=4, intermediate_size=128)
    model = BertForMaskedLM(config).eval()
    expected = answer(model)
    with fw.apply(model, "int8:head=int8"):
        decoder = model.cls.predictions.decoder
        assert type(decoder) is Int8Linear
        assert decoder.bias is model.cls.predictions.bias
        assert decoder.weight is model.bert.embeddings.word_embeddings.weight
        assert (answer(model) - expected).norm() < 0.1 * expected.norm()
    assert torch.equal(answer(model), expected)


def test_a_model_without_a_head_is_refused(tiny_bert: Path, read: Any):
    for model in (read(tiny_bert), nn.Sequential(nn.Linear(4, 4))):
        with pytest.raises(
            UnsupportedError, match=r"no output head that is .*; leave 'head=int8' out"
        ):
            fw.apply(model, "int8:head=int8")


def test_two_heads_on_one_weight_share_the_codes():
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 384, "hidden_size": 64, "num_hidden_layers": 1}
    config = BertConfig(**sizes, num_attention_heads=4, intermediate_size=128)
    model = BertForMaskedLM(config).eval()
    model.second = nn.Linear(64, 384)
    model.second.weight = model.cls.predictions.decoder.weight
    bias = model.second.bias
    with fw.apply(model, "int8:head=int8:threshold=3"):
        first, second = model.cls.predictions.decoder, model.second
        assert first.weight is second.weight
        assert first.absmax is second.absmax
        assert (second.threshold, second.bias) == (3.0, bias)


@pytest.mark.parametrize("skip", ["lm_head", "embed_tokens"])
def test_skip_of_the_head_contradicts(tiny_llama: Path, skip: str, read: Any):
    says = rf"skip= leaves '.*{skip}' alone and head=int8 quantises it; keep one"
    with pytest.raises(RecipeError, match=says):
        fw.apply(read(tiny_llama), f"nf4:head=int8:skip={skip}")


class Scaled(nn.Embedding):
    """As in Gemma: more than a look-up."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * 8


def test_an_embedding_that_does_more_is_left(tiny_config: Any, answer: Any):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(tiny_config()).eval()
    model.model.embed_tokens = Scaled(384, 64)
    model.tie_weights()
    says = r"the weight of 'lm_head' is also used by model.embed_tokens, which is no plain"
    with pytest.raises(UnsupportedError, match=says):
        fw.apply(model, "int8:head=int8")
    expected = answer(model)
    with fw.apply(model, "bf16:compute=fp32") as applied:
        assert type(model.model.embed_tokens) is Scaled
        assert type(model.lm_head) is nn.Linear
        (line,) = [c for c in applied.receipt.changes if c.module == "lm_head"]
        assert (line.action, line.why) == (
            "skipped",
            "its weight is also used by model.embed_tokens",
        )
        assert (answer(model) - expected).norm() < 0.03 * expected.norm()


def test_a_tie_that_transformers_does_not_know_is_left():
    model = nn.ModuleDict({"wte": nn.Embedding(32, 64), "up": nn.Linear(64, 64)})
    model["head"] = nn.Linear(64, 32, bias=False)
    model["head"].weight = model["wte"].weight
    with fw.apply(model, "int8") as applied:
        assert type(model["head"]) is nn.Linear
        lines = {c.module: (c.action, c.why) for c in applied.receipt.changes}
        assert lines == {
            "up": ("changed", None),
            "head": ("skipped", "its weight is also used by wte"),
        }
