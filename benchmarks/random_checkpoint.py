"""Sharded bf16 checkpoints of random weights in real geometries: honest for memory and speed.

    python benchmarks/random_checkpoint.py 1.1b FOLDER

They are written shard by shard, so that a 7B one needs no memory to speak of.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from featherweight.paths import cache_dir

GEOMETRIES = {
    "1.1b": {  # TinyLlama
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "7b": {  # Llama-2-7B
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
}
SHARD = 1 << 30  # bytes, at most, but for larger tensors


def write(geometry: str, folder: Path) -> Path:
    """The folder, written unless it is there."""
    if (folder / "model.safetensors.index.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(vocab_size=32000, **GEOMETRIES[geometry])
    with torch.device("meta"):
        shapes = {n: t.shape for n, t in LlamaForCausalLM(config).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    shards: list[dict[str, torch.Size]] = [{}]
    for name, shape in shapes.items():
        if sum(2 * s.numel() for s in shards[-1].values()) + 2 * shape.numel() > SHARD:
            shards.append({})
        shards[-1][name] = shape
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {
            name: torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) == 1
            else (torch.randn(shape, generator=generator) * 0.02).bfloat16()
            for name, shape in shard.items()
        }
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    config.architectures, config.dtype = ["LlamaForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    total = sum(2 * shape.numel() for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def default_folder(geometry: str) -> Path:
    """Where the other benchmarks look for it."""
    return cache_dir() / "random" / geometry


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("folder", type=Path, nargs="?")
    options = parser.parse_args()
    print(write(options.geometry, options.folder or default_folder(options.geometry)))
