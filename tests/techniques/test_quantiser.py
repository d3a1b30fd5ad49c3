"""What `int8`, `nf4`, `fp4` and `compute=fp32` do alike to a model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw
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
HEADS = {"int8:head=int8:rest=bf16": Int8Linear, "nf4:double:head=int8": FourBitLinear}


@pytest.mark.parametrize("recipe", KINDS | HALVES)
def test_layers_hold_the_models_weights_and_answers_are_near(
    tiny: Path, recipe: str, read: Any, answer: Any, light: Any, linears: Any
):
    model = read(tiny)
    expected, before = answer(model), linears(model)
    with fw.apply(model, recipe, verify=True):
        converted = light(model)
        assert converted.keys() == before.keys() - ({"lm_head"} if recipe in KINDS else set())
        assert {type(layer) for layer in converted.values()} == {(KINDS | HALVES)[recipe]}
        for name, layer in converted.items():
            old = before[name]
            weight = old.weight if isinstance(old, nn.Linear) else old.weight.T
            error = (layer.dequantize() - weight).norm() / weight.norm()
            assert error < (0.14 if isinstance(layer, FourBitLinear) else 0.01), name
            assert layer.bias is old.bias
            assert (layer.out_features, layer.in_features) == tuple(weight.shape)
        error = (answer(model) - expected).norm() / expected.norm()
        assert 1e-5 < error < {FourBitLinear: 0.6, Int8Linear: 0.15, HalfLinear: 0.03}[type(layer)]


@pytest.mark.parametrize("recipe", KINDS | HALVES)
@pytest.mark.parametrize("how", ["kept", "spilled"])
def test_undo_restores_every_bit(
    tiny: Path, recipe: str, how: str, read: Any, state: Any, tmp_path: Path, light: Any
):
    model = read(tiny)
    if how == "spilled":
        model = copy.deepcopy(model)  # no longer views of the mapped checkpoint
    before = state(model)
    applied = fw.apply(model, recipe, spill_dir=tmp_path if how == "spilled" else None)
    assert light(model)
    if how == "spilled":
        assert list(tmp_path.rglob("*.safetensors"))
    applied.undo()
    assert state(model) == before


@pytest.mark.parametrize("recipe", HEADS)
def test_undo_restores_ties_and_dtypes(tiny_llama: Path, recipe: str, read: Any, state: Any):
    model = read(tiny_llama)
    before = state(model)
    with fw.apply(model, recipe):
        assert type(model.lm_head) is Int8Linear
    assert state(model) == before
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("recipe", KINDS | HALVES | HEADS)
def test_memory_is_counted_in_full(tiny_llama: Path, recipe: str, read: Any):
    model = read(tiny_llama)
    with fw.apply(model, recipe) as applied:
        assert model.get_memory_footprint() == held(model).total == applied.receipt.bytes_after
        lines = [c for c in applied.receipt.changes if c.bytes_before is not None]
        saved = sum(c.bytes_before - c.bytes_after for c in lines)
        assert saved == applied.receipt.bytes_before - applied.receipt.bytes_after > 0


def test_bytes_are_those_of_the_formats(tiny_llama: Path, read: Any, linears: Any):
    model = read(tiny_llama)
    weights = sum(m.weight.numel() for m in linears(model.model).values())
    rows = sum(m.weight.shape[0] for m in linears(model.model).values())
    rest = model.get_memory_footprint() - 4 * weights
    layers = 14
    expected = {
        "int8": weights + 4 * rows,
        "nf4": weights // 2 + weights // 64 * 4 + layers * 64,
        "nf4:double": weights // 2 + weights // 64 + layers * (64 + 1024 + 4),
        "fp4:blocksize=256": weights // 2 + weights // 256 * 4 + layers * 64,
    }
    for recipe, size in expected.items():
        with fw.apply(model, recipe):
            assert model.get_memory_footprint() - rest == size, recipe


@pytest.mark.parametrize("recipe", KINDS | HALVES)
def test_any_module_can_have_it(recipe: str, state: Any, light: Any):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32)).eval()
    x = torch.randn(4, 3, 64)
    with torch.no_grad():
        expected = model(x)
        before = state(model)
        with fw.apply(model, recipe):
            assert light(model).keys() == {"0", "2"}
            assert (model(x) - expected).norm() < 0.2 * expected.norm()
        assert torch.equal(model(x), expected)
    assert state(model) == before


@pytest.mark.parametrize("recipe", ["int8", "nf4", "bf16:compute=fp32"])
def test_the_model_generates_copies_and_pickles(tiny_llama: Path, recipe: str, read: Any):
    model = read(tiny_llama)
    ids = torch.arange(2, 12)[None]
    with fw.apply(model, recipe):
        written = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        assert written.shape == (1, 18)
        with torch.no_grad():
            logits = model(written).logits
            for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                assert torch.equal(again(written).logits, logits)
        greedy = logits[0, 9:-1].argmax(-1)  # the cache gives what the whole sequence gives
        assert (written[0, 10:] == greedy).float().mean() > 0.8


@pytest.mark.parametrize("recipe", ["int8", "nf4:rest=fp32", "bf16:compute=fp32"])
def test_training_reaches_what_is_left(tiny_llama: Path, recipe: str, read: Any, light: Any):
    model = read(tiny_llama)
    with fw.apply(model, recipe):
        model.train()
        out = model(torch.arange(12)[None] + 2, labels=torch.arange(12)[None] + 2)
        out.loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert {n for n in gradients if "norm" in n} == {
            "model.norm.weight",
            *(
                f"model.layers.{i}.{n}_layernorm.weight"
                for i in (0, 1)
                for n in ("input", "post_attention")
            ),
        }
        assert all(g is not None and g.isfinite().all() and g.any() for g in gradients.values())
        assert not any(p.requires_grad for m in light(model).values() for p in [m.weight])


@pytest.mark.parametrize("recipe", ["int8:rest=bf16", "nf4:rest=fp16", "fp4:rest=bf16"])
def test_rest_is_the_dtype_of_what_is_left(
    tiny: Path, recipe: str, read: Any, answer: Any, light: Any
):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[recipe.partition("=")[2]]
    model, plain = read(tiny), read(tiny)
    with fw.apply(model, recipe) as applied, fw.apply(plain, recipe.partition(":")[0]):
        codes = dict(plain.named_parameters()) | dict(plain.named_buffers())
        for name, layer in light(model).items():
            assert torch.equal(layer.weight, codes[f"{name}.weight"])  # from the full precision
            assert torch.equal(layer.absmax, codes[f"{name}.absmax"])
            assert layer.absmax.dtype is torch.float32
            assert layer.bias is None or layer.bias.dtype is dtype
        left = [p for p in model.parameters() if p.is_floating_point()]
        assert {p.dtype for p in left} == {dtype}
        assert model.config.dtype is dtype
        assert applied.receipt.actual["dtype"] == str(dtype).removeprefix("torch.")
        found, expected = answer(model), answer(plain)
        assert found.dtype is dtype
        assert (found - expected).norm() < 0.1 * expected.norm()


def memory_mapped(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of a file."""
    from featherweight.residency import Mappings

    return Mappings().file_of(tensor) is not None


def test_pages_of_the_checkpoint_are_given_back(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    assert memory_mapped(model.model.layers[0].mlp.up_proj.weight)
    total: Callable[[], int] = lambda: held(model).mapped  # noqa: E731
    before = total()
    with fw.apply(model, "nf4"):
        assert total() < before
    assert total() == before


def test_originals_are_dropped_where_undo_is_not_wanted():
    from weakref import ref

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    weights = [ref(m.weight) for m in (model[0], model[2])]
    fw.apply(model, "nf4", reversible=False)
    assert [weight() for weight in weights] == [None, None]
