"""The bitsandbytes techniques: what transformers makes at loading, on a loaded model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw
from featherweight.errors import MissingExtraError, RecipeError, UnsupportedError
from featherweight.machine import describe
from featherweight.recipe import registry

pytest.importorskip("bitsandbytes")

NAMES = ["bnb-int8", "bnb-nf4", "bnb-fp4"]
CONFIGS = {
    "bnb-int8": {"load_in_8bit": True},
    "bnb-int8:threshold=0": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "bnb-nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "bnb-fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "bnb-nf4:double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
}


def stock(read: Any, folder: Path, recipe: str, **more: Any) -> Any:
    """transformers' own from_pretrained(quantization_config=…), with the model's dtype."""
    from transformers import BitsAndBytesConfig

    config = CONFIGS[recipe] | more
    if "load_in_4bit" in config:
        config = {"bnb_4bit_compute_dtype": torch.float32} | config
    return read(folder, quantization_config=BitsAndBytesConfig(**config), dtype=torch.float32)


def layers(model: Any) -> dict[str, nn.Module]:
    """The quantised layers by name."""
    kinds = ("Linear4bit", "Linear8bitLt")
    return {name: m for name, m in model.named_modules() if type(m).__name__ in kinds}


def codes(model: Any) -> dict[str, torch.Tensor]:
    """What a checkpoint of the model holds: weights, scales, nested scales."""
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("recipe", CONFIGS)
def test_codes_modules_and_outputs_are_those_of_from_pretrained(
    tiny: Path, recipe: str, read: Any, answer: Any
):
    model, expected = read(tiny), stock(read, tiny, recipe)
    with fw.apply(model, recipe):
        assert layers(model).keys() == layers(expected).keys()
        mine, theirs = codes(model), codes(expected)
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name].dtype is value.dtype, name
            assert torch.equal(mine[name], value), name
        assert torch.equal(answer(model), answer(expected))


@pytest.mark.parametrize("recipe", ["bnb-int8", "bnb-nf4:double"])
def test_transformers_takes_the_model_for_one_it_quantised(
    tiny_llama: Path, recipe: str, read: Any
):
    model, expected = read(tiny_llama), stock(read, tiny_llama, recipe)
    with fw.apply(model, recipe):
        for name in ("is_quantized", "quantization_method"):
            assert getattr(model, name) == getattr(expected, name)
        mine = model.config.quantization_config.to_dict()
        theirs = expected.config.quantization_config.to_dict()
        # What was left alone is written down, so that a reader leaves it alone too.
        assert mine.pop("llm_int8_skip_modules") == ["lm_head"]
        theirs.pop("llm_int8_skip_modules")
        assert mine == theirs
        with pytest.raises(ValueError, match=r"cast|dtype"):
            model.half()


@pytest.mark.parametrize(
    "recipe", ["bnb-int8", "bnb-nf4:double", "bnb-fp4:blocksize=32", "bnb-nf4:skip=up_proj"]
)
def test_what_is_saved_loads_without_us_to_the_same_outputs(
    tiny_llama: Path, recipe: str, read: Any, answer: Any, tmp_path: Path
):
    model = read(tiny_llama)
    with fw.apply(model, recipe):
        model.save_pretrained(tmp_path)
        expected = answer(model)
        again = read(tmp_path)
        assert layers(again).keys() == layers(model).keys()
        assert torch.equal(answer(again), expected)


@pytest.mark.parametrize("name", NAMES)
def test_the_output_head_is_always_left(tiny_llama: Path, name: str, read: Any):
    model = read(tiny_llama)
    for recipe in (name, f"{name}:skip=mlp"):
        with fw.apply(model, recipe) as applied:
            assert type(model.lm_head) is nn.Linear
            lines = {c.module: (c.action, c.why) for c in applied.receipt.changes}
            assert lines["lm_head"] == ("skipped", "bitsandbytes always leaves it")


def test_an_untied_head_is_left_too(read: Any, tmp_path: Path, tiny_config: Any):
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM(tiny_config(tie_word_embeddings=False)).eval()
    model.save_pretrained(tmp_path)
    with fw.apply(model, "bnb-nf4"):
        assert type(model.lm_head) is nn.Linear
        assert layers(model).keys() == layers(stock(read, tmp_path, "bnb-nf4")).keys()


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("down_proj", {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}),
        ("layers.1.mlp", {f"model.layers.1.mlp.{p}_proj" for p in ("up", "gate", "down")}),
        ("*.0.self_attn.[qk]_proj", {f"model.layers.0.self_attn.{p}_proj" for p in "qk"}),
    ],
)
def test_skip_leaves_alone_what_it_matches(
    tiny_llama: Path, pattern: str, left: set[str], read: Any
):
    model = read(tiny_llama)
    with fw.apply(model, f"bnb-nf4:skip={pattern}") as applied:
        skipped = [c for c in applied.receipt.changes if c.action == "skipped"]
        assert {c.module for c in skipped if c.why == "skip="} == left
        assert layers(model).keys().isdisjoint(left)
        assert len(layers(model)) == 14 - len(left)


def test_a_skip_pattern_that_fits_nothing_is_an_error(tiny_llama: Path, read: Any):
    with pytest.raises(RecipeError, match="skip=c_fc fits no module of the model"):
        fw.apply(read(tiny_llama), "bnb-nf4:skip=lm_head,c_fc")


@pytest.mark.parametrize("name", NAMES)
def test_the_receipt_names_every_linear_module(tiny: Path, name: str, read: Any):
    model = read(tiny)
    linear = {n for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    with fw.apply(model, name) as applied:
        changes = applied.receipt.changes
        assert {c.module for c in changes} == linear
        assert len(changes) == len(linear)
        assert {c.module for c in changes if c.action == "changed"} == layers(model).keys()
        assert all(c.why for c in changes if c.action == "skipped")
        assert all(c.bytes_after < c.bytes_before for c in changes if c.action == "changed")


def test_nothing_to_convert_is_an_error(tiny_llama: Path, read: Any, state: Any):
    model = read(tiny_llama)
    before = state(model)
    says = r"LlamaForCausalLM has no linear layer .* \(skip=layers\); shorten skip="
    with pytest.raises(UnsupportedError, match=says):
        fw.apply(model, "bnb-nf4:skip=layers")
    assert state(model) == before
    for plain in (nn.LayerNorm(4), nn.Linear(64, 64)):  # a bare layer has no place to be replaced
        with pytest.raises(UnsupportedError, match="has no linear layer that bitsandbytes"):
            fw.apply(plain, "bnb-int8")


def test_a_module_that_is_not_transformers_can_be_quantised():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    with fw.apply(model.eval(), "bnb-nf4"), torch.no_grad():
        assert layers(model).keys() == {"0", "2"}
        assert (model(x) - expected).norm() < 0.3 * expected.norm()
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_at_two_places_is_converted_once(name: str, state: Any):
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"one": shared, "more": nn.Sequential(nn.ReLU(), shared)}).eval()
    before = state(model)
    with fw.apply(model, name) as applied:
        assert model["one"] is model["more"][1]
        assert layers(model).keys() == {"one"}
        lines = [(c.module, c.action, c.why) for c in applied.receipt.changes]
        assert lines == [("one", "changed", "also at more.1")]
    assert model["one"] is model["more"][1] is shared
    assert state(model) == before


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_quantised_whole_has_nothing_else(name: str, state: Any):
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).eval()
    before = state(model)
    applied = fw.apply(model, name)
    assert layers(model).keys() == {"0"}
    with torch.no_grad():
        assert model(torch.ones(2, 64)).isfinite().all()
    applied.undo()
    assert state(model) == before


@pytest.mark.parametrize("first", ["bnb-int8", "bnb-nf4"])
def test_a_second_quantisation_is_refused(tiny_llama: Path, first: str, read: Any):
    model = read(tiny_llama)
    with (
        fw.apply(model, first),
        pytest.raises(UnsupportedError, match=r"is quantised already .*load it without"),
    ):
        fw.apply(model, "bnb-nf4")
    fw.apply(model, "bnb-nf4").undo()


def test_what_transformers_quantised_is_refused(tiny_llama: Path, read: Any):
    model = stock(read, tiny_llama, "bnb-nf4")
    with pytest.raises(UnsupportedError, match="is quantised already"):
        fw.apply(model, "bnb-int8")
    with pytest.raises(UnsupportedError, match="is uint8, which cannot be cast"):
        fw.apply(model, "bf16")


@pytest.mark.parametrize("recipe", ["bnb-int8", "bnb-nf4:compute=bf16", "bf16+bnb-nf4"])
def test_biases_are_not_cast_in_place(tiny: Path, recipe: str, read: Any, answer: Any):
    model = read(tiny)
    biases = {n: (p, p.clone()) for n, p in model.named_parameters() if n.endswith("bias")}
    with fw.apply(model, recipe):
        answer(model)
    for name, parameter in model.named_parameters():
        if name in biases:
            assert parameter is biases[name][0]
            assert parameter.dtype is torch.float32
            assert torch.equal(parameter, biases[name][1])


def test_conv1d_weights_are_quantised_transposed(tiny_gpt2: Path, read: Any):
    model = read(tiny_gpt2)
    with fw.apply(model, "bnb-int8") as applied:
        layer = model.transformer.h[0].attn.c_attn
        assert tuple(layer.weight.shape) == (layer.out_features, layer.in_features) == (192, 64)
        assert {c.what for c in applied.receipt.changes if c.action == "changed"} == {
            "Conv1D → Linear8bitLt"
        }


def test_expert_weights_are_named_as_skipped(tiny_config: Any, state: Any):
    from transformers import MixtralConfig, MixtralForCausalLM

    shared = tiny_config().to_dict()
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    keep += ("num_attention_heads", "num_key_value_heads")
    config = MixtralConfig(num_local_experts=4, **{key: shared[key] for key in keep})
    model = MixtralForCausalLM(config).eval()
    experts = {name for name, p in model.named_parameters() if p.ndim == 3}
    assert experts
    before = state(model)
    with fw.apply(model, "bnb-nf4") as applied:
        lines = {c.module: (c.action, c.what, c.why) for c in applied.receipt.changes}
        why = "bitsandbytes has no layer for them"
        assert all(lines[name] == ("skipped", "3-D expert weights", why) for name in experts)
        assert "model.layers.0.self_attn.q_proj" in layers(model)
    assert state(model) == before


@pytest.mark.parametrize("name", NAMES)
def test_without_bitsandbytes_the_install_command_is_named(
    tiny_llama: Path, name: str, read: Any, monkeypatch: pytest.MonkeyPatch
):
    model = read(tiny_llama)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'featherweight\[bitsandbytes\]'"):
        fw.apply(model, name)


@pytest.mark.parametrize("name", NAMES)
def test_slowness_on_a_cpu_is_explained(name: str):
    technique = registry()[name]()
    for features in ((), ("avx512f", "avx512_bf16")):
        (note,) = technique.notes(replace(describe(), features=features), "cpu")
        assert "bitsandbytes" in note
    assert technique.notes(describe(), "cuda:0") == []


def test_training_mode_is_taken_over(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    model.model.layers[0].train()
    with fw.apply(model, "bnb-nf4"):
        assert {m.training for m in layers(model.model.layers[0]).values()} == {True}
        assert {m.training for m in layers(model.model.layers[1]).values()} == {False}
