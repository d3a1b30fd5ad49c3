"""Merging an adapter into its base: one dense checkpoint that needs neither PEFT nor us.

A quantised base is dequantised first. Sums are made in float32 and rounded once.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from featherweight import verify as verification
from featherweight.errors import (
    FeatherweightError,
    MissingExtraError,
    ModelError,
    UnsupportedError,
    VerificationError,
)
from featherweight.folder import replacing
from featherweight.ledger import apply
from featherweight.models import load, locate
from featherweight.named import NAMED
from featherweight.nn.quantised import QuantisedLinear
from featherweight.stored import entries
from featherweight.techniques.cast import DTYPES, short

_WEIGHTS = "adapter_model.safetensors"


@dataclass
class Merged:
    """What was written where, and what should be known of it."""

    folder: Path
    dtype: str
    modules: int  # with an adapter
    dequantised: int  # layers
    verified: dict[str, float] | None = None  # by batch layout: relative RMS difference
    notes: list[str] = field(default_factory=list)


def merge(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    verify: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Merged:
    """Write the base with the adapter merged into it as a plain checkpoint, whole or not at all.

    Args:
        base: as for `load`; a quantised checkpoint is dequantised.
        adapter: a folder that PEFT wrote.
        output: the folder to write, tokenizer included. Weights of an earlier checkpoint in it are
            replaced, other files kept.
        dtype: "fp32", "bf16" or "fp16" (default: that of the base's floating-point weights).
        verify: compare outputs of the base with the adapter beside it and merged into it.

    Raises:
        ModelError: the adapter cannot be read, or belongs to another base.
        VerificationError: outputs differ by more than rounding; nothing is written.
        FeatherweightError: the output is a file, the base or the adapter; what `load` raises.
    """
    base, folder, output = os.fspath(base), Path(adapter).expanduser(), Path(output).expanduser()
    config = _read_config(folder)
    source, _ = locate(base, revision, trust_remote_code)
    _check_output(output, source, folder)
    loaded = load(base, trust_remote_code=trust_remote_code, revision=revision)
    model, notes = loaded.model, list(loaded.provenance.notes)
    trained_on = config.get("base_model_name_or_path")
    if trained_on and not _same(trained_on, base, source):
        notes.append(f"the adapter was trained on '{trained_on}', and is merged into '{base}'")
    wanted = DTYPES[dtype] if dtype else model.dtype
    dequantised = _dequantise(model)
    if dequantised:
        notes.append(f"the base was dequantised: {dequantised} layers became dense")
    if dequantised or wanted is torch.float32:
        apply(model, "fp32", reversible=False)
    with _noting(notes):
        wrapped = _attach(model, folder)
        modules = sum(hasattr(module, "base_layer") for module in model.modules())
        allowed = verification.tolerance(model, ())
        before = verification.outputs(model) if verify else None
        model = _merge(wrapped, folder)
    if model.dtype is not wanted:
        apply(model, next(name for name in DTYPES if DTYPES[name] is wanted), reversible=False)
    merged = Merged(output, short(wanted), modules, dequantised, notes=notes)
    if before is not None:
        allowed = max(allowed, verification.tolerance(model, ()))
        merged.verified = _compare(before, verification.outputs(model), allowed)
    with replacing(output) as temporary:
        model.save_pretrained(temporary)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(temporary)
    return merged


def _read_config(folder: Path) -> dict[str, Any]:
    """The adapter's config; ModelError if this is no adapter that can be read and merged."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise ModelError(
            f"'{folder}' holds no adapter: it has no adapter_config.json",
            hint="name the folder that PEFT's save_pretrained wrote",
        )
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"'{path}' cannot be read: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("peft_type"), str):
        raise ModelError(
            f"'{path}' does not say what kind of adapter it is",
            hint="it needs a 'peft_type', as PEFT writes it",
        )
    if not (folder / _WEIGHTS).is_file():
        raise ModelError(
            f"'{folder}' has no {_WEIGHTS}",
            hint="pickled ones (adapter_model.bin) are never read: save it again as safetensors",
        )
    return config


def _check_output(output: Path, source: Path, adapter: Path) -> None:
    """Raise FeatherweightError for a place where a checkpoint should not go."""
    if output.exists() and not output.is_dir():
        raise FeatherweightError(f"'{output}' is a file", hint="name a new folder with -o")
    for other, what in ((source, "base"), (adapter, "adapter")):
        if output.exists() and output.samefile(other if other.is_dir() else other.parent):
            raise FeatherweightError(
                f"'{output}' is the folder of the {what}", hint="name a new folder with -o"
            )
    if (output / "adapter_config.json").exists():
        raise FeatherweightError(
            f"'{output}' holds an adapter, which transformers would add to what is written there",
            hint="name a new folder with -o",
        )


def _same(trained_on: str, base: str, source: Path) -> bool:
    """Whether two names mean one model: the same name, folder or named model."""
    if trained_on in NAMED or trained_on == base:
        return trained_on == base
    return os.path.realpath(trained_on) == os.path.realpath(source)


def _dequantise(model: Any) -> int:
    """Quantised layers as dense ones in float32, in place; how many there were."""
    layers = sum(isinstance(module, QuantisedLinear) for module in model.modules())
    if layers:
        model.dequantize(torch.float32)
    return layers


def _attach(model: Any, folder: Path) -> Any:
    """The PeftModel of an adapter; ModelError if it does not fit the model, tensor by tensor."""
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError:
        raise MissingExtraError("peft", "peft", "'merge'") from None
    stored = entries([folder / _WEIGHTS])
    try:
        wrapped = PeftModel.from_pretrained(model, folder)
    except Exception as error:  # PEFT raises of every kind
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ModelError(
            f"the adapter '{folder}' does not fit {type(model).__name__}: {first}",
            hint="name the base that it was trained on",
        ) from error
    if not hasattr(wrapped, "merge_and_unload"):
        kind = next(iter(wrapped.peft_config.values())).peft_type.value
        raise UnsupportedError(
            f"an adapter of type {kind} cannot be merged into weights",
            hint="use it beside the base, with PEFT",
        )
    fitting = set(get_peft_model_state_dict(wrapped, save_embedding_layers=False))
    places = fitting | set(wrapped.state_dict())  # embeddings may be saved with an adapter
    strange = sorted((set(stored) - places) | (fitting - set(stored)))
    if strange:
        raise ModelError(
            f"the adapter '{folder}' does not fit {type(model).__name__}: {len(strange)} of its"
            f" tensors are missing or have no place there, such as '{strange[0]}'",
            hint="name the base that it was trained on",
        )
    return wrapped


def _merge(wrapped: Any, folder: Path) -> Any:
    """The model with the adapter in its weights; ModelError where that gives NaN or infinity."""
    # Not `safe_merge`: that rounds what is added to the dtype of the base before it adds it.
    model = wrapped.merge_and_unload()
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ModelError(
                f"with the adapter '{folder}' merged, '{name}' has NaN or infinity",
                hint="the adapter, or the base, is broken",
            )
    return model


def _compare(
    before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], allowed: float
) -> dict[str, float]:
    """Relative RMS differences; VerificationError if they are more than rounding makes."""
    try:
        return verification.compare(before, after, allowed, "merge")
    except VerificationError as error:
        raise VerificationError(error.message, hint="nothing was written") from None


@contextmanager
def _noting(notes: list[str]) -> Iterator[None]:
    """Warnings of PEFT as notes, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = " ".join(str(warning.message).split())
        if issubclass(warning.category, UserWarning | RuntimeWarning) and text not in notes:
            notes.append(text)
