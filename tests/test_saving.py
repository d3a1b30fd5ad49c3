"""Checkpoints that transformers and bitsandbytes read without us, to equal bytes."""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

import featherweight as fw
from featherweight.errors import RecipeError, UnsupportedError
from featherweight.nn import FourBitLinear, Int8Linear
from featherweight.saving import quantize

bnb = pytest.importorskip("bitsandbytes")
RECIPES = [
    "nf4",
    "nf4:double",
    "fp4:double",
    "int8",
    "bf16+nf4:double:blocksize=32",
    "nf4:skip=0",
]


def files(folder: Path) -> dict[str, bytes]:
    """Everything in the folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in the folder."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """The same names, dtypes and bits."""
    assert set(mine) == set(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype is tensor.dtype, name
        same = mine[name].view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        assert torch.equal(*same), name  # bits: codes under a float dtype may be NaN


@pytest.mark.parametrize("recipe", RECIPES)
def test_save_load_save(tiny: Path, tmp_path: Path, recipe: str, read: Any, answer: Any):
    model = read(tiny)
    with fw.apply(model, recipe):
        model.save_pretrained(tmp_path / "one")
        expected = answer(model)
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "bitsandbytes"
    loaded = fw.load(tmp_path / "one")
    assert torch.equal(answer(loaded.model), expected)
    assert any("quantised by bitsandbytes" in note for note in loaded.provenance.notes)
    loaded.model.save_pretrained(tmp_path / "two")
    assert files(tmp_path / "one") == files(tmp_path / "two")
    model.save_pretrained(tmp_path / "three")  # undone, it is what it was
    equal(tensors(tmp_path / "three"), tensors(tiny))


@pytest.mark.parametrize("recipe", ["nf4", "nf4:double", "fp4", "int8", "nf4:skip=mlp"])
def test_bitsandbytes_reads_it(tiny_llama: Path, tmp_path: Path, recipe: str):
    fw.load(tiny_llama, recipe).model.save_pretrained(tmp_path / "ours")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    kinds = {type(m) for m in stock.modules()}
    assert (bnb.nn.Linear8bitLt if recipe == "int8" else bnb.nn.Linear4bit) in kinds
    read = dict(stock.state_dict())
    del read["lm_head.weight"]  # tied
    equal(read, tensors(tmp_path / "ours"))


def stock(folder: Path, **options: Any) -> Any:
    """As users quantise with transformers and bitsandbytes."""
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=BitsAndBytesConfig(**options)
    )


FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        (FOUR, "nf4"),
        (FOUR | {"bnb_4bit_use_double_quant": True}, "nf4:double"),
        (FOUR | {"bnb_4bit_quant_storage": "bfloat16"}, None),
        ({"load_in_4bit": True}, "fp4"),
        ({"load_in_8bit": True}, "int8:compat=bitsandbytes"),
        (FOUR | {"llm_int8_skip_modules": ["lm_head", r".*mlp"]}, "nf4:skip=mlp"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("which", ["llama", "gpt2"])
def test_theirs_is_read_exactly(
    request: Any, which: str, tmp_path: Path, options: Any, recipe: Any, answer: Any
):
    folder = request.getfixturevalue(f"tiny_{which}")
    theirs = stock(folder, **options)
    theirs.save_pretrained(tmp_path / "theirs")
    loaded = fw.load(tmp_path / "theirs")
    kinds = {type(module) for module in loaded.model.modules()}
    assert (Int8Linear if "load_in_8bit" in options else FourBitLinear) in kinds
    loaded.model.save_pretrained(tmp_path / "again")
    equal(tensors(tmp_path / "again"), tensors(tmp_path / "theirs"))
    assert files(tmp_path / "again")["config.json"] == files(tmp_path / "theirs")["config.json"]
    if recipe:
        ours = fw.load(folder, recipe).model
        ours.save_pretrained(tmp_path / "ours")
        equal(tensors(tmp_path / "ours"), tensors(tmp_path / "theirs"))
        exact = recipe.startswith("int8")
        if not exact:
            assert torch.equal(answer(loaded.model), answer(ours))


def test_old_8_bit_files_have_no_format(tiny_llama: Path, tmp_path: Path):
    from safetensors.torch import save_file

    fw.load(tiny_llama, "int8").model.save_pretrained(tmp_path)
    kept = {n: t.clone() for n, t in tensors(tmp_path).items() if "weight_format" not in n}
    expected = tensors(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = fw.load(tmp_path)
    layer = loaded.model.model.layers[1].mlp.up_proj
    assert torch.equal(layer.weight, expected["model.layers.1.mlp.up_proj.weight"])


@pytest.mark.parametrize("recipe", ["nf4:double", "nf4:skip=up_proj", "int8"])
def test_another_head_on_a_light_base(tiny_llama: Path, tmp_path: Path, recipe: str):
    fw.load(tiny_llama, recipe).model.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(model.score) is torch.nn.Linear
    assert 0 < model.score.weight.std() < 1
    assert model(torch.arange(2, 12)[None]).logits.isfinite().all()


def test_onto_the_folder_that_the_model_is_mapped_from(
    tiny_llama: Path, tmp_path: Path, read: Any, answer: Any
):
    read(tiny_llama).save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    loaded = fw.load(tmp_path, "nf4")  # what is not quantised is a view of the file
    expected = answer(loaded.model)
    loaded.model.save_pretrained(tmp_path)
    assert torch.equal(answer(loaded.model), expected)
    assert torch.equal(answer(fw.load(tmp_path).model), expected)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_the_hub_comes_after_the_folder(tiny_llama: Path, tmp_path: Path):
    """No hub is reachable here: what is seen is that it is asked, and when."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    model = fw.load(tiny_llama, "nf4").model
    with pytest.raises((OfflineModeIsEnabled, ConnectionError)):
        model.save_pretrained(tmp_path / "light", push_to_hub=True, repo_id="nobody/light")
    assert torch.equal(*(fw.load(f).model.lm_head.weight for f in (tmp_path / "light", tiny_llama)))


