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
from featherweight.nn import FourBitLinear
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
    **placing: Any,
) -> Loaded:
    """Load a model and apply a recipe to it.

    A recipe that quantises does so tensor by tensor while the checkpoint is read, so that no more
    than the quantised model and two tensors are in memory; unless `reversible`, `verify` or a gguf
    file asks for the whole model. A checkpoint of bitsandbytes is read as it is, onto our layers.

    Args:
        name: hub id, local folder, gguf file, or a small named model such as `smollm2-135m`.
        recipe: applied after loading, layer by layer; without one the checkpoint stays as it is.
        device: such as `"cpu"` or `"cuda:0"`; the CPU by default.
        verify: see `featherweight.apply`.
        reversible: keep the originals for `loaded.applied.undo()`.
        trust_remote_code: run code that comes with the checkpoint. Never unless asked.
        revision: branch, tag or commit of a hub id.
        placing: `device_map`, `max_memory` and `offload_folder` of transformers' `from_pretrained`.

    Raises:
        ModelError if there is no such model, it cannot be read, or weights are missing;
        otherwise as `apply`.
    """
    name = os.fspath(name)
    recipe = Recipe.parse(recipe) if recipe is not None else None  # before anything slow
    _check_placing(placing, device)
    source, notes = locate(name, revision, trust_remote_code)
    at_once = None if recipe is None or reversible or verify else _quantising(recipe)
    if source.suffix == ".gguf":
        model, tokenizer, kind = read_gguf(source)
        at_once = None
    else:
        if at_once and device is not None and device != "cpu":
            placing["device_map"] = {"": device}
        model, tokenizer, kind, more = read_checkpoint(
            name, str(source), trust_remote_code, at_once, **placing
        )
        notes = notes + more
    if device is not None and "device_map" not in placing:
        model = _to(model, device)
    model.eval()
    provenance = Provenance(
        name=name,
        source=str(source),
        kind=kind,
        architecture=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        parameters=_parameters(model),
        notes=notes,
    )
    applied = None
    if at_once:
        applied = model.hf_quantizer.applied(model)
    elif recipe:
        applied = apply(model, recipe, verify=verify, reversible=reversible)
    return Loaded(model, tokenizer, provenance, applied)


def _quantising(recipe: Recipe) -> Recipe | None:
    """The recipe, if our own quantisers are in it."""
    from featherweight.techniques.quantiser import Quantiser

    return recipe if any(isinstance(technique, Quantiser) for technique in recipe) else None


def _check_placing(placing: dict[str, Any], device: str | None) -> None:
    allowed = ("device_map", "max_memory", "offload_folder")
    for option in placing:
        if option not in allowed:
            raise TypeError(f"load() has no option '{option}'; it passes on {', '.join(allowed)}")
    if placing and device is not None:
        raise FeatherweightError(
            f"device='{device}' and {', '.join(placing)} both say where the model goes",
            hint="give one of them",
        )


def _parameters(model: Any) -> int:
    """Weights that the model computes with: two a byte where they are 4-bit codes."""
    packed = {m for m in model.modules() if isinstance(m, FourBitLinear)}
    saved = sum(m.in_features * m.out_features - m.weight.numel() for m in packed)
    return model.num_parameters() + saved


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
