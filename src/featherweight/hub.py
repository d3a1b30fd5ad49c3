"""A model of the Hugging Face hub as a local folder, so that every process reads the same files."""

from __future__ import annotations

from pathlib import Path

from featherweight.errors import ModelError

# Weights only as safetensors: pickled ones are never read.
WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
OTHER_FORMATS = ["original/*", "onnx/*", "openvino/*", "consolidated*", "*.fp16.*"]


def snapshot(name: str, revision: str | None, code: bool) -> Path:
    """The folder of a hub id, downloaded unless it is in the hub's cache.

    `code` fetches the repository's Python files too. Raises ModelError if it cannot be had.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=WANTED + (["*.py"] if code else []),
                ignore_patterns=OTHER_FORMATS,
            )
        )
    except Exception as error:  # its errors have no base in common
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ModelError(
            f"no model '{name}': not a folder, not in the hub cache, and the hub did not give it"
            f" ({type(error).__name__}: {first})",
            hint="give a folder, a gguf file, or the id of a model that you can reach",
        ) from None