def test_shards(tiny_llama: Path, tmp_path: Path, answer: Any):
    model = fw.load(tiny_llama, "nf4:double").model
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(answer(fw.load(tmp_path).model), answer(model))
    model.save_pretrained(tmp_path)  # the shards of before do not stay
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("recipe", "says"),
    [
        ("int8:head=int8", "'model.embed_tokens' is an int8 embedding, which bitsandbytes cannot"),
        ("nf4:head=int8", "'model.embed_tokens' is an int8 embedding, which bitsandbytes cannot"),
        ("nf4+bf16:compute=fp32", "has a half weight and .*; write 'rest=bf16' instead of 'bf16:c"),
    ],
)
def test_what_bitsandbytes_has_no_form_for(
    tiny_llama: Path, tmp_path: Path, recipe: str, says: str
):
    model = fw.load(tiny_llama, recipe).model
    for thing in (model, copy.deepcopy(model)):
        with pytest.raises(UnsupportedError, match=says):
            thing.save_pretrained(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_variants_lie_side_by_side(tiny_llama: Path, tmp_path: Path, read: Any):
    read(tiny_llama).save_pretrained(tmp_path)
    model = fw.load(tiny_llama, "nf4").model
    model.save_pretrained(tmp_path, variant="light", max_shard_size="60KB")
    assert len(list(tmp_path.glob("model.light-*.safetensors"))) > 1
    model.save_pretrained(tmp_path, variant="light")
    names = {path.name for path in tmp_path.glob("model*")}
    assert names == {"model.safetensors", "model.light.safetensors"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path, variant="light")
    assert isinstance(again.model.layers[0].mlp.up_proj, bnb.nn.Linear4bit)
    equal(load_file(tmp_path / "model.safetensors"), tensors(tiny_llama))


@pytest.mark.parametrize("target", ["all-linear", ["q_proj"]])
@pytest.mark.parametrize("source", ["QuantConfig", "apply", "checkpoint"])
def test_after_adapters_were_merged(
    source: str, target: Any, tiny_llama: Path, tmp_path: Path, read: Any, answer: Any
):
    peft = pytest.importorskip("peft")
    if source == "apply":
        model = read(tiny_llama)
        fw.apply(model, "nf4:double", reversible=False)
    else:
        model = fw.load(tiny_llama, "nf4:double").model
    if source == "checkpoint":
        model.save_pretrained(tmp_path / "light")
        model = fw.load(tmp_path / "light").model
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=target))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    merged = wrapped.merge_and_unload()
    before = merged.config.quantization_config
    merged.save_pretrained(tmp_path / "out")
    assert merged.config.quantization_config is before
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert torch.equal(answer(fw.load(tmp_path / "out").model), answer(merged))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    kinds = {n: type(m) for n, m in theirs.named_modules() if n.endswith("_proj")}
    if target == "all-linear":
        assert "quantization_config" not in config
        assert set(kinds.values()) == {torch.nn.Linear}
    else:
        assert config["quantization_config"]["quant_method"] == "bitsandbytes"
        dense = {n for n, kind in kinds.items() if kind is torch.nn.Linear}
        assert dense == {n for n in kinds if n.endswith("q_proj")}


