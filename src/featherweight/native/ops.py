"""The ops `torch.ops.featherweight.*`: schema, shape rule, reference and kernel of each.

On CPU tensors a kernel runs, or the reference where the native library is missing; on other
devices the reference. The reference is plain torch (`featherweight.quant`); a kernel is only ever
tested against it. Fake tensors, `torch.export` and `torch.compile` see the shape rule.

Registered with `Library.impl`, not `custom_op`, whose dispatch costs several times the 3 µs of this
one: a token passes 200 linear layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from featherweight.errors import UnsupportedError
from featherweight.native import linear as native
from featherweight.native.library import available
from featherweight.quant import blockdot, blockwise
from featherweight.quant import int8 as llm_int8
from featherweight.quant.nested import Nested

_library = torch.library.Library("featherweight", "DEF")
_4BIT = (
    "Tensor codes, Tensor absmax, Tensor? nested_absmax, Tensor? nested_code, float nested_offset,"
    " Tensor code, int blocksize"
)


def _define(schema: str, reference: Callable, kernel: Callable, shape: Callable) -> None:
    """Register one op. `shape` makes an empty result on the device of its arguments."""
    name = schema.partition("(")[0]
    _library.define(schema)

    def on_cpu(*args: Any) -> Any:
        return kernel(*args) if available() else reference(*args)

    def on_meta(*args: Any) -> Any:
        devices = {str(arg.device) for arg in args if isinstance(arg, Tensor)}
        if len(devices) > 1:  # an offloaded weight: there would be memory that nobody writes
            raise UnsupportedError(
                f"{name} got tensors on {' and '.join(sorted(devices))}",
                hint="a tensor on the meta device has no data: load the model without offloading",
            )
        return shape(*args)

    _library.impl(name, on_cpu, "CPU")
    _library.impl(name, reference, "CompositeExplicitAutograd")
    _library.impl(name, on_meta, "Meta")


# int8 weights


def _int8_kernel(
    x: Tensor,
    weight: Tensor,
    absmax: Tensor,
    bias: Tensor | None,
    threshold: float,
    per_batch: bool,
) -> Tensor:
    matrix = native.int8(weight, absmax)
    return native.linear(matrix, x, bias, threshold=threshold, per_batch=per_batch)


def _int8_backward(grad: Tensor, weight: Tensor, absmax: Tensor) -> Tensor:
    return (grad.float() @ (weight.float() * (absmax / 127)[:, None])).to(grad.dtype)


_define(
    "linear_int8(Tensor x, Tensor weight, Tensor absmax, Tensor? bias, float threshold,"
    " bool per_batch) -> Tensor",
    reference=llm_int8.linear_int8,
    kernel=_int8_kernel,
    shape=lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
_define(
    "linear_int8_backward(Tensor grad, Tensor weight, Tensor absmax) -> Tensor",
    reference=_int8_backward,
    kernel=lambda grad, weight, absmax: native.backward(native.int8(weight, absmax), grad),
    shape=lambda grad, weight, absmax: grad.new_empty((*grad.shape[:-1], weight.shape[1])),
)
_define(
    "quantize_int8(Tensor weight) -> (Tensor, Tensor)",
    reference=llm_int8.quantize_rows,
    kernel=native.quantize_rows,
    shape=lambda weight: (
        weight.new_empty(weight.shape, dtype=torch.int8),
        weight.new_empty(weight.shape[:-1], dtype=torch.float32),
    ),
)


# 4-bit weights


def _four_bit(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    codes: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_code: Tensor | None,
    nested_offset: float,
    code: Tensor,
    blocksize: int,
) -> blockwise.FourBit:
    scales: Tensor | Nested = absmax
    if nested_absmax is not None and nested_code is not None:
        scales = Nested(absmax, nested_absmax, nested_code, nested_offset)
    return blockwise.FourBit(codes.reshape(-1), scales, code, blocksize, shape, dtype)


def _4bit_reference(x: Tensor, *args: Any) -> Tensor:
    *weight, out_features, bias, exact = args
    q = _four_bit((out_features, x.shape[-1]), x.dtype, *weight)
    return blockdot.linear_4bit(x, q, bias, exact)


def _4bit_kernel(x: Tensor, *args: Any) -> Tensor:
    *weight, out_features, bias, exact = args
    matrix = native.four_bit((out_features, x.shape[-1]), *weight)
    return native.linear(matrix, x, bias, exact=exact)


def _4bit_backward_reference(grad: Tensor, *args: Any) -> Tensor:
    *weight, in_features = args
    q = _four_bit((grad.shape[-1], in_features), torch.float32, *weight)
    return (grad.float() @ blockwise.dequantize_4bit(q)).to(grad.dtype)


def _4bit_backward_kernel(grad: Tensor, *args: Any) -> Tensor:
    *weight, in_features = args
    return native.backward(native.four_bit((grad.shape[-1], in_features), *weight), grad)


def _dequantize_reference(*args: Any) -> Tensor:
    *weight, shape, dtype = args
    return blockwise.dequantize_4bit(_four_bit(tuple(shape), dtype, *weight))


def _dequantize_kernel(*args: Any) -> Tensor:
    *weight, shape, dtype = args
    columns = shape[-1] if shape else 1
    rows = torch.Size(shape[:-1]).numel()
    return native.decode(native.four_bit((rows, columns), *weight), dtype).view(shape)


def _quantize_reference(weight: Tensor, code: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    q = blockwise.quantize_4bit(weight, code, blocksize)
    return q.codes, blockwise.scales(q.absmax)


_define(
    f"linear_4bit(Tensor x, {_4BIT}, int out_features, Tensor? bias, bool exact) -> Tensor",
    reference=_4bit_reference,
    kernel=_4bit_kernel,
    shape=lambda x, *args: x.new_empty((*x.shape[:-1], args[-3])),
)
_define(
    f"linear_4bit_backward(Tensor grad, {_4BIT}, int in_features) -> Tensor",
    reference=_4bit_backward_reference,
    kernel=_4bit_backward_kernel,
    shape=lambda grad, *args: grad.new_empty((*grad.shape[:-1], args[-1])),
)
_define(
    f"dequantize_4bit({_4BIT}, int[] shape, ScalarType dtype) -> Tensor",
    reference=_dequantize_reference,
    kernel=_dequantize_kernel,
    shape=lambda codes, *args: codes.new_empty(args[-2], dtype=args[-1]),
)
_define(
    "quantize_4bit(Tensor weight, Tensor code, int blocksize) -> (Tensor, Tensor)",
    reference=_quantize_reference,
    kernel=native.quantize_4bit,
    shape=lambda weight, code, blocksize: (
        weight.new_empty(((weight.numel() + 1) // 2,), dtype=torch.uint8),
        weight.new_empty((-(-weight.numel() // blocksize),), dtype=torch.float32),
    ),
)


# weights in a float dtype, arithmetic in float32


def _half_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = linear(x.float(), weight.float(), None if bias is None else bias.float())
    return out.to(x.dtype)


def _half_backward(grad: Tensor, weight: Tensor) -> Tensor:
    return (grad.float() @ weight.float()).to(grad.dtype)


_define(
    "linear_half(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=_half_reference,
    kernel=lambda x, weight, bias: native.linear(native.floats(weight), x, bias),
    shape=lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
)
_define(
    "linear_half_backward(Tensor grad, Tensor weight) -> Tensor",
    reference=_half_backward,
    kernel=lambda grad, weight: native.backward(native.floats(weight), grad),
    shape=lambda grad, weight: grad.new_empty((*grad.shape[:-1], weight.shape[1])),
)
