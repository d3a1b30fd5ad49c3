"""bitsandbytes' layers as a dry run needs them: their storage and what they allocate at a call.

bitsandbytes quantises when a tensor moves to its device, which a tensor without data cannot do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from featherweight.nn.frozen import FrozenLinear
from featherweight.techniques.bnb import Bnb
from featherweight.techniques.cast import DTYPES
from featherweight.techniques.linears import weight_of
from featherweight.techniques.replace import places

NESTED = 256  # absmax values that share one in a doubly quantised weight
OUTLIERS = 0.001  # share of columns in which an activation is an outlier (arXiv 2208.07339)


class FourBitStandIn(FrozenLinear):
    """`bitsandbytes.nn.Linear4bit` on a GPU: the weight is dequantised whole at every call."""

    def __init__(self, linear: nn.Module, blocksize: int, double: bool, dtype: torch.dtype) -> None:
        rows, columns = weight_of(linear).shape
        super().__init__(columns, rows)
        count = rows * columns
        blocks = -(-count // blocksize)
        self.compute_dtype = dtype
        self.set_tensors(torch.empty(-(-count // 2), 1, dtype=torch.uint8, device="meta"), None)
        self.register_parameter("bias", linear.bias)  # type: ignore[arg-type]
        scale = torch.uint8 if double else torch.float32
        self.register_buffer("absmax", torch.empty(blocks, dtype=scale, device="meta"))
        self.register_buffer("quant_map", torch.empty(16, device="meta"))
        if double:
            self.register_buffer("nested", torch.empty(-(-blocks // NESTED), device="meta"))
            self.register_buffer("nested_map", torch.empty(256, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] → [..., N]; one row without a gradient needs no whole weight (gemv_4bit)."""
        given = x.to(self.compute_dtype)
        shape = (self.out_features, self.in_features)
        out = _Dequantised.apply(given, self.weight, shape, None)
        return (out if self.bias is None else out + self.bias.to(out.dtype)).to(x.dtype)


class Int8StandIn(FrozenLinear):
    """`bitsandbytes.nn.Linear8bitLt`: int8 codes of weights and of activations."""

    def __init__(self, linear: nn.Module) -> None:
        rows, columns = weight_of(linear).shape
        super().__init__(columns, rows)
        self.set_tensors(torch.empty(rows, columns, dtype=torch.int8, device="meta"), None)
        self.register_parameter("bias", linear.bias)  # type: ignore[arg-type]
        self.register_buffer("SCB", torch.empty(rows, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] → [..., N], through float16 as there."""
        half = x.to(torch.float16)
        shape = (self.out_features, self.in_features)
        out = _Dequantised.apply(half, self.weight, shape, max(1, int(shape[1] * OUTLIERS)))
        return (out if self.bias is None else out + self.bias.to(out.dtype)).to(x.dtype)


class _Dequantised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, shape: tuple[int, int], outliers: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(codes)
        ctx.shape, ctx.dtype = shape, x.dtype
        if outliers is not None:
            rows = x.numel() // x.shape[-1]
            activations = x.new_empty((rows, shape[1]), dtype=torch.int8)  # noqa: F841
            products = x.new_empty((rows, shape[0]), dtype=torch.int32)  # noqa: F841
            columns = x.new_empty((shape[0], outliers))  # noqa: F841
            return x.new_empty((*x.shape[:-1], shape[0]))
        if x.numel() == x.shape[-1] and not x.requires_grad:
            return x.new_empty((*x.shape[:-1], shape[0]))
        return F.linear(x, x.new_empty(shape))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        weight = grad.new_empty(ctx.shape, dtype=ctx.dtype)
        return grad.to(ctx.dtype) @ weight, None, None, None


def apply_bnb(technique: Bnb, model: nn.Module) -> None:
    """Put stand-ins where the technique would put bitsandbytes' layers; on the meta device."""
    chosen = set(technique.chosen(model))
    for names in places(model, lambda module: True):
        if names[0] not in chosen:
            continue
        linear: Any = model.get_submodule(names[0])
        new: nn.Module
        if hasattr(technique, "compute"):
            options: Any = technique
            new = FourBitStandIn(linear, options.blocksize, options.double, DTYPES[options.compute])
        else:
            new = Int8StandIn(linear)
        new.train(linear.training)
        for name in names:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
