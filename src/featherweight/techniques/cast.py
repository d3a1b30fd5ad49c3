"""What the dtype techniques share: every floating parameter and buffer in one dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from featherweight.errors import UnsupportedError
from featherweight.ledger import Ledger
from featherweight.techniques.base import Technique


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
            if not parameter.is_floating_point() or parameter.itemsize < 2:
                raise UnsupportedError(
                    f"'{name}' is {_short(parameter.dtype)}, which cannot be cast to"
                    f" {_short(self.dtype)}",
                    hint="set the dtype before the quantiser: 'bf16+bnb-nf4'",
                )

    def apply(self, model: nn.Module, ledger: Ledger) -> None:
        """Cast parameters one by one, so that at most one is held twice."""
        keep = _kept_in_fp32(model, self.dtype)
        for name, parameter in model.named_parameters():
            before = parameter.nbytes
            what = f"{_short(parameter.dtype)} → {_short(self.dtype)}"
            if parameter.dtype is self.dtype:
                ledger.receipt.record(name, "kept", "already " + _short(self.dtype))
            elif any(part in keep for part in name.split(".")):
                ledger.receipt.record(name, "kept", what, why="the model keeps it in float32")
            else:
                ledger.replace_data(parameter, parameter.data.to(self.dtype))
                ledger.receipt.record(name, "changed", what, before=before, after=parameter.nbytes)
        saved = set(model.state_dict(keep_vars=True))
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point() and buffer.dtype is not self.dtype:
                ledger.replace_data(buffer, buffer.to(self.dtype))
        for config in _configs(model):
            ledger.set(config, "dtype", self.dtype)
        ledger.receipt.actual["dtype"] = _short(self.dtype)


def _kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of modules that transformers would keep in float32 when loading in this dtype."""
    keep: set[str] = set()
    if dtype is torch.float16:
        keep |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype is not torch.float32:
        keep |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return keep


def _configs(model: nn.Module) -> list[object]:
    """The configs of a model and of its submodels, each once."""
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [config for config in found.values() if hasattr(config, "dtype")]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
