"""Quantising while loading: the same model as `apply` makes, one tensor at a time."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.pytorch_utils import Conv1D

import featherweight as fw
from featherweight.errors import FeatherweightError, ModelError, RecipeError, UnsupportedError
from featherweight.nn import FourBitLinear, Int8Embedding, Int8Linear
from featherweight.tensors import held

RECIPES = [
    "nf4:double",
    "fp4:blocksize=128:exact",
    "int8",
    "int8:compat=bitsandbytes:threshold=5",
    "nf4:skip=0",
    "bf16+nf4",
    "nf4:rest=bf16",
    "nf4:head=int8:double",
    "int8:head=int8",
    "int8+sdpa",
]


def state(model: Any) -> dict[str, torch.Tensor]:
    """Everything that the model holds, by name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def same(one: Any, other: Any) -> None:
    """The same layers and the same bits."""
    assert str(one) == str(other)
    mine, theirs = state(one), state(other)
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype is tensor.dtype, name
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_as_if_applied_after_loading(tiny: Path, recipe: str, read: Any, answer: Any):
    if "head" in recipe and "bert" in str(tiny):
        pytest.skip("an encoder without a head")
    loaded = fw.load(tiny, recipe)
    model = read(tiny)
    applied = fw.apply(model, recipe)
    same(loaded.model, model)
    assert torch.equal(answer(loaded.model), answer(model))
    mine, theirs = loaded.applied.receipt, applied.receipt
    by_name = {c.module: (c.action, c.what) for c in mine.changes if "Linear" in c.what}
    assert by_name == {c.module: (c.action, c.what) for c in theirs.changes if "Linear" in c.what}
    assert mine.bytes_after == theirs.bytes_after
    assert {k: v for k, v in mine.actual.items() if k != "dtype"} == {
        k: v for k, v in theirs.actual.items() if k != "dtype"
    }


def test_from_pretrained_takes_a_recipe(tiny_llama: Path, read: Any):
    config = fw.QuantConfig("nf4:double")
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, quantization_config=config)
    reference = read(tiny_llama)
    fw.apply(reference, "nf4:double")
    same(model, reference)
    assert model.is_quantized
    assert model.quantization_method == "featherweight"
    with pytest.raises(ValueError, match="not supported for quantized"):
        model.half()
    ids = torch.arange(2, 12)[None]
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, 14)


def test_dtype_is_that_of_from_pretrained_or_of_the_recipe(tiny_llama: Path):
    def norm(recipe: str, **options: Any) -> torch.dtype:
        model = AutoModelForCausalLM.from_pretrained(
            tiny_llama, quantization_config=fw.QuantConfig(recipe), **options
        )
        layer = model.model.layers[0].mlp.up_proj
        assert layer.original_dtype is model.model.norm.weight.dtype
        return model.model.norm.weight.dtype

    assert norm("nf4") is torch.float32
    assert norm("nf4", dtype=torch.bfloat16) is torch.bfloat16
    assert norm("fp16+nf4") is torch.float16


@pytest.mark.parametrize("recipe", ["bf16", "flash", "bnb-nf4"])
def test_a_recipe_that_quantises_nothing(recipe: str):
    with pytest.raises(RecipeError, match=f"'{recipe}' quantises nothing; name int8, nf4 or fp4"):
        fw.QuantConfig(recipe)


def test_no_recipe(tiny_llama: Path, tmp_path: Path):
    with pytest.raises(RecipeError, match=r"a QuantConfig needs a recipe; write QuantConfig"):
        fw.QuantConfig()
    ours = {"quant_method": "featherweight"}
    with pytest.raises(RecipeError, match="take 'quantization_config' out of it"):
        AutoModelForCausalLM.from_pretrained(edited(tiny_llama, tmp_path, quantization_config=ours))
    edited(tiny_llama, tmp_path, quantization_config=ours | {"recipe": "nf4"})
    with pytest.raises(ModelError, match=r"config.json says that .* none of them is; take 'quant"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, read: Any) -> Path:
    """The tiny Llama in several files."""
    folder = tmp_path_factory.mktemp("sharded")
    read(tiny_llama).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def test_shards(sharded: Path, tiny_llama: Path):
    same(fw.load(sharded, "nf4:double").model, fw.load(tiny_llama, "nf4:double").model)


def test_an_untied_head(tmp_path: Path, tiny_config: Any, read: Any):
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config(tie_word_embeddings=False)).save_pretrained(tmp_path)
    model = fw.load(tmp_path, "nf4:head=int8").model
    assert isinstance(model.lm_head, Int8Linear)
    assert not isinstance(model.model.embed_tokens, Int8Embedding)
    reference = read(tmp_path)
    fw.apply(reference, "nf4:head=int8")
    same(model, reference)