@pytest.mark.parametrize(
    ("recipe", "option"), [("nf4:exact", "exact"), ("int8:compat=bitsandbytes", "compat=bitsandb")]
)
def test_what_no_checkpoint_has_a_place_for_is_said(
    recipe: str, option: str, tiny_llama: Path, tmp_path: Path
):
    says = f"'{option}.*' is how the layers are computed here, and no part of the checkpoint"
    with pytest.warns(UserWarning, match=says):
        fw.load(tiny_llama, recipe).model.save_pretrained(tmp_path)
    receipt, _ = quantize(str(tiny_llama), recipe, tmp_path / "out")
    assert re.search(f"note: {says}", str(receipt))
    receipt, _ = quantize(str(tiny_llama), recipe.partition(":")[0], tmp_path / "out")
    assert receipt.notes == []


def test_two_kinds_of_codes(tmp_path: Path, tiny_config: Any):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config(tie_word_embeddings=False)).save_pretrained(tmp_path / "dense")
    mixed = fw.load(tmp_path / "dense", "nf4:head=int8").model
    with pytest.raises(UnsupportedError, match="layers of int8 and nf4; a bitsandbytes checkpoint"):
        mixed.save_pretrained(tmp_path / "new")
    eight = fw.load(tmp_path / "dense", "int8:head=int8").model  # one kind, head and all
    eight.save_pretrained(tmp_path / "new")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert isinstance(theirs.lm_head, bnb.nn.Linear8bitLt)
    assert isinstance(fw.load(tmp_path / "new").model.lm_head, Int8Linear)


@pytest.mark.parametrize("recipe", ["bf16:compute=fp32", "fp16:compute=fp32"])
def test_half_weights_are_plain_ones(tiny_llama: Path, tmp_path: Path, recipe: str, read: Any):
    model = read(tiny_llama)
    with fw.apply(model, recipe):
        model.save_pretrained(tmp_path)
    dtype = torch.bfloat16 if recipe.startswith("bf16") else torch.float16
    saved, original = tensors(tmp_path), tensors(tiny_llama)
    assert set(saved) == set(original)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(saved[name], original[name].to(dtype))


def test_copies_and_pickles_are_saved_too(tiny_llama: Path, tmp_path: Path):
    model = fw.load(tiny_llama, "nf4").model
    model.save_pretrained(tmp_path / "model")
    for number, again in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        again.save_pretrained(tmp_path / str(number))
        assert files(tmp_path / str(number)) == files(tmp_path / "model")


def test_a_pickle_is_saved_by_another_process(tiny_llama: Path, tmp_path: Path):
    model = fw.load(tiny_llama, "nf4").model
    model.save_pretrained(tmp_path / "model")
    torch.save(model, tmp_path / "model.pt")
    code = """
import sys, torch
torch.load(sys.argv[1], weights_only=False).save_pretrained(sys.argv[2])
"""
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "model.pt", tmp_path / "again"], check=True
    )
    assert files(tmp_path / "again") == files(tmp_path / "model")


def test_quantize_writes_all_that_loading_needs(tiny_llama: Path, tmp_path: Path, answer: Any):
    receipt, size = quantize(str(tiny_llama), "nf4:double", tmp_path / "out")
    assert size == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert receipt.bytes_after < receipt.bytes_before / 2
    loaded = fw.load(tmp_path / "out")
    ids = fw.load(tiny_llama).tokenizer("x = y")["input_ids"]
    assert loaded.tokenizer("x = y")["input_ids"] == ids
    assert torch.equal(answer(loaded.model), answer(fw.load(tiny_llama, "nf4:double").model))
    quantize(str(tiny_llama), "bf16", tmp_path / "half")
    assert fw.load(tmp_path / "half").provenance.dtype == "bfloat16"


def test_quantize_refuses_what_is_no_part_of_a_checkpoint(tiny_llama: Path, tmp_path: Path):
    with pytest.raises(RecipeError, match="'flash' changes the attention, which is no part of a"):
        quantize(str(tiny_llama), "nf4+flash", tmp_path / "out")
    quantize(str(tiny_llama), "nf4", tmp_path / "out")
    before = files(tmp_path / "out")
    with pytest.raises(UnsupportedError, match="is quantised already, by bitsandbytes, and cannot"):
        quantize(str(tmp_path / "out"), "int8", tmp_path / "out")
    with pytest.raises(RecipeError, match=r"--max-shard-size: .*; write 900MB or 5GB"):
        quantize(str(tiny_llama), "nf4", tmp_path / "out", max_shard_size="some")
    assert files(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
