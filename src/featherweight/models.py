"""From a name to a model and its tokenizer.

A name is a hub id, a local folder, a gguf file, or one of the small models in `named.NAMED`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from featherweight.checkpoint import read_checkpoint, read_gguf
from featherweight.errors import FeatherweightError, ModelError
from featherweight.hub import snapshot
from featherweight.ledger import Applied, apply
from featherweight.named import NAMED, fetch
from featherweight.recipe import Recipe


@dataclass
class Provenance:
    """Where a model came from, and what should be known of it."""

    name: str  # as asked for
    source: str  # folder or file that was read
    kind: str  # "decoder" (writes text) or "encoder" (reads it)
    architecture: str
    dtype: str  # of the checkpoint
    parameters: int
    notes: list[str] = field(default_factory=list)


@dataclass
class Loaded:
    """A model ready to use. `applied` is the recipe in force, None if none was asked for."""

    model: Any
    tokenizer: Any  # None where the checkpoint has none
    provenance: Provenance
    applied: Applied | None = None


def load(
    name: str | os.PathLike[str],
    recipe: str | Recipe | None = None,
    *,
    device: str | None = None,
    verify: bool = False,
    reversible: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Loaded:
    """Load a model and apply a recipe to it.

    Args:
        name: hub id, local folder, gguf file, or a small named model such as `smollm2-135m`.
        recipe: applied after loading, layer by layer; without one the checkpoint stays as it is.
        device: such as `"cpu"` or `"cuda:0"`; the CPU by default.
        verify: see `featherweight.apply`.
        reversible: keep the originals for `loaded.applied.undo()`.
        trust_remote_code: run code that comes with the checkpoint. Never unless asked.
        revision: branch, tag or commit of a hub id.

    Raises:
        ModelError if there is no such model, it cannot be read, or weights are missing;
        otherwise as `apply`.
    """
    name = os.fspath(name)
    recipe = Recipe.parse(recipe) if recipe is not None else None  # before anything slow
    source, notes = locate(name, revision, trust_remote_code)
    if source.suffix == ".gguf":
        model, tokenizer, kind = read_gguf(source)
    else:
        model, tokenizer, kind, more = read_checkpoint(name, str(source), trust_remote_code)
        notes = notes + more
    if device is not None:
        model = _to(model, device)
    model.eval()
    provenance = Provenance(
        name=name,
        source=str(source),
        kind=kind,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=model.num_parameters(),
        notes=notes,
    )
    applied = apply(model, recipe, verify=verify, reversible=reversible) if recipe else None
    return Loaded(model, tokenizer, provenance, applied)


def locate(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[Path, list[str]]:
    """The folder or gguf file of a model, and what must be said of it; downloads what is missing.

    Raises ModelError if there is no such model.
    """
    if name in NAMED:
        return fetch(NAMED[name]), [NAMED[name].note] if NAMED[name].note else []
    path = Path(name).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise ModelError(
            f"'{name}' is a file, but not a gguf file",
            hint="name a gguf file, or the folder that holds config.json and the weights",
        )
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return found[0], []
        listed = f"it has {len(found)} gguf files: name one" if found else "it has no config.json"
        raise ModelError(f"'{name}' is a folder that holds no single model", hint=listed)
    looks_local = path.is_absolute() or name.startswith((".", "~")) or path.suffix == ".gguf"
    if not path.exists() and (looks_local or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)):
        raise ModelError(f"no file or folder '{name}'", hint=_allowed())
    return path if path.exists() else snapshot(name, revision, trust_remote_code), []


def _allowed() -> str:
    return (
        "give a folder, a gguf file, a hub id such as 'Qwen/Qwen3-0.6B', or one of: "
        + ", ".join(NAMED)
    )


def _to(model: Any, device: str) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise FeatherweightError(
            f"the model cannot be put on device '{device}': {str(error).splitlines()[0]}",
            hint="allowed here: those that 'featherweight env' lists",
        ) from None
