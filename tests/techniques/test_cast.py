"""fp32, bf16 and fp16: the model that `from_pretrained(dtype=…)` would have given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw
from featherweight.errors import UnsupportedError
from featherweight.machine import describe
from featherweight.recipe import registry

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(("recipe", "dtype"), DTYPES.items(), ids=DTYPES)
def test_a_cast_equals_loading_in_that_dtype(
    tiny: Path, recipe: str, dtype: torch.dtype, read: Any, answer: Any
):
    model, loaded = read(tiny), read(tiny, dtype=dtype)
    with fw.apply(model, recipe) as applied:
        expected = dict([*loaded.named_parameters(), *loaded.named_buffers()])
        found = dict([*model.named_parameters(), *model.named_buffers()])
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.dtype is expected[name].dtype, name
            assert torch.equal(tensor, expected[name]), name
        assert model.dtype is model.config.dtype is dtype
        assert torch.equal(answer(model), answer(loaded))
        assert applied.receipt.actual == {"dtype": str(dtype).removeprefix("torch.")}


def test_a_bf16_checkpoint_widens_exactly(tiny_llama: Path, read: Any):
    narrow = read(tiny_llama, dtype=torch.bfloat16)
    weights = {name: tensor.clone() for name, tensor in narrow.named_parameters()}
    with fw.apply(narrow, "fp32"):
        for name, tensor in narrow.named_parameters():
            assert tensor.dtype is torch.float32
            assert torch.equal(tensor, weights[name].float())


def test_rotary_frequencies_stay_in_float32(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    with fw.apply(model, "bf16"):
        assert model.model.rotary_emb.inv_freq.dtype is torch.float32


def test_what_already_has_the_dtype_is_kept(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    weight = model.model.norm.weight
    address = weight.data_ptr()
    applied = fw.apply(model, "fp32")
    assert {c.action for c in applied.receipt.changes} == {"kept"}
    assert {c.what for c in applied.receipt.changes} == {"already float32"}
    assert weight.data_ptr() == address


def test_modules_that_an_architecture_keeps_in_float32_stay(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    model._keep_in_fp32_modules_strict = {"model.norm"}
    model._keep_in_fp32_modules = {"input_layernorm"}
    with fw.apply(model, "bf16") as applied:
        assert model.model.norm.weight.dtype is torch.float32
        assert model.model.layers[0].input_layernorm.weight.dtype is torch.bfloat16
        kept = [c for c in applied.receipt.changes if c.action == "kept"]
        assert [(c.module, c.why) for c in kept] == [
            ("model.norm.weight", "the model keeps it in float32")
        ]
    with fw.apply(model, "fp16"):
        assert model.model.norm.weight.dtype is torch.float32
        assert model.model.layers[0].input_layernorm.weight.dtype is torch.float32


def test_a_buffer_of_the_checkpoint_is_cast_and_others_are_not():
    model = nn.Module()
    model.register_buffer("saved", torch.ones(2))
    model.register_buffer("made", torch.ones(2), persistent=False)
    model.register_buffer("count", torch.ones(2, dtype=torch.long))
    with fw.apply(model, "fp16"):
        assert (model.saved.dtype, model.made.dtype, model.count.dtype) == (
            torch.float16,
            torch.float32,
            torch.int64,
        )
    assert model.saved.dtype is torch.float32


def router() -> nn.Module:
    """A layer whose gate and counts want float32, as those of a mixture of experts."""
    model = nn.Module()
    model.mlp = nn.Module()
    model.mlp.gate = nn.Linear(4, 2)
    model.mlp.gate_proj = nn.Linear(4, 2, bias=False)
    model.mlp.register_buffer("score_correction", torch.ones(2))
    model.mlp.register_buffer("scale", torch.ones(2))
    return model


@pytest.mark.parametrize(
    ("listed", "kept"),
    [
        (["mlp.gate.weight"], {"mlp.gate.weight"}),
        (["gate"], {"mlp.gate.weight", "mlp.gate.bias", "mlp.gate_proj.weight"}),
        (["score_correction", "gate.bias"], {"mlp.score_correction", "mlp.gate.bias"}),
        (["mlp.*bias"], {"mlp.gate.bias"}),
        ([r"gate\.(weight|bias)$"], {"mlp.gate.weight", "mlp.gate.bias"}),
    ],
    ids=["dotted", "part", "buffer", "star", "regex"],
)
def test_what_is_kept_in_float32_is_searched_in_whole_names(listed: list[str], kept: set[str]):
    model = router()
    model._keep_in_fp32_modules_strict = listed
    with fw.apply(model, "bf16") as applied:
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        assert {name for name, t in tensors.items() if t.dtype is torch.float32} == kept
        lines = {c.module: (c.action, c.why) for c in applied.receipt.changes}
        assert lines.keys() == tensors.keys()
        for name, line in lines.items():
            why = "the model keeps it in float32"
            assert line == (("kept", why) if name in kept else ("changed", None)), name
    with fw.apply(model, "fp32") as applied:
        assert {(c.action, c.what) for c in applied.receipt.changes} == {
            ("kept", "already float32")
        }


@pytest.mark.parametrize("recipe", ["bnb-nf4", "bnb-int8"])
def test_codes_cannot_be_cast(tiny_llama: Path, recipe: str, read: Any, state: Any):
    model = read(tiny_llama)
    before = state(model)
    says = r"int8, which cannot be cast to bfloat16; set the dtype before the quantiser"
    with pytest.raises(UnsupportedError, match=says):
        fw.apply(model, f"{recipe}+bf16")
    assert state(model) == before


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int32], ids=str)
def test_parameters_that_are_no_plain_floats_are_refused(dtype: torch.dtype):
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(4).to(dtype), requires_grad=False)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UnsupportedError, match=f"'weight' is {name}, which cannot"):
        fw.apply(model, "bf16")


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_slow_dtype_is_explained_where_it_is_slow(name: str):
    technique = registry()[name]()
    machine = replace(describe(), features=(), onednn_limit=None)
    (note,) = technique.notes(machine, "cpu")
    assert "this processor has no" in note
    assert technique.notes(machine, "cuda:0") == []
