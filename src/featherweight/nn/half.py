"""Weights in two bytes, arithmetic in float32."""

from __future__ import annotations

from typing import Self

import torch
from torch import nn
from torch.nn import functional as F

from featherweight.nn.frozen import FrozenEmbedding, FrozenLinear, rounded
from featherweight.nn.functional import linear_half


class HalfLinear(FrozenLinear):
    """A linear layer of bfloat16 or float16 weights [N, K] that multiplies and sums in float32.

    Half the bytes of float32 to read, and no more error than rounding the weights makes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        weight = torch.zeros(out_features, in_features, dtype=dtype, device=device)
        self.set_tensors(weight, torch.zeros(out_features, device=device) if bias else None)

    @classmethod
    def from_weight(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Self:
        """Round a weight [N, K]; UnsupportedError for NaN, infinity and what overflows `dtype`."""
        out_features, in_features = weight.shape
        new = cls(in_features, out_features, bias=False, dtype=dtype, device="meta")
        new.set_tensors(rounded(weight, dtype), bias)
        return new

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] → [..., N] in the dtype of x."""
        parameters = self._parameters  # past nn.Module.__getattr__: this runs 200 times a token
        return linear_half(x, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]

    def dequantize(self) -> torch.Tensor:
        """The weight widened, f32 [N, K]."""
        return self.weight.data.float()

    def extra_repr(self) -> str:
        """Sizes and dtype."""
        return f"{super().extra_repr()}, dtype={self.weight.dtype}"


class HalfEmbedding(FrozenEmbedding):
    """An embedding of bfloat16 or float16 rows [V, K] that gives float32, or another `dtype`."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: torch.dtype = torch.float32,
        weight_dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, dtype)
        weight = torch.zeros(num_embeddings, embedding_dim, dtype=weight_dtype, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)

    @classmethod
    def from_weight(
        cls,
        weight: torch.Tensor,
        padding_idx: int | None = None,
        *,
        weight_dtype: torch.dtype = torch.bfloat16,
    ) -> Self:
        """Round a weight [V, K]; UnsupportedError for what `weight_dtype` cannot hold."""
        rows, columns = weight.shape
        new = cls(rows, columns, padding_idx, weight_dtype=weight_dtype, device="meta")
        new.weight = nn.Parameter(rounded(weight, weight_dtype), requires_grad=False)
        return new

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [...] → rows [..., K] in `dtype`."""
        return F.embedding(ids, self.weight).to(self.dtype)

    def dequantize(self) -> torch.Tensor:
        """The weight widened, f32 [V, K]."""
        return self.weight.data.float()
