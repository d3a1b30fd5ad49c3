"""nf4 and fp4: options, and bitsandbytes beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw
from featherweight.quant import blockwise
from featherweight.quant.codebooks import codebook
from featherweight.recipe import registry


def layer(model: Any) -> Any:
    return model.model.layers[0].mlp.up_proj  # [128, 64]


@pytest.mark.parametrize("double", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("blocksize", [32, 64, 256, 4096])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_codes_are_those_of_the_reference(
    tiny_llama: Path, name: str, blocksize: int, double: bool, read: Any
):
    model = read(tiny_llama)
    weight = layer(model).weight.clone()
    with fw.apply(model, f"{name}:blocksize={blocksize}" + ":double" * double):
        q = blockwise.quantize_4bit(weight, codebook(name), blocksize, double)
        assert torch.equal(layer(model).weight.reshape(-1), q.codes)
        assert layer(model).blocksize == blocksize
        again = blockwise.dequantize_4bit(q, torch.float32)
        torch.testing.assert_close(layer(model).dequantize(), again, rtol=1e-6, atol=0)


@pytest.mark.parametrize("recipe", ["nf4", "fp4", "nf4:double", "fp4:blocksize=32"])
def test_exact_computes_with_the_weights_of_bitsandbytes(
    tiny: Path, recipe: str, read: Any, answer: Any
):
    functional = pytest.importorskip("bitsandbytes.functional")
    model, plain = read(tiny), read(tiny)
    with fw.apply(model, f"bnb-{recipe}"):
        for name, module in model.named_modules():
            if type(module).__name__ == "Linear4bit":
                weight = functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
                old = plain.get_submodule(name)
                old.weight.data = weight if isinstance(old, nn.Linear) else weight.T.contiguous()
    expected = answer(plain)
    with fw.apply(model, f"{recipe}:exact"):
        assert (answer(model) - expected).norm() < 1e-5 * expected.norm()
    with fw.apply(model, recipe):
        error = (answer(model) - expected).norm() / expected.norm()
        assert 1e-4 < error < 0.2


def test_bf16_before_nf4_quantises_and_computes_in_bf16(tiny_llama: Path, read: Any, answer: Any):
    model = read(tiny_llama)
    weight = layer(model).weight.bfloat16()
    with fw.apply(model, "bf16+nf4"):
        q = blockwise.quantize_4bit(weight, codebook("nf4"))
        assert torch.equal(layer(model).weight.reshape(-1), q.codes)
        assert answer(model).dtype is torch.bfloat16


def test_widths_that_32_does_not_divide_are_exact_and_listed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 8))
    with fw.apply(model, "nf4") as applied, torch.no_grad():
        lines = {c.module: c.why for c in applied.receipt.changes}
        assert lines == {"0": None, "1": "exact: 32 does not divide its in_features"}
        x = torch.randn(3, 40)
        expected = nn.functional.linear(x, model[1].dequantize(), model[1].bias)
        torch.testing.assert_close(model[1](x), expected, rtol=1e-5, atol=1e-5)
    with fw.apply(model, "nf4:exact") as applied:
        assert {c.why for c in applied.receipt.changes} == {None}


@pytest.mark.parametrize("name", ["int8", "nf4", "fp4"])
def test_options_are_read_and_printed(name: str):
    own = {"int8": ":threshold=3.5:compat=bitsandbytes"}.get(name, ":double:blocksize=128:exact")
    text = f"{name}:skip=a,b:head=int8:rest=bf16{own}"
    assert str(fw.Recipe.parse(text)) == text
    assert str(fw.Recipe.parse(name)) == name
    assert registry()[name]().rest is None


@pytest.mark.timeout(300)
def test_smollm2_writes_as_before(smollm2: str):
    loaded = fw.load(smollm2, "nf4:double:head=int8")
    model, tokenizer = loaded.model, loaded.tokenizer
    assert model.get_memory_footprint() < 90 << 20  # of 513 MiB
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    written = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert "Paris" in tokenizer.decode(written[0])
