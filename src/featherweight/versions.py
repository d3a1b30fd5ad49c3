"""Which packages are installed, in which version."""

from __future__ import annotations

import platform
from importlib import metadata

REQUIRED = ("torch", "transformers", "tokenizers", "accelerate", "safetensors", "numpy")
EXTRAS = {"bitsandbytes": ("bitsandbytes",), "gguf": ("gguf", "sentencepiece")}


def version(package: str) -> str | None:
    """Version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Versions of Python, Featherweight and what it uses, as far as installed."""
    extras = [package for packages in EXTRAS.values() for package in packages]
    found = {name: version(name) for name in ("featherweight", *REQUIRED, *extras)}
    return {"python": platform.python_version()} | {n: v for n, v in found.items() if v}
