"""What safetensors files hold, from their headers: which tensors, where, and which layers.

Nothing here reads weights, so a damaged file is found before any memory is taken for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from featherweight.errors import ModelError
from featherweight.nn import FourBitLinear, Int8Linear
from featherweight.nn.quantised import QuantisedLinear
from featherweight.quant import quant_state

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_MARK = re.compile(rf"(.+)\.(?:{re.escape(quant_state.PREFIX)}\w+|SCB)")


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    file: Path
    dtype: str  # as safetensors names it: "BF16"
    shape: tuple[int, ...]


def entries(files: Iterable[str | Path]) -> dict[str, Entry]:
    """Every tensor of the files by name.

    Raises ModelError that names the file if a header is damaged or the file is cut short.
    """
    found: dict[str, Entry] = {}
    for file in map(Path, files):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no dict
                    piece = opened.get_slice(name)
                    found[name] = Entry(file, piece.get_dtype(), tuple(piece.get_shape()))
        except (SafetensorError, OSError, ValueError) as error:
            raise ModelError(
                f"'{file}' is truncated or damaged: {error}", hint="download or write it again"
            ) from None
    return found


def files_of(names: Iterable[str], there: Mapping[str, Entry]) -> str:
    """The files that hold these tensors, quoted."""
    return ", ".join(dict.fromkeys(f"'{there[name].file}'" for name in names if name in there))


def described(model: Any, files: Iterable[str], threshold: Any) -> dict[str, QuantisedLinear]:
    """The quantised layers of bitsandbytes files, by their names in the model, without weights.

    Every tensor of them is looked at: its dtype and shape, and the JSON of quant states. Raises
    ModelError that names tensor and file. `threshold` is config.json's, for int8 layers.
    """
    if type(threshold) not in (int, float) or not (isfinite(threshold) and threshold >= 0):
        raise ModelError(
            f"llm_int8_threshold in config.json is {threshold!r}",
            hint="write a number from 0 (no outliers) upwards; bitsandbytes' own is 6.0",
        )
    there = entries(files)
    marked = [match[1] for match in map(_MARK.fullmatch, there) if match]
    if not marked:
        raise ModelError(
            "config.json says that the weights are quantised; none of them is",
            hint="take 'quantization_config' out of config.json, or write the checkpoint again",
        )
    _refuse_codes_alone(there, set(marked))
    return {
        module: _layer(model.get_submodule(module), prefix, there, threshold)
        for prefix, module in _modules(model, dict.fromkeys(marked)).items()
    }


def _refuse_codes_alone(there: Mapping[str, Entry], marked: set[str]) -> None:
    """Codes without what they stand for would be taken for numbers."""
    for name, entry in there.items():
        prefix = name.removesuffix(".weight")
        if prefix != name and prefix not in marked and entry.dtype in ("I8", "U8"):
            raise ModelError(
                f"'{name}' in '{entry.file}' is {entry.dtype}, and nothing beside it says what"
                " these codes stand for",
                hint="download or write the checkpoint again",
            )


def _modules(model: Any, prefixes: Iterable[str]) -> dict[str, str]:
    """The model's names of layers; the files may be of the model with another head, or older."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    state = model.state_dict()
    renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
    found = {}
    for prefix in prefixes:
        name, _ = rename_source_key(
            f"{prefix}.weight", renamings, [], model.base_model_prefix, state
        )
        if name in state:  # others are told as unexpected by transformers
            found[prefix] = name.removesuffix(".weight")
    return found


def _layer(
    linear: Any, prefix: str, there: Mapping[str, Entry], threshold: float
) -> QuantisedLinear:
    """An empty layer with the options that its tensors have."""
    from featherweight.techniques.linears import is_linear, weight_of

    names = [n for n in there if n.startswith(f"{prefix}.") and n != f"{prefix}.bias"]
    where = files_of(names, there)
    if not is_linear(linear):
        raise ModelError(
            f"'{prefix}' in {where} is quantised; in the model it is a {type(linear).__name__},"
            " not a plain linear layer",
            hint="see that config.json and the weights belong together",
        )
    out_features, in_features = weight_of(linear).shape
    layer: QuantisedLinear
    if f"{prefix}.SCB" in there:
        layer = Int8Linear(in_features, out_features, False, threshold, device="meta")
    else:
        layer = FourBitLinear(in_features, out_features, False, device="meta")
    layer.register_parameter("bias", linear.bias)
    try:
        layer.take({n.removeprefix(f"{prefix}."): _look(n, there[n]) for n in names})
    except ModelError as error:
        raise ModelError(
            f"'{prefix}' in {where}: {error.message}",
            hint=error.hint or "download or write the checkpoint again",
        ) from None
    return layer


def _look(name: str, entry: Entry) -> torch.Tensor:
    """A tensor without its values, but for the few bytes that describe a layer."""
    if entry.dtype not in _DTYPES:
        raise ModelError(f"'{name}' is {entry.dtype}")
    small = len(entry.shape) <= 1 and torch.Size(entry.shape).numel() <= quant_state.LONGEST
    if small and (quant_state.PREFIX in name or name.endswith("weight_format")):
        with safe_open(entry.file, framework="pt") as opened:
            return opened.get_tensor(name)
    return torch.empty(entry.shape, dtype=_DTYPES[entry.dtype], device="meta")
