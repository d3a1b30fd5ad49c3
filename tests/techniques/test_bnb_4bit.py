"""Options of bnb-nf4 and bnb-fp4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import featherweight as fw
from featherweight.errors import UnsupportedError
from featherweight.techniques.bnb_4bit import BLOCKSIZES

functional = pytest.importorskip("bitsandbytes.functional")


def layer(model: Any) -> Any:
    return model.model.layers[0].mlp.up_proj  # [128, 64]


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-fp4"])
@pytest.mark.parametrize("blocksize", [32, 64])
def test_blocksize_is_honoured(tiny_llama: Path, name: str, blocksize: int, read: Any):
    model = read(tiny_llama)
    weight = layer(model).weight.clone()
    with fw.apply(model, f"{name}:blocksize={blocksize}"):
        state = layer(model).weight.quant_state
        assert state.blocksize == blocksize
        assert state.quant_type == name.removeprefix("bnb-")
        absmax = weight.reshape(-1, blocksize).abs().amax(1)
        assert torch.equal(state.absmax, absmax)
        again = functional.dequantize_4bit(layer(model).weight, state)
        largest_step = 0.36 if name == "bnb-fp4" else 0.31  # widest gap of the codebook
        error = (again - weight).reshape(-1, blocksize).abs().amax(1)
        assert (error <= absmax * largest_step / 2).all()


def test_smaller_blocks_are_closer(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    weight = layer(model).weight.clone()
    errors = []
    for blocksize in (32, 64):
        with fw.apply(model, f"bnb-nf4:blocksize={blocksize}"):
            again = functional.dequantize_4bit(layer(model).weight, layer(model).weight.quant_state)
            errors.append((again - weight).norm())
    assert errors[0] < errors[1]


@pytest.mark.parametrize("blocksize", BLOCKSIZES)
def test_every_blocksize_runs(blocksize: int, tiny_config: Any):
    from transformers import LlamaForCausalLM

    sizes = {"hidden_size": max(64, blocksize), "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(tiny_config(**sizes, head_dim=16)).eval()
    # These two read 64 and 128 values, less than the larger blocks.
    recipe = f"bnb-nf4:skip=o_proj,down_proj:blocksize={blocksize}"
    with fw.apply(model, recipe), torch.no_grad():
        assert layer(model).weight.quant_state.blocksize == blocksize
        assert model(torch.ones(1, 3, dtype=torch.long)).logits.isfinite().all()


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_compute_is_the_dtype_of_the_arithmetic(tiny_llama: Path, compute: str, read: Any):
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[compute]
    model = read(tiny_llama)
    with fw.apply(model, f"bnb-nf4:compute={compute}") as applied:
        assert layer(model).compute_dtype is dtype
        assert model.config.quantization_config.bnb_4bit_compute_dtype is dtype
        ((asked, runs),) = applied.receipt.actual.items()
        assert asked == f"4-bit products asked for in {compute}"
        packs = functional.has_avx512bf16()
        assert runs == ("bf16, all that its kernel for this processor has" if packs else compute)


def test_compute_is_float32_as_in_stock_if_not_said(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    for recipe, dtype in (("bnb-nf4", torch.float32), ("bf16+bnb-nf4", torch.bfloat16)):
        with fw.apply(model, recipe) as applied:
            assert layer(model).compute_dtype is torch.float32
            assert layer(model).weight.quant_state.dtype is dtype
            assert "4-bit products asked for in fp32" in applied.receipt.actual
            config = model.config.quantization_config
            assert config.bnb_4bit_compute_dtype is torch.float32


@pytest.mark.parametrize("recipe", ["bnb-nf4", "bnb-nf4:double", "bf16+bnb-fp4:double"])
def test_verifying_leaves_what_was_quantised(tiny_llama: Path, recipe: str, read: Any, answer: Any):
    plain, verified = read(tiny_llama), read(tiny_llama)
    fw.apply(plain, recipe)
    fw.apply(verified, recipe, verify=True)
    expected = dict(plain.named_modules())
    double = "double" in recipe
    for name, module in verified.named_modules():
        if type(module).__name__ != "Linear4bit":
            continue
        mine, theirs = module.weight.quant_state, expected[name].weight.quant_state
        assert module.quant_state is mine
        assert module.weight.dtype is torch.uint8
        assert torch.equal(module.weight.data, expected[name].weight.data), name
        assert mine.nested is theirs.nested is double
        assert mine.absmax.dtype is theirs.absmax.dtype
        assert torch.equal(mine.absmax, theirs.absmax)
        assert (mine.shape, mine.blocksize, mine.dtype) == (
            theirs.shape,
            theirs.blocksize,
            theirs.dtype,
        )
        if double:
            assert torch.equal(mine.state2.absmax, theirs.state2.absmax)
            assert torch.equal(mine.offset, theirs.offset)
    assert torch.equal(answer(verified), answer(plain))


def test_a_verified_model_can_be_trained(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    fw.apply(model, "bnb-nf4", verify=True)
    model.train()
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    model(inputs_embeds=x).logits.square().mean().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert x.grad.any()


@pytest.mark.parametrize("packs", [True, False], ids=["avx512-bf16", "without"])
def test_shapes_are_refused_only_where_bitsandbytes_would_fail(
    packs: bool, tiny_config: Any, state: Any, monkeypatch: pytest.MonkeyPatch
):
    from transformers import LlamaForCausalLM

    if packs is not functional.has_avx512bf16():
        monkeypatch.setattr(functional, "has_avx512bf16", lambda: packs)
    model = LlamaForCausalLM(tiny_config(intermediate_size=80)).eval()
    before = state(model)
    if packs:
        says = r"mlp.gate_proj' is \[80, 64\]; .*out_features divisible by 32 .*add skip=model"
        with pytest.raises(UnsupportedError, match=says):
            fw.apply(model, "bf16+bnb-nf4")
        assert state(model) == before
        fw.apply(model, "bnb-nf4:skip=mlp").undo()
    elif torch.backends.cpu.get_cpu_capability() == "AVX512":
        says = r"mlp.down_proj' has 80 in_features, which the blocksize 64 does not divide"
        with pytest.raises(UnsupportedError, match=says):
            fw.apply(model, "bnb-nf4")
        assert state(model) == before
        fw.apply(model, "bnb-nf4:skip=down_proj").undo()
    else:
        fw.apply(model, "bnb-nf4").undo()
    assert state(model) == before