def test_a_tied_head_shares_its_codes(tiny_llama: Path):
    model = fw.load(tiny_llama, "nf4:head=int8").model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.absmax is model.model.embed_tokens.absmax


def test_a_mixture_of_experts(tmp_path: Path, read: Any, answer: Any):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=384, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    MixtralForCausalLM(config).eval().save_pretrained(tmp_path / "dense")
    loaded = fw.load(tmp_path / "dense", "nf4")
    reference = read(tmp_path / "dense")
    fw.apply(reference, "nf4")
    same(loaded.model, reference)
    experts = [c for c in loaded.applied.receipt.changes if "expert" in c.what]
    assert {c.why for c in experts} == {"Featherweight has no layer for them"}
    assert len(experts) == 4
    loaded.model.save_pretrained(tmp_path / "light")
    again = fw.load(tmp_path / "light").model
    assert torch.equal(answer(again), answer(reference))


def test_a_head_that_is_not_in_the_checkpoint(tiny_llama: Path):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_llama, quantization_config=fw.QuantConfig("nf4"), num_labels=3
    )
    assert type(model.score) is nn.Linear
    assert 0 < model.score.weight.std() < 1
    assert isinstance(model.model.layers[0].mlp.up_proj, FourBitLinear)
    assert model(torch.arange(2, 12)[None]).logits.isfinite().all()


