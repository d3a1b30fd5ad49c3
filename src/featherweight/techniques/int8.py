"""`int8`: LLM.int8() (arXiv 2208.07339) with our own layers and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from featherweight.nn import Int8Linear
from featherweight.techniques.base import option
from featherweight.techniques.linears import weight_of
from featherweight.techniques.quantiser import Quantiser
from featherweight.techniques.threshold import check_threshold

if TYPE_CHECKING:
    from featherweight.ledger import Ledger


@dataclass(frozen=True)
class Int8(Quantiser):
    """int8 weights and activations, outliers in float, each row by itself."""

    tolerance: ClassVar[float] = 0.5

    threshold: float = option(6.0, help="activations at least this large are outliers; 0: none")
    compat: str | None = option(
        None,
        choices=("bitsandbytes",),
        help="its numbers: everything through float16, outliers over the whole batch",
    )

    def __post_init__(self) -> None:
        check_threshold("int8", self.threshold)

    def convert(self, linear: Any, weight: torch.Tensor) -> Int8Linear:
        """An Int8Linear."""
        return Int8Linear.from_weight(
            weight, linear.bias, threshold=self.threshold, per_batch=bool(self.compat)
        )

    def head_layer(self, linear: Any) -> Int8Linear:
        """As every other layer."""
        return self.convert(linear, weight_of(linear))

    def finish(self, model: nn.Module, ledger: Ledger) -> None:
        """Say how outliers are found."""
        super().finish(model, ledger)
        how = "over the whole batch, as bitsandbytes does" if self.compat else "row by row"
        if self.threshold:
            ledger.receipt.actual["outliers"] = how


TECHNIQUE = Int8
