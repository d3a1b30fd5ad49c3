"""8-bit weights: LLM.int8() layers, and an embedding of the same codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import nn
from torch.nn import functional as F

from featherweight.errors import ModelError
from featherweight.nn.frozen import (
    FrozenEmbedding,
    frozen,
    quantise,
    refuse_non_finite,
    rounded,
)
from featherweight.nn.functional import linear_int8
from featherweight.nn.quantised import QuantisedLinear, finite, known, wanted
from featherweight.quant.absmax import dequantize_absmax


class Int8Linear(QuantisedLinear):
    """A linear layer of int8 weights [N, K] and one absmax for each of its N outputs.

    Activations are rounded to int8 row by row, outliers apart (LLM.int8(), arXiv 2208.07339).

    Args:
        threshold: activations at least this large are outliers, multiplied in float; 0: none.
        per_batch: as bitsandbytes does it: activations are rounded to float16 first, and outliers
            are whole columns of the batch, so that a row's result depends on its neighbours.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        threshold: float = 6.0,
        per_batch: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self.threshold = threshold
        self.per_batch = per_batch
        codes = torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
        self.set_tensors(codes, torch.zeros(out_features, device=device) if bias else None)
        self.register_buffer("absmax", torch.zeros(out_features, device=device))

    @classmethod
    def from_weight(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        threshold: float = 6.0,
        per_batch: bool = False,
    ) -> Self:
        """Quantise a weight [N, K]; raises UnsupportedError for one with NaN or infinity."""
        out_features, in_features = weight.shape
        new = cls(in_features, out_features, False, threshold, per_batch, device="meta")
        new.register_parameter("bias", frozen(bias))
        new.quantise(weight)
        return new

    @classmethod
    def from_codes(
        cls,
        codes: torch.Tensor,
        absmax: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        threshold: float = 6.0,
        per_batch: bool = False,
    ) -> Self:
        """A layer around codes int8 [N, K] and absmax f32 [N]; neither is copied."""
        out_features, in_features = codes.shape
        new = cls(in_features, out_features, False, threshold, per_batch, device="meta")
        new.set_tensors(codes, bias)
        new.absmax = absmax
        return new

    def quantise(self, weight: torch.Tensor) -> None:
        """Take the codes of a weight [N, K]; UnsupportedError for one with NaN or infinity.

        Of a layer that counts as bitsandbytes does, the weight passes through float16, as there.
        """
        if weight.is_meta:
            return
        if self.per_batch:
            weight = rounded(weight, torch.float16)
        codes, self.absmax = quantise_rows(weight)
        self.set_codes(codes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] → [..., N] in the dtype of x."""
        parameters = self._parameters  # past nn.Module.__getattr__: this runs 200 times a token
        return linear_int8(
            x,
            parameters["weight"],  # type: ignore[arg-type]
            self._buffers["absmax"],  # type: ignore[arg-type]
            parameters["bias"],
            self.threshold,
            self.per_batch,
        )

    def dequantize(self) -> torch.Tensor:
        """The weight that the codes stand for, f32 [N, K]."""
        return dequantize_absmax(self.weight.data, self.absmax, dim=1)

    def stored(self) -> dict[str, torch.Tensor]:
        """`weight`, `SCB` and `weight_format`, as bitsandbytes writes them."""
        row = torch.tensor(0, dtype=torch.uint8)
        return {"weight": self.weight, "SCB": self.absmax, "weight_format": row}

    def take(self, stored: Mapping[str, torch.Tensor]) -> None:
        """Take what `stored` gave; old files have no `weight_format`."""
        known(stored, ("weight", "SCB", "weight_format"))
        shape = (self.out_features, self.in_features)
        codes = wanted(stored, "weight", torch.int8, shape)
        absmax = wanted(stored, "SCB", torch.float32, shape[:1])
        order = stored["weight_format"].tolist() if "weight_format" in stored else 0
        if order != 0:
            raise ModelError(
                f"'weight_format' is {order}: codes in the order of some GPU's tiles",
                hint="save the model again with bitsandbytes 0.38 or newer, by rows",
            )
        finite(SCB=absmax)
        self.set_codes(codes)
        self.absmax = absmax

    def extra_repr(self) -> str:
        """Sizes, threshold, and whose outliers."""
        per_batch = ", per_batch=True" if self.per_batch else ""
        return f"{super().extra_repr()}, threshold={self.threshold:g}{per_batch}"


class Int8Embedding(FrozenEmbedding):
    """An embedding of int8 codes [V, K] and one absmax a row; can share both with a tied head."""

    absmax: torch.Tensor

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, dtype)
        codes = torch.zeros(num_embeddings, embedding_dim, dtype=torch.int8, device=device)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.register_buffer("absmax", torch.zeros(num_embeddings, device=device))

    @classmethod
    def from_weight(
        cls, weight: torch.Tensor, padding_idx: int | None = None, dtype: torch.dtype | None = None
    ) -> Self:
        """Quantise a weight [V, K]; `dtype` is the output's (default: that of the weight).

        Raises UnsupportedError for a weight with NaN or infinity.
        """
        rows, columns = weight.shape
        new = cls(rows, columns, padding_idx, dtype or weight.dtype, device="meta")
        codes, new.absmax = quantise_rows(weight)
        new.weight = nn.Parameter(codes, requires_grad=False)
        return new

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] → rows [..., K] in `dtype`."""
        absmax = F.embedding(ids, self.absmax[:, None])  # [..., 1]
        return (F.embedding(ids, self.weight).float() * (absmax / 127)).to(self.dtype)

    def dequantize(self) -> torch.Tensor:
        """The weight that the codes stand for, f32 [V, K]."""
        return dequantize_absmax(self.weight.data, self.absmax, dim=1)

    def to_dense(self, dtype: torch.dtype) -> nn.Embedding:
        """A plain embedding of what the codes stand for."""
        sizes = self.num_embeddings, self.embedding_dim
        dense = nn.Embedding(*sizes, padding_idx=self.padding_idx, device="meta")
        dense.weight = nn.Parameter(self.dequantize().to(dtype), requires_grad=False)
        return dense.train(self.training)


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] → codes int8 [N, K], absmax f32 [N]; UnsupportedError for NaN or infinity."""
    op = torch.ops.featherweight.quantize_int8
    codes, absmax = quantise(op, weight.detach().contiguous())
    # The absmax of a row with NaN or infinity is NaN: N numbers to look at instead of N · K.
    refuse_non_finite(absmax, "the weight has NaN or infinity, which no code stands for")
    return codes, absmax
