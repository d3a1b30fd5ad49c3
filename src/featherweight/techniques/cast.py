"""What the dtype techniques share: every floating parameter and buffer in one dtype."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from featherweight.errors import UnsupportedError
from featherweight.techniques.base import Technique, configs

if TYPE_CHECKING:
    from featherweight.ledger import Ledger


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
        kept = _kept_in_fp32(model, self.dtype)
        saved = set(model.state_dict(keep_vars=True))  # other buffers are made, not loaded
        buffers = [(n, b) for n, b in model.named_buffers() if n in saved and b.is_floating_point()]
        for name, tensor in [*model.named_parameters(), *buffers]:
            before = tensor.nbytes
            what = f"{_short(tensor.dtype)} → {_short(self.dtype)}"
            if tensor.dtype is self.dtype:
                ledger.receipt.record(name, "kept", "already " + _short(self.dtype))
            elif kept and kept.search(name):
                ledger.receipt.record(name, "kept", what, why="the model keeps it in float32")
            else:
                ledger.replace_data(tensor, tensor.data.to(self.dtype))
                ledger.receipt.record(name, "changed", what, before=before, after=tensor.nbytes)
        for config in configs(model, "dtype"):
            ledger.set(config, "dtype", self.dtype)
        ledger.receipt.actual["dtype"] = _short(self.dtype)


def _kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> re.Pattern[str] | None:
    """What transformers would keep in float32 when loading in this dtype: part of a name."""
    keep: set[str] = set()
    if dtype is torch.float16:
        keep |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype is not torch.float32:
        keep |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    return re.compile("|".join(part.replace("*", ".*") for part in keep)) if keep else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
