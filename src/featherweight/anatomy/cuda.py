"""Trace a program on fake CPU tensors as it would run on a CUDA GPU.

A fake tensor on a GPU cannot have gradients where torch is built without CUDA, so the program is
traced on the CPU, and what differs there is put right: `CudaFunctions` sends functions that torch
takes apart on a CPU to the operations of a GPU, and `inside` knows what CUDA kernels allocate and
free unseen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from featherweight.anatomy.attention import HALF, Kernels, scaled_dot_product_attention
from featherweight.anatomy.eras import Era
from featherweight.anatomy.gpus import MIB, Gpu


class CudaFunctions(TorchFunctionMode):
    """A context in which functions go the way that they go on a GPU.

    `autocast` is the dtype of CUDA's mixed precision; the region itself is `torch.autocast("cpu")`,
    whose list of half-precision functions is CUDA's as far as transformers go, but not its list of
    float32 ones.
    """

    def __init__(
        self, gpu: Gpu, era: Era, kernels: Kernels, autocast: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.gpu = gpu
        self.era = era
        self.kernels = kernels
        self.autocast = autocast

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.backward:
            return self._backward(args[0])
        if func in (F.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            if self._autocasting():
                args = tuple(_cast(arg, self.autocast) for arg in args)
            return scaled_dot_product_attention(self.gpu, self.kernels, *args, **kwargs)
        if func in (F.softmax, torch.softmax, Tensor.softmax):
            return self._softmax(func, *args, **kwargs)
        if self._autocasting() and func in _IN_FLOAT32:
            args = tuple(_cast(arg, torch.float32) for arg in args)
            kwargs = {key: _cast(value, torch.float32) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _backward(self, loss: Tensor) -> None:
        """Run backward inside this mode: layers that are computed again go the same way.

        torch's own functions would come back here first.
        """
        engine = torch.autograd.Variable._execution_engine
        first = torch.ones_like(loss)
        with self:
            engine.run_backward(
                (loss,), (first,), False, False, (), allow_unreachable=True, accumulate_grad=True
            )

    def _autocasting(self) -> bool:
        return self.autocast is not None and torch.is_autocast_enabled("cpu")

    def _softmax(self, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """A CUDA softmax reads half precision and writes float32 in one kernel."""
        dtype = kwargs.get("dtype")
        if self._autocasting() and dtype is None:
            dtype = torch.float32
        to_float = dtype is torch.float32 and input.dtype in HALF
        if to_float or self.era.softmax_keeps_input:
            kept = self.era.softmax_keeps_input
            return _Softmax.apply(input, torch.float32 if to_float else input.dtype, kept)
        return func(input, *args, **kwargs)


class _Softmax(torch.autograd.Function):
    """softmax into another dtype without a copy of its input; `keeps_input` for backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, dtype: torch.dtype, keeps_input: bool) -> Tensor:
        out = torch.empty_like(input, dtype=dtype)
        ctx.save_for_backward(*((out, input) if keeps_input else (out,)))
        ctx.dtype = input.dtype
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out = ctx.saved_tensors[0]
        return torch.empty_like(out, dtype=ctx.dtype), None, None


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A CUDA dropout keeps a mask of one byte an element."""
    if p == 0 or not training:
        return input
    if inplace:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not dtype:
        return value.to(dtype)
    return value


_IN_FLOAT32 = {
    F.layer_norm,
    F.group_norm,
    F.log_softmax,
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.binary_cross_entropy_with_logits,
    torch.log_softmax,
    torch.sum,
    Tensor.sum,
    torch.cumsum,
    Tensor.cumsum,
    torch.exp,
    Tensor.exp,
    torch.pow,
    Tensor.pow,
    torch.rsqrt,
    Tensor.log_softmax,
}


def inside(gpu: Gpu) -> Callable[[Any, tuple, Any], int]:
    """What CUDA kernels allocate beside their outputs, as the tracker asks for it."""
    return functools.partial(_inside, gpu)


def _inside(gpu: Gpu, func: Any, args: tuple, out: Any) -> int:
    name = func._schema.name
    rule = _RULES.get(name)
    return rule(gpu, args, out) if rule else 0


def _copies(gpu: Gpu, args: tuple, out: Any) -> int:
    """Operands that cuBLAS cannot read as they lie are copied: neither rows nor columns adjoin.

    Such as the gradient of a sum, one number seen everywhere.
    """
    return sum(arg.numel() * arg.element_size() for arg in args[-2:] if not _readable(arg))


def _readable(matrix: Tensor) -> bool:
    rows, columns = matrix.shape[-2:]
    down, along = matrix.stride()[-2:]
    return (along == 1 and down >= max(1, columns)) or (down == 1 and along >= max(1, rows))


def _addmm(gpu: Gpu, args: tuple, out: Any) -> int:
    """addmm with a bias goes to cuBLASLt, which gets a workspace of its own for the call.

    1 MiB; 32 MiB from Hopper on (PyTorch's _getWorkspaceSize).
    """
    return (32 * MIB if gpu.capability >= (9, 0) else MIB) + _copies(gpu, args, out)


def _flash_backward(gpu: Gpu, args: tuple, out: Any) -> int:
    """dq is summed up in float32 beside its output, and one number a row: [B, H, S, D], [B, H, S].

    S in blocks of 128, D in steps of 32 (flash_attention's mha_bwd).
    """
    query = args[1]
    batch, heads, length, head_dim = query.shape
    rounded = -(-length // 128) * 128
    accumulated = rounded * (-(-head_dim // 32) * 32) * 4
    softmax_sums = rounded * 4
    expanded = 0
    key = args[2]
    if key.shape[1] != heads:  # grouped queries: dk and dv of every head, summed afterwards
        expanded = 2 * key.shape[2] * head_dim * key.element_size()
    return batch * heads * (accumulated + softmax_sums + expanded)


def _efficient_backward(gpu: Gpu, args: tuple, out: Any) -> int:
    """One float32 a row, and dq summed up in float32 beside its output, in tiles of 64 × 64.

    In all dtypes from Volta on (kernel_backward.h's kNeedsAccumGradQ); dk and dv are summed up in
    tiles that are few.
    """
    batch, heads, length, head_dim = args[1].shape
    accumulated = (-(-length // 64) * 64) * (-(-head_dim // 64) * 64)
    return batch * heads * (length + accumulated) * 4


def _embedding_backward(gpu: Gpu, args: tuple, out: Any) -> int:
    """Ids are sorted and counted, in 64-bit integers: keys, places, and the sort's own copies."""
    return 6 * 8 * args[1].numel()


_RULES: dict[str, Callable[[Gpu, tuple, Any], int]] = {
    "aten::mm": _copies,
    "aten::bmm": _copies,
    "aten::baddbmm": _copies,
    "aten::addmm": _addmm,
    "aten::_scaled_dot_product_flash_attention_backward": _flash_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::embedding_dense_backward": _embedding_backward,
}
