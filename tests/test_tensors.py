"""Bytes held: every tensor once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import featherweight as fw
from featherweight.tensors import Held, decoded_bytes, held, held_tensors


def test_parameters_and_buffers_are_counted_once():
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    expected = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert held(model) == Held(total=expected, mapped=0)
    assert held([model, model, {"again": model}]).total == expected


def test_tied_weights_and_views_share_their_storage(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    unique = {p.data_ptr(): p.nbytes for p in model.parameters()}
    buffers = sum({b.data_ptr(): b.nbytes for b in model.buffers()}.values())
    assert held(model).total == sum(unique.values()) + buffers
    whole = torch.zeros(100)
    assert held([whole[:10], whole[50:].view(5, 10)]).total == whole.nbytes


def test_a_token_reads_all_but_an_untied_embedding(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    assert decoded_bytes(model) == held(model).total
    table = model.get_input_embeddings().weight
    model.lm_head.weight = nn.Parameter(table.detach().clone())
    assert decoded_bytes(model) == held(model).total - table.nbytes
    model.config.num_local_experts = 4
    assert decoded_bytes(model) is None


def test_mapped_bytes_are_those_of_files(tmp_path: Path):
    save_file({"a": torch.zeros(100)}, tmp_path / "a.safetensors")
    tensors = load_file(tmp_path / "a.safetensors")
    assert held(tensors).mapped == 400
    assert held([tensors, torch.zeros(100)]) == Held(total=800, mapped=400)


def test_meta_and_empty_tensors_weigh_nothing():
    assert held([torch.zeros(100, device="meta"), torch.zeros(0)]) == Held(0, 0)


def test_scales_of_quantised_layers_are_counted(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    up = model.model.layers[0].mlp.up_proj
    weights = up.weight.numel()  # [128, 64]
    with fw.apply(model, "bnb-nf4"):
        layer = model.model.layers[0].mlp.up_proj
        code = layer.weight.quant_state.code.nbytes
        assert held(layer).total == weights // 2 + 4 * weights // 64 + code
    with fw.apply(model, "bnb-nf4:double"):
        layer = model.model.layers[0].mlp.up_proj
        state = layer.weight.quant_state
        assert state.absmax.dtype is torch.uint8
        found = {id(t) for t in held_tensors(layer)}
        assert {id(state.absmax), id(state.state2.absmax), id(state.offset)} <= found
    with fw.apply(model, "bnb-int8"):
        layer = model.model.layers[0].mlp.up_proj
        assert held(layer).total == weights + 4 * up.out_features


def test_the_cache_of_a_decoder_is_counted(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    cache = model(torch.ones(3, 7, dtype=torch.long), use_cache=True).past_key_values
    # layers × (key and value) × batch × key-value heads × tokens × head size × float32
    assert held(cache).total == 2 * 2 * 3 * 2 * 7 * 16 * 4


def test_cycles_end():
    model = nn.Linear(2, 2)
    model.itself = [model]
    assert held(model).total == 24
