"""An adapter merged into its base, as a checkpoint that transformers alone reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import featherweight as fw
from featherweight import merge as merging
from featherweight.errors import FeatherweightError, ModelError, VerificationError
from featherweight.merge import merge

peft = pytest.importorskip("peft", reason="PEFT is an optional extra")


def train(folder: Path, base: Path, read: Any, **config: Any) -> Path:
    """An adapter of random numbers for a base."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | config
    wrapped = peft.get_peft_model(read(base), peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    wrapped.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, read: Any) -> Path:
    return train(tmp_path_factory.mktemp("adapter"), tiny_llama, read)


@pytest.fixture(scope="module")
def quantised(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_llama` as bitsandbytes NF4 with nested absmax, written by our layers."""
    folder = tmp_path_factory.mktemp("nf4")
    loaded = fw.load(tiny_llama, "nf4:double")
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def deltas(adapter: Path) -> dict[str, torch.Tensor]:
    """What the adapter adds to each weight of the base: B A · 8 / 4."""
    stored = load_file(adapter / "adapter_model.safetensors")
    found = {}
    for key, a in stored.items():
        if "lora_A" in key:
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            found[name] = stored[key.replace("lora_A", "lora_B")] @ a * 2.0
    return found


@pytest.mark.parametrize("dtype", [None, "fp32", "bf16", "fp16"])
def test_a_plain_base(
    tiny_llama: Path, adapter: Path, tmp_path: Path, dtype: str | None, read: Any
):
    merged = merge(tiny_llama, adapter, tmp_path / "out", dtype=dtype, verify=True)
    wanted = {None: "float32", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype]
    assert (merged.dtype, merged.modules, merged.dequantised) == (wanted, 14, 0)
    assert max(merged.verified.values()) < (1e-5 if wanted == "float32" else 0.02)
    assert merged.notes == []
    base = load_file(tiny_llama / "model.safetensors")
    delta = deltas(adapter)
    assert len(delta) == 14
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == base.keys()
    for name, weight in base.items():
        expected = weight + delta[name] if name in delta else weight
        torch.testing.assert_close(found[name], expected.to(getattr(torch, wanted)))
    assert not list((tmp_path / "out").glob("adapter*"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == wanted
    again = fw.load(tmp_path / "out")
    assert again.tokenizer is not None
    assert {type(m) for n, m in again.model.named_modules() if n.endswith("proj")} == {nn.Linear}


def test_a_bf16_base_is_rounded_once(tiny_llama: Path, adapter: Path, tmp_path: Path, read: Any):
    read(tiny_llama, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    base = load_file(tmp_path / "base" / "model.safetensors")
    name, delta = next(iter(deltas(adapter).items()))
    for dtype, wanted in ((None, torch.bfloat16), ("fp32", torch.float32)):
        merge(tmp_path / "base", adapter, tmp_path / "out", dtype=dtype, verify=True)
        found = load_file(tmp_path / "out" / "model.safetensors")
        assert {t.dtype for t in found.values()} == {wanted}
        torch.testing.assert_close(found[name], (base[name].float() + delta).to(wanted))


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_quantised_base_is_dequantised(
    tiny_llama: Path, quantised: Path, adapter: Path, tmp_path: Path, dtype: str | None
):
    merged = merge(quantised, adapter, tmp_path / "out", dtype=dtype, verify=True)
    assert merged.dequantised == 14
    assert "the base was dequantised: 14 layers became dense" in merged.notes
    assert any(f"trained on '{tiny_llama}', and is merged into" in note for note in merged.notes)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert not any("absmax" in name for name in found)
    assert {t.dtype for t in found.values()} == {torch.bfloat16 if dtype else torch.float32}
    layers = dict(fw.load(quantised).model.named_modules())
    for name, delta in deltas(adapter).items():
        expected = layers[name.removesuffix(".weight")].dequantize() + delta
        torch.testing.assert_close(found[name], expected.to(found[name].dtype))


def test_other_kinds_of_adapters(tiny_llama: Path, tmp_path: Path, read: Any, answer: Any):
    config = peft.LoHaConfig(r=2, target_modules=["v_proj"], init_weights=False)
    wrapped = peft.get_peft_model(read(tiny_llama), config).eval()
    wrapped.save_pretrained(tmp_path / "loha")
    merge(tiny_llama, tmp_path / "loha", tmp_path / "out", verify=True)
    torch.testing.assert_close(
        answer(read(tmp_path / "out")), answer(wrapped), rtol=1e-4, atol=1e-4
    )


def test_what_differs_is_not_written(
    tiny_llama: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    original = merging._merge

    def wrong(wrapped: Any, folder: Path) -> Any:
        model = original(wrapped, folder)
        model.model.layers[0].mlp.up_proj.weight.data[0] += 1
        return model

    monkeypatch.setattr(merging, "_merge", wrong)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(VerificationError, match=r"allowed; nothing was written"):
        merge(tiny_llama, adapter, tmp_path / "out", verify=True)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_earlier_checkpoint_is_replaced_and_other_files_stay(
    tiny_llama: Path, adapter: Path, tmp_path: Path, read: Any
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    (out / "model-00001-of-00002.safetensors").write_text("old")
    merge(tiny_llama, adapter, out)
    assert (out / "README.md").read_text() == "mine"
    assert [p.name for p in out.glob("*.safetensors")] == ["model.safetensors"]


@pytest.fixture
def broken(adapter: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(adapter, tmp_path / "broken"))


def test_a_folder_without_adapter(tiny_llama: Path, tmp_path: Path):
    with pytest.raises(ModelError, match=r"holds no adapter: it has no adapter_config\.json; name"):
        merge(tiny_llama, tmp_path, tmp_path / "out")


@pytest.mark.parametrize("text", ["{", "[]", '{"r": 8}'])
def test_a_config_that_is_none(tiny_llama: Path, broken: Path, tmp_path: Path, text: str):
    (broken / "adapter_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"adapter_config\.json' (cannot be read|does not say)"):
        merge(tiny_llama, broken, tmp_path / "out")


def test_pickled_weights_are_never_read(tiny_llama: Path, broken: Path, tmp_path: Path):
    (broken / "adapter_model.safetensors").rename(broken / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"has no adapter_model\.safetensors; pickled ones"):
        merge(tiny_llama, broken, tmp_path / "out")


def test_a_damaged_file(tiny_llama: Path, broken: Path, tmp_path: Path):
    path = broken / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="truncated or damaged"):
        merge(tiny_llama, broken, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 128}, "does not fit LlamaForCausalLM: .*size mismatch|does not fit"),
        ({"num_hidden_layers": 3}, "tensors are missing or have no place there, such as"),
        ({"num_hidden_layers": 1}, "tensors are missing or have no place there, such as"),
    ],
)
def test_an_adapter_of_another_base(
    tiny_llama: Path,
    tmp_path: Path,
    tiny_config: Any,
    read: Any,
    changes: dict[str, int],
    says: str,
):
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(tiny_config(**changes)).save_pretrained(tmp_path / "base")
    targets = ["q_proj", "v_proj"]
    other = train(tmp_path / "other", tmp_path / "base", read, target_modules=targets)
    with pytest.raises(ModelError, match=says) as caught:
        merge(tiny_llama, other, tmp_path / "out")
    assert str(caught.value).endswith("; name the base that it was trained on")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_adapter_that_is_broken(tiny_llama: Path, broken: Path, tmp_path: Path):
    stored = load_file(broken / "adapter_model.safetensors")
    next(iter(stored.values()))[0, 0] = float("nan")
    save_file(stored, broken / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"merged, 'model\.layers.* has NaN or infinity; the"):
        merge(tiny_llama, broken, tmp_path / "out")


def test_what_cannot_be_merged(tiny_llama: Path, tmp_path: Path, read: Any):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    peft.get_peft_model(read(tiny_llama), config).save_pretrained(tmp_path / "prompt")
    with pytest.raises(FeatherweightError, match="of type PROMPT_TUNING cannot be merged"):
        merge(tiny_llama, tmp_path / "prompt", tmp_path / "out")


def test_places_where_nothing_should_be_written(
    tiny_llama: Path, adapter: Path, tmp_path: Path, broken: Path
):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tiny_llama)
    for output, says in (
        (tmp_path / "file", "' is a file; name a new folder with -o"),
        (tiny_llama, "is the folder of the base"),
        (tmp_path / "link", "is the folder of the base"),
        (adapter, "is the folder of the adapter"),
        (broken, "holds an adapter, which transformers would add"),
    ):
        with pytest.raises(FeatherweightError, match=says):
            merge(tiny_llama, adapter, output)
    assert (tmp_path / "file").read_text() == "mine"
