"""lora: adapters on plain and on quantised layers, and back."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import featherweight as fw
from featherweight.errors import UnsupportedError

peft = pytest.importorskip("peft", reason="PEFT is an optional extra")

BASES = ["fp32", "nf4:double", "int8", "bf16:compute=fp32"]


def stir(model: Any) -> None:
    """Adapters of random numbers, so that they change what the model says."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1


@pytest.mark.parametrize("base", BASES)
def test_attach_and_undo(base: str, tiny: Path, read: Any, answer: Any, state: Any):
    model = read(tiny)
    with fw.apply(model, base):
        before = state(model)
        plain = answer(model)
        with fw.apply(model, "lora:r=4:dropout=0.5", verify=True) as applied:
            assert applied.receipt.verified == {"right": 0.0, "left": 0.0}
            assert torch.equal(answer(model), plain)
            trained = {n for n, p in model.named_parameters() if p.requires_grad}
            assert trained == {n for n, _ in model.named_parameters() if "lora_" in n}
            assert not any(module.training for module in model.modules())
            stir(model)
            assert not torch.equal(answer(model), plain)
        assert state(model) == before


@pytest.mark.parametrize("base", BASES)
def test_one_recipe(base: str, tiny_llama: Path, read: Any, state: Any):
    model = read(tiny_llama)
    before = state(model)
    with fw.apply(model, f"{base}+lora:r=4:target=q_proj,mlp.up_proj") as applied:
        adapted = {n for n, m in model.named_modules() if hasattr(m, "lora_A")}
        assert adapted == {
            f"model.layers.{i}.{n}" for i in (0, 1) for n in ("self_attn.q_proj", "mlp.up_proj")
        }
        lines = [c for c in applied.receipt.changes if "LoRA" in c.what]
        assert {c.module for c in lines} == adapted
        # A [4, 64] and B [64, 4] or [128, 4], in two layers each
        assert sum(c.bytes_after for c in lines) == 4 * 2 * (4 * 64 + 64 * 4 + 4 * 64 + 128 * 4)
        assert applied.receipt.actual["trainable parameters"] == "2,560"
    assert state(model) == before


def test_options_are_pefts(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    recipe = "lora:r=4:alpha=32:dropout=0.25:target=v_proj:dtype=bf16:rslora"
    with fw.apply(model, recipe):
        layer = model.model.layers[0].self_attn.v_proj
        assert layer.lora_A["default"].weight.shape == (4, 64)
        assert layer.lora_B["default"].weight.dtype is torch.bfloat16
        assert layer.lora_dropout["default"].p == 0.25
        assert layer.scaling == {"default": 16.0}
        config = model.peft_config["default"]
        assert (config.r, config.lora_alpha, config.use_rslora) == (4, 32, True)
        assert config.base_model_name_or_path == str(tiny_llama)
        assert model(input_ids=torch.arange(5)[None]).logits.dtype is torch.float32


@pytest.mark.parametrize("base", ["fp32", "nf4:double"])
def test_saving_writes_the_adapter_alone(
    base: str, tiny_llama: Path, tmp_path: Path, read: Any, answer: Any
):
    model = read(tiny_llama)
    with fw.apply(model, f"{base}+lora:r=4"):
        stir(model)
        expected = answer(model)
        model.save_pretrained(tmp_path / "adapter")
        twin = copy.deepcopy(model)
        twin.model.layers[0].self_attn.q_proj.lora_B["default"].weight.data.zero_()
        twin.save_pretrained(tmp_path / "twin")
    assert {p.name for p in (tmp_path / "adapter").iterdir()} >= {"adapter_config.json"}
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tiny_llama)
    assert not list((tmp_path / "adapter").glob("model*"))
    with fw.apply(model, base):
        again = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
        assert torch.equal(answer(again), expected)
        again = again.unload()
        other = peft.PeftModel.from_pretrained(again, tmp_path / "twin")
        assert not torch.equal(answer(other), expected)
        other.unload()


