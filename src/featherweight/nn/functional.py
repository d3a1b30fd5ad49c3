"""The products with light weights, as autograd sees them.

Weights are frozen: the gradient that flows is the input's, and it is that of the dequantised
layer (rounding activations to 8 bits counts as the identity). Where none is wanted, a call goes
straight to the op.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from featherweight.errors import UnsupportedError
from featherweight.native import ops as _ops  # noqa: F401  registers torch.ops.featherweight

# Overloads, looked up once: a packet picks one of them at every call.
_linear_int8 = torch.ops.featherweight.linear_int8.default
_linear_4bit = torch.ops.featherweight.linear_4bit.default
_linear_half = torch.ops.featherweight.linear_half.default
_linear_int8_backward = torch.ops.featherweight.linear_int8_backward.default
_linear_4bit_backward = torch.ops.featherweight.linear_4bit_backward.default
_linear_half_backward = torch.ops.featherweight.linear_half_backward.default


def linear_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    bias: torch.Tensor | None = None,
    threshold: float = 6.0,
    per_batch: bool = False,
) -> torch.Tensor:
    """LLM.int8() (arXiv 2208.07339): x [..., K] times weight int8 [N, K]: [..., N], dtype of x.

    absmax is f32 [N]. Activations of at least `threshold` are multiplied in float (0: none).
    `per_batch` is bitsandbytes' way: activations pass through float16, and whole columns of the
    batch are outliers.
    """
    if torch.is_grad_enabled() and (x.requires_grad or _trained(bias)):
        inside, outside = _split(bias)
        return _add(_Int8.apply(x, weight, absmax, inside, threshold, per_batch), outside)
    return _int8(x, weight, absmax, bias, threshold, per_batch)


def linear_4bit(
    x: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_code: torch.Tensor | None,
    nested_offset: float,
    code: torch.Tensor,
    blocksize: int,
    out_features: int,
    bias: torch.Tensor | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """x [..., K] times a 4-bit weight [N, K]: [..., N], dtype of x.

    codes are uint8, two weights a byte; code f32 [16] is their codebook; absmax is f32 [blocks],
    or uint8 [blocks] where the nested_* are given. `exact` multiplies float activations; otherwise
    they are rounded to 8 bits, block by block.
    """
    scales = (absmax, nested_absmax, nested_code, nested_offset)
    if torch.is_grad_enabled() and (x.requires_grad or _trained(bias)):
        inside, outside = _split(bias)
        out = _FourBit.apply(x, codes, *scales, code, blocksize, out_features, inside, exact)
        return _add(out, outside)
    return _linear_4bit(x, codes, *scales, code, blocksize, out_features, bias, exact)


def linear_half(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x [..., K] times weight [N, K] in bf16, f16 or f32, summed in f32: [..., N], dtype of x."""
    if torch.is_grad_enabled() and (x.requires_grad or _trained(bias) or weight.requires_grad):
        if weight.requires_grad:
            raise UnsupportedError(
                "a HalfLinear's weight cannot be trained",
                hint="freeze it: weight.requires_grad_(False), or undo 'compute=fp32'",
            )
        inside, outside = _split(bias)
        return _add(_Half.apply(x, weight, inside), outside)
    return _linear_half(x, weight, bias)


def _int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    bias: torch.Tensor | None,
    threshold: float,
    per_batch: bool,
) -> torch.Tensor:
    if per_batch:
        x = x.half().to(x.dtype)
    return _linear_int8(x, weight, absmax, bias, threshold, per_batch)


def _trained(bias: torch.Tensor | None) -> bool:
    return bias is not None and bias.requires_grad


def _split(bias: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(what the op adds, what autograd adds): a bias that is trained goes outside."""
    return (None, bias) if _trained(bias) else (bias, None)


def _add(out: Any, bias: torch.Tensor | None) -> torch.Tensor:
    return out if bias is None else out + bias.to(out.dtype)


class _Int8(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return _int8(x, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        _, weight, absmax, *_ = inputs
        ctx.save_for_backward(weight, absmax)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _linear_int8_backward(grad, *ctx.saved_tensors), None, None, None, None, None


class _FourBit(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return _linear_4bit(x, *rest)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        x, codes, absmax, nested_absmax, nested_code, offset, code, blocksize, *_ = inputs
        ctx.save_for_backward(codes, absmax, nested_absmax, nested_code, code)
        ctx.rest = offset, blocksize, x.shape[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        *scales, code = ctx.saved_tensors
        offset, blocksize, in_features = ctx.rest
        found = _linear_4bit_backward(grad, *scales, offset, code, blocksize, in_features)
        return found, *(None,) * 10


class _Half(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _linear_half(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _linear_half_backward(grad, *ctx.saved_tensors), None, None
