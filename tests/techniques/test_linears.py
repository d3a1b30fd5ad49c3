"""Which layers our techniques choose, what they refuse, and what the receipt says of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw
from featherweight.errors import RecipeError, UnsupportedError
from featherweight.nn import FourBitLinear, HalfLinear, Int8Linear
from featherweight.tensors import held

KINDS = {
    "int8": Int8Linear,
    "int8:compat=bitsandbytes": Int8Linear,
    "nf4": FourBitLinear,
    "nf4:double:exact": FourBitLinear,
    "fp4:blocksize=128": FourBitLinear,
}
HALVES = {"bf16:compute=fp32": HalfLinear, "fp16:compute=fp32": HalfLinear}


@pytest.mark.parametrize("recipe", KINDS)
def test_the_receipt_names_every_linear_module(
    tiny: Path, recipe: str, read: Any, light: Any, linears: Any
):
    model = read(tiny)
    names = set(linears(model))
    with fw.apply(model, recipe) as applied:
        changes = applied.receipt.changes
        assert sorted(c.module for c in changes) == sorted(names)
        assert {c.module for c in changes if c.action == "changed"} == light(model).keys()
        assert {c.what.split(" → ")[1] for c in changes if c.action == "changed"} == {
            KINDS[recipe].__name__
        }
        assert all(c.why for c in changes if c.action == "skipped")
        assert "quantised products" in applied.receipt.actual


@pytest.mark.parametrize("recipe", ["int8", "nf4", "fp4"])
def test_skip_and_the_head_are_left(tiny_llama: Path, recipe: str, read: Any, linears: Any):
    model = read(tiny_llama)
    with fw.apply(model, f"{recipe}:skip=down_proj,layers.1.self_attn") as applied:
        left = {n for n in linears(model) if n != "lm_head"}
        assert left == {
            *(f"model.layers.{i}.mlp.down_proj" for i in (0, 1)),
            *(f"model.layers.1.self_attn.{p}_proj" for p in "qkvo"),
        }
        why = {c.module: c.why for c in applied.receipt.changes if c.action == "skipped"}
        assert why == dict.fromkeys(left, "skip=") | {
            "lm_head": "the output head; head=int8 quantises it"
        }
    with pytest.raises(RecipeError, match="skip=c_fc fits no module of the model"):
        fw.apply(model, f"{recipe}:skip=c_fc")


@pytest.mark.parametrize("recipe", ["int8", "nf4"])
def test_nothing_to_convert_is_an_error(tiny_llama: Path, recipe: str, read: Any, state: Any):
    model = read(tiny_llama)
    before = state(model)
    says = r"LlamaForCausalLM has no linear layer .* Featherweight would convert \(skip=layers\)"
    with pytest.raises(UnsupportedError, match=says):
        fw.apply(model, f"{recipe}:skip=layers")
    for plain in (nn.LayerNorm(4), nn.Linear(64, 64)):
        with pytest.raises(UnsupportedError, match="has no linear layer that Featherweight"):
            fw.apply(plain, recipe)
    applied = fw.apply(model, f"{recipe}:skip=layers", on_fallback="warn")
    assert "left out: LlamaForCausalLM has no linear layer" in applied.receipt.notes[0]
    applied.undo()
    assert state(model) == before


@pytest.mark.parametrize("second", ["int8", "nf4", "bnb-nf4"])
@pytest.mark.parametrize("first", ["int8", "fp4", "bnb-int8"])
def test_a_second_quantisation_is_refused(tiny_llama: Path, first: str, second: str, read: Any):
    if "bnb" in first + second:
        pytest.importorskip("bitsandbytes")
    model = read(tiny_llama)
    with fw.apply(model, first):
        with pytest.raises(UnsupportedError, match=r"is quantised already \(.+\); load it without"):
            fw.apply(model, second)
        with pytest.raises(UnsupportedError, match=r"int8, which cannot be cast.*'nf4:rest=bf16'"):
            fw.apply(model, "bf16")
    fw.apply(model, second).undo()


def test_quantisers_are_of_one_slot():
    with pytest.raises(RecipeError, match="'nf4' and 'int8' both decide the weights"):
        fw.Recipe.parse("nf4+int8")
    with pytest.raises(RecipeError, match="'int8' and 'bnb-int8' both decide the weights"):
        fw.Recipe.parse("int8+bnb-int8")


@pytest.mark.parametrize("recipe", ["int8", "nf4:double", "fp4", "bf16:compute=fp32"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(
    tiny_llama: Path, recipe: str, value: float, read: Any
):
    model = copy.deepcopy(read(tiny_llama))
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = value
    before = dict(model.named_modules())
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.1\.mlp\.up_proj.*cannot be"):
        fw.apply(model, recipe)
    assert all(module is before[name] for name, module in model.named_modules())
    if recipe != "bf16:compute=fp32":
        fw.apply(model, f"{recipe}:skip=layers.1.mlp.up_proj").undo()


@pytest.mark.parametrize("recipe", KINDS | HALVES)
def test_a_layer_at_two_places_is_converted_and_listed_once(recipe: str, state: Any):
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"one": shared, "more": nn.Sequential(nn.ReLU(), shared)}).eval()
    before = state(model)
    with fw.apply(model, recipe) as applied:
        assert model["one"] is model["more"][1] is not shared
        (line,) = [c for c in applied.receipt.changes if "Linear" in c.what]
        assert (line.module, line.why) == ("one", "also at more.1")
        assert line.bytes_before == held(shared).total
    assert state(model) == before
    if recipe in KINDS:
        with pytest.raises(UnsupportedError, match="has no linear layer"):
            fw.apply(model, f"{recipe}:skip=more")


@pytest.mark.parametrize("recipe", KINDS | HALVES)
def test_expert_weights_are_named_with_their_bytes(
    recipe: str, tiny_config: Any, answer: Any, light: Any
):
    from transformers import MixtralConfig, MixtralForCausalLM

    shared = tiny_config().to_dict()
    keep = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    keep += ("num_attention_heads", "num_key_value_heads", "initializer_range")
    torch.manual_seed(0)
    config = MixtralConfig(num_local_experts=4, **{key: shared[key] for key in keep})
    model = MixtralForCausalLM(config).eval()
    experts = {name: p for name, p in model.named_parameters() if p.ndim == 3}
    expected = answer(model)
    with fw.apply(model, recipe) as applied:
        lines = {c.module: c for c in applied.receipt.changes if c.what == "3-D expert weights"}
        assert lines.keys() == experts.keys()
        for name, line in lines.items():
            assert line.action == "skipped"
            assert line.why.endswith("has no layer for them")
            assert line.bytes_before == line.bytes_after == experts[name].nbytes
        assert len(light(model)) >= 8
        assert (answer(model) - expected).norm() < 0.6 * expected.norm()


@pytest.mark.parametrize("recipe", ["int8", "nf4", "bf16:compute=fp32"])
def test_weights_that_are_not_in_memory_are_refused(recipe: str):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(UnsupportedError, match=r"'0' is on the meta device.*without offloading"):
        fw.apply(model, recipe)


def test_convolutions_and_positions_are_no_experts():
    model = nn.Module()
    model.conv, model.up = nn.Conv1d(4, 4, 3), nn.Linear(32, 32)
    model.positions = nn.Parameter(torch.zeros(1, 5, 32))
    with fw.apply(model, "int8") as applied:
        assert [c.module for c in applied.receipt.changes] == ["up"]
