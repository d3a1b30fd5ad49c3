"""Damaged checkpoints: one error that names tensor and file, before memory is taken."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import featherweight as fw
from featherweight.errors import ModelError
from featherweight.saving import quantize
from featherweight.stored import entries

NAME = "model.safetensors"
MUTATIONS = 250  # of each recipe


@pytest.fixture(scope="module", params=["nf4:double", "nf4", "fp4:blocksize=128", "int8"])
def good(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: Any) -> Path:
    """The folder of a tiny quantised Llama."""
    folder: Path = tmp_path_factory.mktemp("good")
    quantize(str(tiny_llama), request.param, folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    for file in good.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


class File:
    """A safetensors file taken apart."""

    def __init__(self, raw: bytes) -> None:
        (self.length,) = struct.unpack("<Q", raw[:8])
        self.raw = raw
        self.header: dict[str, Any] = json.loads(raw[8 : 8 + self.length])
        self.data = bytearray(raw[8 + self.length :])
        self.names = [name for name in self.header if name != "__metadata__"]

    def put_together(self) -> bytes:
        text = json.dumps(self.header).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text + bytes(self.data)


def mutated(raw: bytes, chance: random.Random) -> bytes:
    """The file after one accident."""
    file = File(raw)
    name = chance.choice(file.names)
    byte = chance.randrange(256)
    match chance.randrange(9):
        case 0:
            return raw[: chance.randrange(len(raw))]
        case 1:  # somewhere in the header
            at = 8 + chance.randrange(file.length)
            return raw[:at] + bytes([byte]) + raw[at + 1 :]
        case 2:  # in the header's length
            at = chance.randrange(8)
            return raw[:at] + bytes([byte]) + raw[at + 1 :]
        case 3:
            del file.header[name]
        case 4:
            file.header[name + "x"] = file.header.pop(name)
        case 5:
            dtypes = ["F32", "BF16", "U8", "I8", "F16", "I64", "F8_E4M3"]
            file.header[name]["dtype"] = chance.choice(dtypes)
        case 6:
            sizes = [0, 1, 2, 64, 1 << 20, 1 << 40]
            file.header[name]["shape"] = [chance.choice(sizes)] * chance.randrange(3)
        case 7:  # two tensors of equal size
            size = _size(file.header[name])
            other = chance.choice([n for n in file.names if _size(file.header[n]) == size])
            header = file.header
            header[name], header[other] = header[other], header[name]
        case 8:  # in what describes a layer
            small = [n for n in file.names if "quant_state" in n or n.endswith("weight_format")]
            start, end = file.header[chance.choice(small)]["data_offsets"]
            file.data[chance.randrange(start, end)] = chance.choice([byte, ord("9"), ord("-")])
    return file.put_together()


def _size(entry: dict[str, Any]) -> int:
    start, end = entry["data_offsets"]
    return end - start


def test_a_thousand_mutations(folder: Path, resident: Any):
    raw = (folder / NAME).read_bytes()
    fw.load(folder)
    before, refused = resident("RssAnon"), 0
    for seed in range(MUTATIONS):
        (folder / NAME).unlink()  # the last one may still be mapped
        (folder / NAME).write_bytes(mutated(raw, random.Random(seed)))
        try:
            fw.load(folder)
        except ModelError as error:  # and nothing else
            refused += 1
            says = str(error)
            # a tensor that is missing is in no file
            assert f"'{folder / NAME}'" in says or "lacks" in says, (seed, says)
            assert "\n" not in says
    assert refused > MUTATIONS // 2
    assert resident("RssAnon") - before < 100 << 20


def damage(folder: Path, change: Any) -> str:
    """What is said of the file after `change(tensors)`."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / NAME).items()}
    change(tensors)
    (folder / NAME).unlink()
    save_file(tensors, folder / NAME, {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        fw.load(folder)
    return str(caught.value)


LAYER = "model.layers.1.mlp.up_proj"


def test_values_that_no_absmax_has(folder: Path):
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("SCB", "weight.nested_absmax", "weight.absmax"):
            tensor = tensors.get(f"{LAYER}.{name}")
            if tensor is not None and tensor.is_floating_point():
                tensor[0] = torch.nan

    says = damage(folder, poison)
    assert says.startswith(f"'{LAYER}' in '{folder / NAME}': '")
    assert says.endswith("' has NaN or infinity; download or write the checkpoint again")


def test_codes_alone(folder: Path):
    def bare(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(f"{LAYER}.") and not n.endswith("weight")]:
            del tensors[name]

    says = damage(folder, bare)
    assert says.startswith(f"'{LAYER}.weight' in '{folder / NAME}' is ")
    assert "nothing beside it says what these codes stand for" in says


def test_a_layer_of_another_size(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.mlp\.down_proj' in '.*ensors': "):
        fw.load(folder)


def test_a_config_that_claims_too_much(tiny_llama: Path, tmp_path: Path):
    for file in tiny_llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="weights are quantised; none of them is; take 'quantizat"):
        fw.load(tmp_path)


@pytest.mark.parametrize("threshold", [None, "6", -1.0, float("nan"), float("inf"), True])
def test_a_threshold_that_is_none(threshold: Any, tiny_llama: Path, tmp_path: Path):
    fw.load(tiny_llama, "int8").model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["llm_int8_threshold"] = threshold
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"llm_int8_threshold in config.json is {threshold!r}; "):
        fw.load(tmp_path)


def test_entries_are_read_from_headers(tmp_path: Path):
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "one.safetensors")
    save_file({"b": torch.tensor(1)}, tmp_path / "two.safetensors")
    found = entries(tmp_path.glob("*.safetensors"))
    assert (found["a"].dtype, found["a"].shape) == ("BF16", (2, 3))
    assert found["b"].file == tmp_path / "two.safetensors"
    (tmp_path / "three.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"three\.safetensors' is truncated or damaged"):
        entries(tmp_path.glob("*.safetensors"))
