"""From a name to a model and its tokenizer, or one line that says why not."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import featherweight as fw
from featherweight.errors import FeatherweightError, ModelError, RecipeError


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama to damage."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


def refused(name: str | Path, **options: Any) -> str:
    """The one line that `load` answers."""
    with pytest.raises(ModelError) as caught:
        fw.load(str(name), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_local_folder(tiny_llama: Path, read: Any, answer: Any):
    loaded = fw.load(str(tiny_llama))
    assert torch.equal(answer(loaded.model), answer(read(tiny_llama)))
    assert not loaded.model.training
    assert loaded.applied is None
    assert (
        loaded.tokenizer.decode(loaded.tokenizer("an assignment")["input_ids"]) == "an assignment"
    )
    source = loaded.provenance
    assert (source.name, source.source) == (str(tiny_llama), str(tiny_llama))
    assert (source.kind, source.architecture) == ("decoder", "LlamaForCausalLM")
    assert (source.dtype, source.parameters) == ("float32", loaded.model.num_parameters())
    assert source.notes == []


def test_a_path_object_and_a_relative_path_are_names_too(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    assert fw.load(tiny_llama).provenance.name == str(tiny_llama)
    monkeypatch.chdir(tiny_llama.parent)
    assert fw.load(tiny_llama.name).provenance.architecture == "LlamaForCausalLM"
    assert fw.load(f"./{tiny_llama.name}").provenance.architecture == "LlamaForCausalLM"


def test_the_checkpoint_keeps_its_dtype(folder: Path, read: Any):
    read(folder, dtype=torch.bfloat16).save_pretrained(folder)
    loaded = fw.load(str(folder))
    assert loaded.provenance.dtype == "bfloat16"
    assert loaded.model.dtype is torch.bfloat16


def test_a_recipe_is_applied_for_good_unless_asked(tiny_llama: Path, answer: Any):
    loaded = fw.load(str(tiny_llama), "bf16+flash", verify=True)
    assert loaded.model.dtype is torch.bfloat16
    assert loaded.provenance.dtype == "float32"  # of the checkpoint
    assert loaded.applied.receipt.verified.keys() == {"left", "right"}
    with pytest.raises(FeatherweightError, match="reversible=False"):
        loaded.applied.undo()
    again = fw.load(str(tiny_llama), "bf16", reversible=True)
    again.applied.undo()
    assert torch.equal(answer(again.model), answer(fw.load(str(tiny_llama)).model))


def test_a_wrong_recipe_is_refused_before_anything_is_read():
    with pytest.raises(RecipeError, match="unknown technique 'bf61'"):
        fw.load("nobody/nothing", "bf61")


def test_a_gguf_file_is_a_float32_model(tiny_gguf: Path, tiny_llama: Path, read: Any, answer: Any):
    for name in (tiny_gguf, tiny_gguf.parent):  # or the folder that holds just that
        loaded = fw.load(str(name))
        assert loaded.provenance.kind == "decoder"
        assert loaded.provenance.dtype == "float32"
        assert loaded.provenance.source == str(tiny_gguf)
        torch.testing.assert_close(answer(loaded.model), answer(read(tiny_llama)))
        expected = fw.load(str(tiny_llama)).tokenizer("x = y[3]")["input_ids"]
        assert loaded.tokenizer("x = y[3]")["input_ids"] == expected


def test_a_damaged_gguf_file_is_refused(tiny_gguf: Path, tmp_path: Path):
    cut = tmp_path / "cut.gguf"
    for size in (8, 2_000, tiny_gguf.stat().st_size - 5_000):
        cut.write_bytes(tiny_gguf.read_bytes()[:size])
        assert f"'{cut}' cannot be loaded: " in refused(cut)


def test_a_gguf_file_without_a_weight_is_refused(write_gguf: Any, tiny_llama: Path, tmp_path: Path):
    name = "model.layers.1.mlp.up_proj.weight"
    path = write_gguf(tmp_path / "less.gguf", tiny_llama, leave_out=name)
    assert f"lacks 1 of the weights of LlamaForCausalLM, or has them in another shape: {name}" in (
        refused(path)
    )


def test_gguf_without_its_package_names_the_install_command(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(FeatherweightError, match=r"pip install 'featherweight\[gguf\]'"):
        fw.load(str(tiny_gguf))


def test_a_folder_without_a_model(tmp_path: Path):
    assert "is a folder that holds no single model; it has no config.json" in refused(tmp_path)


def test_a_folder_of_two_gguf_files(tmp_path: Path):
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    assert "it has 2 gguf files: name one" in refused(tmp_path)


def test_a_plain_file(tiny_llama: Path):
    file = tiny_llama / "model.safetensors"
    assert "is a file, but not a gguf file; name a gguf file, or the folder" in refused(file)


@pytest.mark.parametrize(
    "name", ["/nowhere/at/all", "./nothing", "~/no/such/model", "gone.gguf", "a b", "a/b/c"]
)
def test_a_path_that_is_not_there(name: str):
    says = refused(name)
    assert says.startswith(f"no file or folder '{name}'; give a folder, a gguf file, a hub id")
    assert "smollm2-135m, minilm-l6" in says


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model"])
def test_a_hub_id_that_cannot_be_reached(name: str):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert refused(name).startswith(f"no model '{name}': not a folder, not in the hub cache")


@pytest.mark.parametrize("kept", [100, -1000], ids=["header", "last"])
def test_truncated_weights(folder: Path, kept: int):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    says = refused(folder)
    assert says.startswith(f"'{weights}' is truncated or damaged: Error while deserializing")


def test_a_weight_that_is_missing(folder: Path):
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    says = refused(folder)
    assert "lacks 1 of the weights of LlamaForCausalLM" in says
    assert "model.layers.1.mlp.up_proj.weight; the checkpoint is damaged" in says


def test_weights_of_another_shape(folder: Path):
    edit(folder / "config.json", intermediate_size=64)
    assert "lacks 6 of the weights" in refused(folder)


def test_an_encoder_may_lack_its_pooler_and_nothing_else(tiny_bert: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_bert, tmp_path / "bert")
    tensors = load_file(folder / "model.safetensors")
    tensors = {n: t.clone() for n, t in tensors.items() if not n.startswith("pooler.")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (note,) = fw.load(str(folder)).provenance.notes
    assert note == "not in the checkpoint, set at random: pooler.dense.bias, pooler.dense.weight"
    del tensors["encoder.layer.0.output.dense.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "lacks 1 of the weights of BertModel" in refused(folder)


def test_pickled_weights_are_never_read(folder: Path):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "holds no weights in safetensors files; pickled weights" in refused(folder)


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "not-a-model"}'])
def test_a_config_that_says_nothing(folder: Path, text: str):
    (folder / "config.json").write_text(text)
    assert "cannot be loaded: " in refused(folder)


def test_no_tokenizer_is_none(folder: Path):
    for file in folder.glob("*token*"):
        file.unlink()
    assert fw.load(str(folder)).tokenizer is None


@pytest.mark.parametrize("text", ["{", '{"version": "1.0"}', '{"model": {"type": "What"}}'])
def test_a_damaged_tokenizer_is_an_error(folder: Path, text: str):
    (folder / "tokenizer.json").write_text(text)
    assert f"the tokenizer of '{folder}' cannot be read: " in refused(folder)


def test_code_of_the_checkpoint_runs_only_if_asked(folder: Path, tmp_path: Path):
    marker = tmp_path / "it-ran"
    (folder / "mine.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(marker)!r}).touch()\n"
        "class MineConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MineForCausalLM(LlamaForCausalLM):\n    config_class = MineConfig\n"
    )
    edit(
        folder / "config.json",
        model_type="mine",
        architectures=["MineForCausalLM"],
        auto_map={"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.MineForCausalLM"},
    )
    says = refused(folder)
    assert "brings its own code, which is not run unless you ask" in says
    assert "--trust-remote-code" in says
    assert not marker.exists()
    loaded = fw.load(str(folder), trust_remote_code=True)
    assert marker.exists()
    assert (loaded.provenance.kind, loaded.provenance.architecture) == (
        "decoder",
        "MineForCausalLM",
    )


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("BertModel", "BertModel"),
        ("BertForMaskedLM", "BertForMaskedLM"),
        ("BertForSequenceClassification", "BertForSequenceClassification"),
        ("BertForTokenClassification", "BertForTokenClassification"),
        ("BertForQuestionAnswering", "BertModel"),
    ],
)
def test_encoders_keep_the_head_they_were_saved_with(
    tiny_bert: Path, tmp_path: Path, saved: str, loaded: str
):
    import transformers

    getattr(transformers, saved).from_pretrained(tiny_bert).save_pretrained(tmp_path)
    source = fw.load(str(tmp_path)).provenance
    assert (source.kind, source.architecture) == ("encoder", loaded)


T5 = {"vocab_size": 384, "d_model": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2}


def test_the_encoder_of_a_t5_is_an_encoder(tmp_path: Path):
    from transformers import T5Config, T5EncoderModel

    T5EncoderModel(T5Config(**T5)).save_pretrained(tmp_path)
    source = fw.load(str(tmp_path)).provenance
    assert (source.kind, source.architecture, source.notes) == ("encoder", "T5EncoderModel", [])


def test_encoder_decoders_are_refused(tmp_path: Path):
    from transformers import (
        BartConfig,
        BartForConditionalGeneration,
        T5Config,
        T5ForConditionalGeneration,
    )

    what = ("encoder_layers", "decoder_layers", "encoder_attention_heads")
    sizes = dict.fromkeys((*what, "decoder_attention_heads"), 2)
    bart = BartConfig(vocab_size=384, d_model=32, **sizes)
    for model in (BartForConditionalGeneration(bart), T5ForConditionalGeneration(T5Config(**T5))):
        model.save_pretrained(tmp_path)
        says = f"'{type(model).__name__}' is an encoder-decoder, which Featherweight cannot load"
        assert says in refused(tmp_path)


def test_a_device_that_is_not_there(tiny_llama: Path):
    with pytest.raises(FeatherweightError, match="cannot be put on device 'hologram'") as caught:
        fw.load(str(tiny_llama), device="hologram")
    assert "featherweight env" in str(caught.value)


def test_the_real_decoder_says_what_it_is(smollm2: str):
    loaded = fw.load(smollm2)
    source = loaded.provenance
    assert (source.name, source.kind, source.parameters) == (smollm2, "decoder", 134_515_008)
    assert "4-bit (Q4_1) before" in source.notes[0]
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt")
    out = loaded.model.generate(**ids, max_new_tokens=1, do_sample=False)
    assert loaded.tokenizer.decode(out[0, -1]).strip() == "Paris"
