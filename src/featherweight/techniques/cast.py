"""What the dtype techniques share: every floating parameter and buffer in one dtype."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from featherweight.errors import UnsupportedError
from featherweight.nn.frozen import Frozen, FrozenEmbedding
from featherweight.techniques.base import Technique, configs

if TYPE_CHECKING:
    from featherweight.ledger import Ledger

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Cast(Technique):
    """Weights and arithmetic in one dtype, as `from_pretrained(dtype=…)` gives them.

    Buffers that the model keeps in float32 on purpose (rotary frequencies, and what the
    architecture names in `_keep_in_fp32_modules`) stay in float32, as in transformers.
    """

    slot: ClassVar[str] = "dtype"
    dtype: ClassVar[torch.dtype]

    def check(self, model: nn.Module) -> None:
        """Refuse codes (integers, 8-bit floats), and what would lose a part (complex)."""
        for name, parameter in model.named_parameters():
            if not _is_plain_float(parameter):
                raise UnsupportedError(
                    f"'{name}' is {short(parameter.dtype)}, which cannot be cast to"
                    f" {short(self.dtype)}",
                    hint="set the dtype before the quantiser: 'bf16+nf4', or write 'nf4:rest=bf16'",
                )
        frozen = next((name for name, m in model.named_modules() if isinstance(m, Frozen)), None)
        if frozen:
            raise UnsupportedError(
                f"'{frozen}' has a dtype of weights and another of arithmetic already",
                hint="undo 'compute=fp32' first",
            )

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Cast parameters one by one, so that at most one is held twice."""
        cast(model, self.dtype, ledger)
        ledger.receipt.actual["dtype"] = short(self.dtype)


def cast(model: nn.Module, dtype: torch.dtype, ledger: Ledger) -> None:
    """Put in `dtype` what holds plain floats, but for the weights and scales of light layers."""
    kept = _kept_in_fp32(model, dtype)
    light = set(_of_light_layers(model))
    saved = set(model.state_dict(keep_vars=True))  # other buffers are made, not loaded
    buffers = [(n, b) for n, b in model.named_buffers() if n in saved]
    for name, tensor in [*model.named_parameters(), *buffers]:
        if name in light or not _is_plain_float(tensor):
            continue
        before = tensor.nbytes
        what = f"{short(tensor.dtype)} → {short(dtype)}"
        if tensor.dtype is dtype:
            ledger.receipt.record(name, "kept", "already " + short(dtype))
        elif kept and kept.search(name):
            ledger.receipt.record(name, "kept", what, why="the model keeps it in float32")
        else:
            ledger.replace_data(tensor, tensor.data.to(dtype))
            ledger.receipt.record(name, "changed", what, before=before, after=tensor.nbytes)
    for module in model.modules():
        if isinstance(module, FrozenEmbedding):
            ledger.set(module, "dtype", dtype)  # of what it gives
    for config in configs(model, "dtype"):
        ledger.set(config, "dtype", dtype)


def _of_light_layers(model: nn.Module) -> Iterator[str]:
    """Names of weights and scales that are what their layer made them; a bias is like any other."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Frozen):
            names = ["weight", *(name for name, _ in module.named_buffers())]
            yield from (f"{prefix}.{name}".lstrip(".") for name in names)


def _is_plain_float(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize >= 2


def _kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> re.Pattern[str] | None:
    """What transformers would keep in float32 when loading in this dtype: part of a name."""
    keep: set[str] = set()
    if dtype is torch.float16:
        keep |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype is not torch.float32:
        keep |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return re.compile("|".join(part.replace("*", ".*") for part in keep)) if keep else None


def short(dtype: torch.dtype) -> str:
    """`float32` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")