def test_saving_takes_a_state_dict_and_names_what_it_does_not_use(
    tiny_llama: Path, tmp_path: Path, read: Any
):
    model = read(tiny_llama)
    with fw.apply(model, "nf4+lora:r=4"):
        state = model.state_dict()
        given = {n: torch.ones_like(t) if "lora_B" in n else t for n, t in state.items()}
        model.save_pretrained(tmp_path / "a", state_dict=given)
        with pytest.warns(UserWarning, match="not used for an adapter: max_shard_size, variant"):
            model.save_pretrained(tmp_path / "b", max_shard_size="1GB", variant="x")
        model.save_pretrained(tmp_path / "c", save_peft_format=False)
    ones, zeros, bare = (load_file(tmp_path / n / "adapter_model.safetensors") for n in "abc")
    assert set(ones) == set(zeros) == {f"base_model.model.{name}" for name in bare}
    for name, tensor in ones.items():
        assert torch.equal(tensor, torch.ones_like(tensor) if "lora_B" in name else zeros[name])


def test_two_active_adapters_are_not_saved_as_one(tiny_llama: Path, tmp_path: Path, read: Any):
    model = read(tiny_llama)
    with fw.apply(model, "lora:target=q_proj"):
        config = peft.LoraConfig(target_modules=["q_proj"])
        peft.inject_adapter_in_model(config, model, "second")
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.set_adapter(["default", "second"])
        with pytest.raises(UnsupportedError, match=r"2 adapters are active \(default, second\)"):
            model.save_pretrained(tmp_path)


def test_any_module_can_have_adapters(state: Any):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    before = state(model)
    with fw.apply(model, "lora:r=2:target=0"):
        assert hasattr(model[0], "lora_A")
        assert type(model[2]) is nn.Linear
    assert state(model) == before


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        (
            "lora:target=q_porj",
            "has no layer 'q_porj'; linear layers here: q_proj",
        ),
        ("lora:target=embed_tokens", "'model.embed_tokens' .Embedding. is no linear layer"),
        ("lora:target=q_proj,mlp", "'model.layers.0.mlp' .LlamaMLP. is no linear layer"),
    ],
)
def test_what_is_not_there_is_refused(
    recipe: str, says: str, tiny_llama: Path, read: Any, state: Any
):
    model = read(tiny_llama)
    before = state(model)
    with pytest.raises(UnsupportedError, match=says):
        fw.apply(model, recipe)
    assert state(model) == before


def test_a_second_time_is_refused(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    with (
        fw.apply(model, "lora:target=q_proj"),
        pytest.raises(UnsupportedError, match="has adapters already: default; undo them"),
    ):
        fw.apply(model, "lora:target=v_proj")
    fw.apply(model, "lora:target=v_proj").undo()


def test_nothing_to_adapt_is_an_error():
    with pytest.raises(UnsupportedError, match="LayerNorm has no linear layer; leave 'lora' out"):
        fw.apply(nn.LayerNorm(4), "lora")


@pytest.mark.timeout(300)
def test_qlora_learns_and_changes_only_adapters(smollm2: str):
    loaded = fw.load(smollm2)
    model, tokenizer = loaded.model, loaded.tokenizer
    torch.manual_seed(0)
    recipe = "nf4:double+lora:r=8:target=q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    fw.apply(model, recipe, reversible=False)
    text = "A feather is light, and so is this model: it has four bits a weight. " * 2
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :24]
    frozen = {
        n: t.clone()
        for n, t in (*model.named_parameters(), *model.named_buffers())
        if "lora_" not in n
    }
    adapters = {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}
    assert len(adapters) == 2 * 7 * 30
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    model.train()
    for _ in range(30):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], losses
    now = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(torch.equal(now[name], before) for name, before in frozen.items())
    assert not any(torch.equal(now[name], before) for name, before in adapters.items())
