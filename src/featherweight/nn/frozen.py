"""What layers of light weights share: the weight is not trained, its scales are not cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

from featherweight.errors import FeatherweightError, UnsupportedError


class Frozen(nn.Module):
    """A layer whose weight is frozen and whose buffers change device, never dtype."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """`.half()` and `.to(dtype)` of a model pass by here.

        absmax and codebooks stay float32: kernels read them so, and a rounded absmax would make
        other weights of the same codes.
        """
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype is not buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self


class FrozenLinear(Frozen):
    """x [..., in_features] → [..., out_features], in the dtype of x."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features

    def set_tensors(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """The weight frozen; the bias as it is, also the same parameter as another layer's."""
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", frozen(bias))

    def extra_repr(self) -> str:
        """The sizes, as `nn.Linear` prints them."""
        has_bias = self._parameters["bias"] is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"


class FrozenEmbedding(Frozen):
    """ids [...] → [..., embedding_dim], in `dtype`."""

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.dtype = dtype  # of the output: not that of the weight

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """The output's dtype follows `.half()` and `.to(dtype)`, as the rest of the model does."""
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype
        return self

    def extra_repr(self) -> str:
        """The sizes, as `nn.Embedding` prints them, and the output's dtype."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, dtype={self.dtype}"


def frozen(bias: torch.Tensor | None) -> nn.Parameter | None:
    """A bias as a frozen parameter, unless it is a parameter already."""
    if bias is None or isinstance(bias, nn.Parameter):
        return bias
    return nn.Parameter(bias, requires_grad=False)


def quantise(op: Callable[..., Any], *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a quantising op gives; UnsupportedError for a weight that it does not take."""
    try:
        return op(*args)
    except FeatherweightError as error:  # the kernel's and the reference's are two kinds of it
        raise UnsupportedError(error.message, hint=error.hint) from None


def refuse_non_finite(tensor: torch.Tensor, what: str) -> None:
    """Raise UnsupportedError if a tensor made from a weight holds NaN or infinity.

    A tensor of the meta device holds nothing.
    """
    if not tensor.is_meta and not tensor.isfinite().all():
        raise UnsupportedError(what, hint="leave it out, or mend the checkpoint")


def rounded(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight in `dtype`, contiguous; UnsupportedError where that is not finite."""
    narrow = weight.detach().to(dtype).contiguous()
    name = str(dtype).removeprefix("torch.")
    refuse_non_finite(narrow, f"the weight has values that {name} cannot hold, or NaN")
    return narrow