def edited(source: Path, folder: Path, edit: Any = None, **config: Any) -> Path:
    """A copy of a checkpoint with other tensors, or another config."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = {name: t.clone() for name, t in load_file(folder / "model.safetensors").items()}
    if edit:
        edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "places", [None, {"embeddings": "cpu", "encoder": "disk", "pooler": "cpu"}]
)
def test_a_layer_that_is_not_in_the_checkpoint(
    bias: bool, places: Any, tiny_bert: Path, tmp_path: Path, answer: Any
):
    there = torch.arange(64.0)

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["pooler.dense.weight"], tensors["pooler.dense.bias"]
        if bias:
            tensors["pooler.dense.bias"] = there

    edited(tiny_bert, tmp_path / "in", drop)
    placing = {"device_map": places, "offload_folder": tmp_path / "off"} if places else {}
    loaded = fw.load(tmp_path / "in", "nf4", **placing)
    layer = loaded.model.pooler.dense
    assert type(layer) is nn.Linear
    assert 0.15 < layer.weight.std() < 0.25  # as the model's initializer_range has it
    assert torch.equal(layer.bias, there if bias else torch.zeros(64))
    assert layer.weight.requires_grad
    assert layer.bias.requires_grad
    assert not layer.training
    lines = [c for c in loaded.applied.receipt.changes if c.module == "pooler.dense"]
    assert [(c.action, c.what, c.why) for c in lines] == [
        ("skipped", "Linear", "not in the checkpoint: set at random")
    ]
    assert answer(loaded.model).isfinite().all()
    loaded.model.save_pretrained(tmp_path / "out")
    again = fw.load(tmp_path / "out").model
    assert torch.equal(again.pooler.dense.weight, layer.weight)
    assert torch.equal(answer(again), answer(loaded.model))


def test_a_checkpoint_with_nothing_to_quantise(tiny_llama: Path, tmp_path: Path):
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "proj" in name]:
            del tensors[name]

    with pytest.raises(ModelError, match="none of the weights to quantise, such as 'model"):
        fw.load(edited(tiny_llama, tmp_path, drop), "nf4")


@pytest.mark.parametrize("recipe", ["nf4", "int8"])
def test_a_weight_of_another_shape(recipe: str, tiny_gpt2: Path, tmp_path: Path, answer: Any):
    edited(tiny_gpt2, tmp_path, n_inner=96)
    config = fw.QuantConfig(recipe)
    with pytest.raises(ModelError, match=r"another shape: transformer\.h\.0\.mlp\.c_fc\.bias"):
        fw.load(tmp_path, recipe)
    with pytest.raises(RuntimeError, match="`ignore_mismatched_sizes`"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=config, ignore_mismatched_sizes=True, output_loading_info=True
    )
    name = "transformer.h.1.mlp.c_proj.weight"
    assert (name, (256, 64), (96, 64)) in {
        (n, tuple(found), tuple(wanted)) for n, found, wanted in info["mismatched_keys"]
    }
    block = model.transformer.h[1]
    assert type(block.mlp.c_proj) is Conv1D
    assert 0.09 < block.mlp.c_proj.weight.std() < 0.11  # as GPT-2 has it: 0.2 / √(2 · 2 layers)
    original = load_file(tmp_path / "model.safetensors")["transformer.h.1.mlp.c_proj.bias"]
    assert torch.equal(block.mlp.c_proj.bias, original)
    assert not isinstance(block.attn.c_proj, Conv1D)
    assert answer(model).isfinite().all()


def test_a_weight_that_no_code_stands_for(tiny_llama: Path, tmp_path: Path):
    shutil.copytree(tiny_llama, tmp_path, dirs_exist_ok=True)
    tensors = {name: t.clone() for name, t in load_file(tmp_path / "model.safetensors").items()}
    name = "model.layers.1.mlp.up_proj"
    tensors[f"{name}.weight"][3, 5] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for recipe in ("nf4", "int8"):
        with pytest.raises(UnsupportedError, match=f"'{name}' cannot be quantised: .*add skip="):
            fw.load(tmp_path, recipe)
    loaded = fw.load(tmp_path, f"nf4:skip={name}")
    assert type(loaded.model.get_submodule(name)) is nn.Linear


def test_what_cannot_be_done_is_said_before_weights_are_read(tiny_bert: Path, tiny_llama: Path):
    with pytest.raises(UnsupportedError, match="no linear layer that Featherweight would convert"):
        fw.load(tiny_llama, "nf4:skip=self_attn,mlp")
    with pytest.raises(UnsupportedError, match="has no output head that is a plain linear layer"):
        fw.load(tiny_bert, "int8:head=int8")
    with pytest.raises(FeatherweightError, match="device='cpu' and device_map both say where"):
        fw.load(tiny_llama, "nf4", device="cpu", device_map="auto")
    with pytest.raises(TypeError, match="no option 'gpu'; it passes on device_map, max_memory"):
        fw.load(tiny_llama, "nf4", gpu=0)


def test_the_account_cannot_be_undone(tiny_llama: Path):
    loaded = fw.load(tiny_llama, "nf4")
    assert loaded.applied.receipt.bytes_after == held(loaded.model).total
    assert loaded.provenance.parameters == fw.load(tiny_llama).provenance.parameters
    with pytest.raises(FeatherweightError, match="reversible=False and cannot be undone"):
        loaded.applied.undo()
    undoable = fw.load(tiny_llama, "nf4", reversible=True)
    undoable.applied.undo()
    same(undoable.model, fw.load(tiny_llama).model)


def test_dequantize_gives_a_plain_model(tiny_llama: Path, answer: Any, tmp_path: Path):
    model = fw.load(tiny_llama, "int8").model
    expected = {
        name: layer.dequantize()
        for name, layer in model.named_modules()
        if isinstance(layer, Int8Linear)
    }
    dense = model.dequantize()
    assert not any(isinstance(module, Int8Linear) for module in dense.modules())
    for name, weight in expected.items():
        assert torch.equal(dense.get_submodule(name).weight, weight)
    assert not dense.is_quantized
    dense.save_pretrained(tmp_path)
    assert torch.equal(answer(fw.load(tmp_path).model), answer(dense))


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, None])
def test_dequantize_takes_a_dtype_by_name(dtype: Any, tiny_llama: Path, tmp_path: Path):
    model = fw.load(tiny_llama, "bf16+nf4").model
    model.save_pretrained(tmp_path)  # leaves a name in the config
    assert model.config.dtype == "bfloat16"
    model.dequantize(dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_tied_codes_become_a_tied_weight(tiny_llama: Path):
    model = fw.load(tiny_llama, "int8:head=int8").model
    expected = model.lm_head.dequantize()
    model.dequantize()
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.embed_tokens) is nn.Embedding
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, expected)


def test_a_copy_is_a_model_of_its_own(tiny_llama: Path, answer: Any, tmp_path: Path):
    model = fw.load(tiny_llama, "nf4").model
    again = copy.deepcopy(model)
    expected = answer(model)
    del model
    assert torch.equal(answer(again), expected)
    again.save_pretrained(tmp_path)
    assert torch.equal(answer(fw.load(tmp_path).model), expected)


# accelerate

PLACES = {
    "model.embed_tokens": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
}


@pytest.fixture(params=["quantised while loading", "bitsandbytes checkpoint"])
def source(request: Any, tiny_llama: Path, tmp_path: Path) -> tuple[Path, str | None]:
    """What is loaded, and with which recipe."""
    if "while" in request.param:
        return tiny_llama, "nf4:double"
    fw.load(tiny_llama, "nf4:double").model.save_pretrained(tmp_path / "light")
    return tmp_path / "light", None


def on_disk(model: Any) -> set[str]:
    """Names of the parameters that are not in memory."""
    return {name for name, p in model.named_parameters() if p.is_meta}


def test_layers_on_the_disk(source: Any, tiny_llama: Path, tmp_path: Path, answer: Any):
    folder, recipe = source
    model = fw.load(folder, recipe, device_map=PLACES, offload_folder=tmp_path / "off").model
    whole = fw.load(tiny_llama, "nf4:double").model
    layers = [m for m in model.modules() if isinstance(m, FourBitLinear)]
    assert len(layers) == 14  # quantised, wherever they are
    away = on_disk(model)
    assert {name.split(".")[2] for name in away} == {"1"}
    files = sum(file.stat().st_size for file in (tmp_path / "off").glob("*.safetensors"))
    assert files < 24_000  # codes, not weights: 36,864 of them, in files with a header each
    assert torch.equal(answer(model), answer(whole))
    written = model.generate(torch.arange(2, 12)[None], max_new_tokens=4, do_sample=False)
    assert written.shape == (1, 14)
    assert on_disk(model) == away
    codes = sum(p.nbytes for n, p in whole.named_parameters() if n in away)
    assert held(whole).total - held(model).total == codes  # the memory that is not taken


def test_an_offloaded_model_is_not_dequantized(source: Any, tmp_path: Path, answer: Any):
    folder, recipe = source
    model = fw.load(folder, recipe, device_map=PLACES, offload_folder=tmp_path / "off").model
    before, expected = str(model), answer(model)
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.1\.self_attn\.q_proj' is on the"):
        model.dequantize()
    assert str(model) == before
    assert model.is_quantized
    assert torch.equal(answer(model), expected)


@pytest.mark.parametrize("recipe", ["nf4+lora", "lora", "bnb-nf4", "bnb-int8", "nf4:head=int8"])
def test_what_needs_weights_in_memory_is_refused(recipe: str, tmp_path: Path, tiny_llama: Path):
    places = dict(PLACES)
    if "head" in recipe:
        places |= {"model.embed_tokens": "disk", "lm_head": "disk"}
    with pytest.raises(UnsupportedError, match="is on the meta device: its weight is not in mem"):
        fw.load(tiny_llama, recipe, device_map=places, offload_folder=tmp_path / "off")


def test_adapters_beside_layers_in_memory(tmp_path: Path, tiny_llama: Path, answer: Any):
    recipe = "nf4:double+lora:target=model.layers.0.mlp.up_proj"
    model = fw.load(tiny_llama, recipe, device_map=PLACES, offload_folder=tmp_path / "off").model
    assert torch.equal(answer(model), answer(fw.load(tiny_llama, "nf4:double").model))


def test_an_offloaded_model_is_saved_whole(source: Any, tmp_path: Path, tiny_llama: Path):
    folder, recipe = source
    model = fw.load(folder, recipe, device_map=PLACES, offload_folder=tmp_path / "off").model
    model.save_pretrained(tmp_path / "saved")
    fw.load(tiny_llama, "nf4:double").model.save_pretrained(tmp_path / "whole")
    saved, whole = (load_file(tmp_path / f / "model.safetensors") for f in ("saved", "whole"))
    assert set(saved) == set(whole)
    assert all(torch.equal(saved[name], whole[name]) for name in whole)


def test_auto_places_by_the_size_of_the_codes(source: Any, tmp_path: Path):
    folder, recipe = source
    size = held(fw.load(folder, recipe).model).total  # 145 kB; in float32 400 kB

    def places(limit: int) -> set[str]:
        model = fw.load(
            folder,
            recipe,
            device_map="auto",
            max_memory={"cpu": limit},
            offload_folder=tmp_path / "off",
        ).model
        return set(getattr(model, "hf_device_map", {"": "cpu"}).values())

    assert places(int(1.35 * size)) == {"cpu"}
    assert places(int(0.95 * size)) == {"cpu", "disk"}


# memory, on the real model

CHILD = """
import sys, torch, transformers, featherweight as fw
from featherweight.measure.resident import CPU, Watch, floor
from featherweight.native.library import available
from featherweight.tensors import held
import featherweight.integrations.transformers, transformers.models.llama.modeling_llama
transformers.utils.logging.disable_progress_bar()
available()
with Watch(floor(CPU), CPU) as watch:
    model = fw.load(sys.argv[1], "nf4:double").model
found = held(model)
print(watch.peak.anonymous, found.total - found.mapped)
"""


def test_no_more_than_the_quantised_model_and_two_tensors(smollm2: str):
    done = subprocess.run(
        [sys.executable, "-c", CHILD, smollm2], capture_output=True, text=True, check=True
    )
    peak, quantised = map(int, done.stdout.split())
    two_largest = 4 * 49152 * 576 + 4 * 1536 * 576
    assert peak <= 1.1 * (quantised + two_largest)
    assert peak < 120e6  # the model is 538 MB in float32
