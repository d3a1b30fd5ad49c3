"""Known configs build models of exactly the published sizes; other names are explained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from featherweight import known
from featherweight.errors import ModelError
from featherweight.known import CONFIGS, KNOWN, VARIANTS, config_dict, names

# Tied weights once, of the architecture that the config names.
PARAMETERS = {
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "albert-base": 11_221_680,
    "distilbert": 66_985_530,
    "roberta-base": 124_697_433,
    "minilm-l6": 22_713_216,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "pythia-410m": 405_334_016,
    "opt-350m": 331_196_416,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "phi-1.5": 1_418_270_720,
    "phi-3-mini": 3_821_079_552,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "octocoder": 15_517_456_384,
    "bloom-176b": 176_247_271_424,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "whisper-large": 1_543_304_960,
}


def built(config: dict[str, Any], architecture: str | None = None) -> Any:
    """The model of a config, without memory for its weights."""
    made = transformers.AutoConfig.for_model(**config)
    model_class = getattr(transformers, architecture or config["architectures"][0])
    with torch.device("meta"):
        return model_class._from_config(made)


def parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", names())
def test_a_known_config_builds_a_model_of_the_published_size_and_dtype(name: str):
    config = config_dict(name)
    model = built(config)
    assert parameters(model) == PARAMETERS[name]
    assert str(model.dtype) == f"torch.{config['dtype']}"


@pytest.mark.parametrize(
    ("name", "architecture", "expected"),
    [
        ("bert-base", "BertModel", 109_482_240),
        ("bert-base-cased", "BertModel", 108_310_272),
        ("bert-large", "BertModel", 335_141_888),
        ("albert-base", "AlbertModel", 11_683_584),
        ("distilbert", "DistilBertModel", 66_362_880),
        ("roberta-base", "RobertaModel", 124_645_632),
    ],
)
def test_headless_encoders_have_the_published_size(name: str, architecture: str, expected: int):
    assert parameters(built(config_dict(name), architecture)) == expected


def test_every_file_is_in_the_table_and_every_id_stands_for_one():
    assert sorted(path.name for path in CONFIGS.iterdir()) == sorted(f"{n}.json" for n in KNOWN)
    ids = [*KNOWN, *(hub_id for ids in KNOWN.values() for hub_id in ids)]
    ids += [hub_id for hub_id in VARIANTS if hub_id not in KNOWN]
    assert len({hub_id.lower() for hub_id in ids}) == len(ids)
    for hub_id in ids:
        assert config_dict(hub_id)["dtype"] in {"float32", "float16", "bfloat16"}


def test_what_the_cache_depends_on():
    def of(name: str) -> Any:
        return transformers.AutoConfig.for_model(**config_dict(name)).get_text_config()

    assert of("mistral-7b").sliding_window == 4096
    assert of("qwen2.5-7b").sliding_window is None
    assert set(of("qwen3-8b").layer_types) == {"full_attention"}
    assert of("gemma-2-2b").layer_types[:2] == ["sliding_attention", "full_attention"]
    assert of("gemma-3-4b").layer_types.count("full_attention") == 34 // 6
    assert (of("gemma-3-4b").sliding_window, of("gemma-3-1b").sliding_window) == (1024, 512)
    assert (of("llama-2-70b").num_key_value_heads, of("qwen3-30b-a3b").head_dim) == (8, 128)


def test_rotary_settings_are_read_from_where_they_stand():
    def of(name: str) -> Any:
        made = transformers.AutoConfig.for_model(**config_dict(name))
        return made.get_text_config().rope_parameters

    assert of("qwen3-0.6b") == {"rope_type": "default", "rope_theta": 1_000_000}
    assert of("llama-3.2-1b")["rope_type"] == "llama3"
    assert of("llama-3.2-1b")["factor"] == 32.0
    assert of("llama-3.2-1b")["rope_theta"] == config_dict("llama-3.2-1b")["rope_theta"]
    assert of("pythia-410m")["partial_rotary_factor"] == 0.25
    assert of("phi-1.5")["partial_rotary_factor"] == 0.5
    assert of("gemma-3-4b")["full_attention"] == {
        "rope_type": "linear",
        "factor": 8.0,
        "rope_theta": 1_000_000.0,
    }
    assert of("gemma-3-4b")["sliding_attention"]["rope_theta"] == 10_000.0


def test_hub_ids_are_known_in_any_case_and_asked_of_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(known, "_download", None)
    for asked, name in (
        ("bert-large-uncased", "bert-large"),
        ("META-LLAMA/llama-2-70B-hf", "llama-2-70b"),
        ("huggingfacetb/smollm2-360m-instruct", "smollm2-360m"),
        ("openai/whisper-large-v2", "whisper-large"),
        ("OctoCoder", "octocoder"),
    ):
        assert config_dict(asked) == config_dict(name)
        assert config_dict(asked) is not config_dict(asked)


def test_a_variant_differs_in_what_the_table_says():
    base, tuned = config_dict("google/gemma-2-9b"), config_dict("google/gemma-2-9b-it")
    assert (base.pop("dtype"), tuned.pop("dtype")) == ("float32", "bfloat16")
    assert base == tuned
    assert config_dict("Qwen/Qwen2.5-7B-Instruct")["max_position_embeddings"] == 32768
    assert config_dict("qwen2.5-7b")["max_position_embeddings"] == 131072


def write(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(text)
    return str(folder)


def test_a_folder_with_a_config_comes_before_a_known_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert config_dict("gpt2")["n_layer"] == 12
    write(tmp_path / "gpt2", '{"model_type": "gpt2", "n_layer": 3}')
    assert config_dict("gpt2") == {"model_type": "gpt2", "n_layer": 3}
    assert config_dict(str(tmp_path / "gpt2"))["n_layer"] == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"model_type": ', r"cannot be read: Expecting value"),
        ("[" * 100_000, r"cannot be read: "),
        ("[1, 2]", r"is not a JSON object; it must be one that transformers reads"),
        ('{"hidden_size": 64}', r"has no model_type; it must be one that transformers reads"),
        ('{"model_type": 3}', r"has no model_type"),
    ],
)
def test_what_is_no_config_is_one_line(tmp_path: Path, text: str, says: str):
    folder = write(tmp_path / "m", text)
    with pytest.raises(ModelError, match=says) as caught:
        config_dict(folder)
    assert "\n" not in str(caught.value)
    assert f"the config.json of '{folder}'" in str(caught.value)


def test_bytes_that_are_no_text_are_one_line(tmp_path: Path):
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelError, match="cannot be read: 'utf-8' codec"):
        config_dict(str(tmp_path))


def test_a_config_that_needs_code_is_refused_unless_asked_for(tmp_path: Path):
    config = {"model_type": "homemade", "auto_map": {"AutoConfig": "configuration.Homemade"}}
    folder = write(tmp_path / "m", json.dumps(config))
    with pytest.raises(ModelError, match=r"'homemade', which only the code .*--trust-remote-code"):
        config_dict(folder)
    assert config_dict(folder, trust_remote_code=True) == config
    write(tmp_path / "m", json.dumps(config | {"model_type": "phi"}))  # the library knows it
    assert config_dict(folder)["model_type"] == "phi"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("./nowhere", r"no file or folder './nowhere'; give a folder that holds config.json"),
        ("/no/where", r"no file or folder '/no/where'; "),
        ("missing.gguf", r"no file or folder 'missing.gguf'; "),
        ("what is this?", r"no file or folder 'what is this\?'; "),
        ("lama-2-7b", r"no config of 'lama-2-7b': .*; nearest known names: llama-2-7b"),
        ("NousResearch/Llama-2-7b-hf", r"nearest known names: .*meta-llama/Llama-2-7b-hf"),
        ("some/qwen3-8b", r"nearest known names: .*qwen3-8b"),
        ("zzz/yyy", r"no config of 'zzz/yyy': .*such as 'llama-2-7b'"),
    ],
)
def test_an_unknown_name_is_told_its_nearest(name: str, says: str):
    with pytest.raises(ModelError, match=says) as caught:
        config_dict(name)
    assert "\n" not in str(caught.value)


def test_a_revision_is_never_answered_from_the_table():
    with pytest.raises(ModelError, match="no config of 'gpt2' at revision 'v7'"):
        config_dict("gpt2", revision="v7")


def test_a_hub_id_costs_its_config_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, '{"model_type": "llama"}')
    asked: list[Any] = []

    def hub(*what: Any, **more: Any) -> str:
        asked.append((*what, more))
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    assert config_dict("some/body", revision="main") == {"model_type": "llama"}
    assert asked == [("some/body", "config.json", {"revision": "main"})]


def test_a_gguf_file_says_its_config(tiny_gguf: Path, tmp_path: Path):
    config = config_dict(str(tiny_gguf))
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert (config["hidden_size"], config["num_key_value_heads"]) == (64, 2)
    assert str(built(config).dtype) == "torch.float32"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "m.gguf").symlink_to(tiny_gguf)
    assert config_dict(str(tmp_path / "folder")) == config
    (tmp_path / "folder" / "n.gguf").write_bytes(b"no gguf")
    with pytest.raises(ModelError, match="holds no single model; it has 2 gguf files: name one"):
        config_dict(str(tmp_path / "folder"))
    with pytest.raises(ModelError, match=r"n.gguf' cannot be loaded"):
        config_dict(str(tmp_path / "folder" / "n.gguf"))


def test_other_files_and_empty_folders_are_one_line(tmp_path: Path):
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match="is a file, but not a gguf file; name a gguf file"):
        config_dict(str(tmp_path / "weights.bin"))
    with pytest.raises(ModelError, match=r"holds no single model; it has no config.json"):
        config_dict(str(tmp_path))


def test_a_known_config_needs_neither_torch_nor_transformers():
    code = """if True:
        import sys
        sys.modules["torch"] = sys.modules["transformers"] = None
        from featherweight.known import config_dict
        print(config_dict("google/gemma-3-1b-it")["hidden_size"])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1152\n"
