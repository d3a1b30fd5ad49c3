"""What one call of a torch op costs: its group, its FLOPs, and the bytes that it must move.

The three groups are those of Ivanov et al., "Data Movement Is All You Need" (arXiv 2007.00072).
Tensor contractions take their FLOPs from `torch.utils.flop_counter`, a multiply and an add counted
as two; attention, which that counts as nothing on CPUs, from its two products (five in the backward
pass), over all pairs of tokens whether a causal mask hides them or not. Everything else counts one
for each element of the result (reductions: of the input), normalisations as many as their formula
has; what only moves data counts none.

Bytes are those of tensors read and written once each, elements that a stride of zero repeats
counted once: what must be moved, not what a cache saved or a second pass cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

CONTRACTION = "tensor contraction"
NORMALISATION = "statistical normalisation"
ELEMENTWISE = "element-wise"
UNKNOWN = "not classified"
GROUPS = (CONTRACTION, NORMALISATION, ELEMENTWISE, UNKNOWN)


@dataclass(frozen=True)
class Cost:
    """What one call must do. Bytes; `arithmetic` is the dtype that its products are made in."""

    group: str
    flops: int
    read: int
    written: int
    arithmetic: str  # such as "float32", "int8"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# FLOPs for each element of the first tensor: the steps of the formula, an exponential being one.
_NORMALISATIONS = {
    "_softmax": 5,  # maximum, subtract, exponential, sum, divide
    "_safe_softmax": 5,
    "_log_softmax": 5,
    "_softmax_backward_data": 4,  # multiply, sum, subtract, multiply
    "_log_softmax_backward_data": 4,
    "native_layer_norm": 7,  # mean, subtract, square, mean, three times scale or shift
    "native_layer_norm_backward": 13,  # dx 8, weight's gradient 4, bias' gradient 1
    "_fused_rms_norm": 4,  # square, mean, scale, scale
    "_fused_rms_norm_backward": 9,
    "native_group_norm": 7,
    "native_group_norm_backward": 13,
    "native_batch_norm": 7,
    "native_batch_norm_backward": 13,
    **dict.fromkeys(
        _names(
            "sum nansum mean prod amax amin max min aminmax any all argmax argmin count_nonzero"
            " norm linalg_vector_norm var std var_mean std_mean logsumexp cumsum cumprod"
            " mse_loss mse_loss_backward binary_cross_entropy binary_cross_entropy_with_logits"
            " nll_loss2d_forward nll_loss2d_backward smooth_l1_loss huber_loss kl_div"
        ),
        1,
    ),
    "rsqrt": 1,  # what a decomposed RMSNorm or LayerNorm divides by
    "nll_loss_forward": 0,  # picks one number a row
    "nll_loss_backward": 0,
}

_MOVERS = _names(  # of data, no arithmetic
    "_to_copy clone copy copy_ cat stack embedding gather index _unsafe_index index_select"
    " index_put index_put_ _index_put_impl_ index_copy index_copy_ scatter scatter_ slice_scatter"
    " select_scatter slice_backward select_backward constant_pad_nd repeat roll flip tril triu"
    " tril_ triu_ where masked_fill masked_fill_ masked_scatter masked_scatter_ nonzero"
    " _local_scalar_dense split_with_sizes_copy view_copy unfold_backward resize_ set_"
)
_CREATORS = _names(  # read nothing, whatever tensors they are given the shape of
    "zeros ones full arange scalar_tensor eye linspace rand randn randint randperm zeros_like"
    " ones_like full_like rand_like randn_like new_zeros new_ones new_full fill fill_ zero_"
    " bernoulli_ uniform_ normal_ random_ exponential_ trunc_normal_"
)
_ARITHMETIC = _names(  # element-wise though torch has no pointwise tag for them
    "embedding_dense_backward index_add index_add_ scatter_add scatter_add_ bernoulli multinomial"
    " native_dropout native_dropout_backward sort topk isin bucketize searchsorted glu"
    " glu_backward _foreach_add_ _foreach_mul_"
)
_OURS = {"quantize_int8", "quantize_4bit", "dequantize_4bit"}
_BITSANDBYTES = _names(
    "quantize_4bit dequantize_4bit quantize_blockwise dequantize_blockwise int8_vectorwise_quant"
    " int8_double_quant int8_vectorwise_dequant int8_mm_dequant"
)

# The argument of which no more is read than is written, by its place.
_GATHERED = {"embedding", "gather", "index", "_unsafe_index", "index_select"}
# Arguments of which nothing is read, or next to nothing.
_UNREAD = {"nll_loss_forward": (0,), "nll_loss_backward": (1,), "copy_": (0,), "copy": (0,)}
# In place, and only where an index says: the place of the values.
_SCATTERED = {"index_put_": 2, "_index_put_impl_": 2, "index_copy_": 3, "scatter_": 3}

_FREE = _names(  # neither arithmetic nor bytes: views by another name, and memory not yet written
    "_unsafe_view lift_fresh lift empty empty_like empty_strided new_empty new_empty_strided"
    " sym_size sym_stride sym_numel sym_storage_offset is_same_size record_stream"
)


def name_of(func: Any) -> str:
    """`aten::mm` → "mm"; ops of other libraries keep theirs: "featherweight::linear_int8"."""
    return str(func._schema.name).removeprefix("aten::")


def works(func: Any) -> bool:
    """Whether the op computes or moves anything; views and empty tensors do not."""
    return not func.is_view and name_of(func) not in _FREE


def cost(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Cost:
    """Group, FLOPs and bytes of a call, from its arguments and its result.

    An op that no rule covers is of the group `UNKNOWN`, with bytes and without FLOPs.
    """
    name = name_of(func)
    read, written = _bytes(func, name, args, kwargs, out)
    tensors = _tensors((args, kwargs, out))
    contraction = _contraction(func, name, args, kwargs, out)
    if contraction is not None:
        flops, products = contraction
        dtype = next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)
        own = str(dtype).removeprefix("torch.")
        return Cost(CONTRACTION, flops, read, written, products or own)
    group, each = _group(func, name)
    counted: Iterable[Tensor] = ()
    if each and any(t.is_floating_point() for t in tensors):
        first = tensors if group == NORMALISATION else [*_tensors(out), *_written(func, args)]
        counted = first[:1]
    return Cost(group, each * sum(t.numel() for t in counted), read, written, "float32")


def _group(func: Any, name: str) -> tuple[str, int]:
    """The group of an op that is no contraction, and its FLOPs for each element."""
    if name in _NORMALISATIONS:
        return NORMALISATION, _NORMALISATIONS[name]
    if name in _MOVERS or name in _CREATORS:
        return ELEMENTWISE, 0
    library, _, op = name.rpartition("::")
    known = {"": _ARITHMETIC, "featherweight": _OURS, "bitsandbytes": _BITSANDBYTES}
    if op in known.get(library, ()) or torch.Tag.pointwise in func.tags:
        return ELEMENTWISE, 1
    return UNKNOWN, 0


# --- contractions --------------------------------------------------------------------------


def attention_flops(query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> int:
    """FLOPs of both products of attention over all pairs of tokens: 4·B·H·S²·D where S = T.

    Args: shapes [B, H, S, D], [B, H_kv, T, D] and [B, H_kv, T, D_v].
    """
    *batch, tokens, dim = query
    return 2 * math.prod(batch) * tokens * key[-2] * (dim + value[-1])


def attention_backward_flops(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]
) -> int:
    """FLOPs of the five products of flash attention's backward pass: 2.5 times the forward pass.

    Scores are made again (2·B·H·S·T·D), as are the gradients of query and key; those of scores
    and value take 2·B·H·S·T·D_v each.
    """
    *batch, tokens, dim = query
    return 2 * math.prod(batch) * tokens * key[-2] * (3 * dim + 2 * value[-1])


def _contraction(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[int, str | None] | None:
    """FLOPs and the dtype of products (None: that of the tensors); None for any other op."""
    if name.startswith("_scaled_dot_product_"):
        shapes = [tuple(t.shape) for t in args[:4] if isinstance(t, Tensor)]
        if name.endswith("_backward"):
            return attention_backward_flops(shapes[1], shapes[2], shapes[3]), None
        return attention_flops(shapes[0], shapes[1], shapes[2]), None
    if name in _LINEAR:
        outputs, products = _LINEAR[name](*args, **kwargs)
        return 2 * args[0].numel() * outputs, products
    formula = flop_registry.get(func._overloadpacket)
    return (formula(*args, **kwargs, out_val=out), None) if formula else None


# Products of rows with a weight: arguments → (numbers a row becomes, dtype of products).
_LINEAR: dict[str, Callable[..., tuple[int, str | None]]] = {
    "featherweight::linear_int8": lambda x, weight, *_: (weight.shape[0], "int8"),
    "featherweight::linear_int8_backward": lambda grad, weight, *_: (weight.shape[1], "float32"),
    "featherweight::linear_4bit": lambda x, *args: (args[-3], "float32" if args[-1] else "int8"),
    "featherweight::linear_4bit_backward": lambda grad, *args: (args[-1], "float32"),
    "featherweight::linear_half": lambda x, weight, *_: (weight.shape[0], "float32"),
    "featherweight::linear_half_backward": lambda grad, weight: (weight.shape[1], "float32"),
    "bitsandbytes::gemv_4bit": lambda a, b, shape, *_, **__: (shape[0], None),
    "bitsandbytes::gemm_4bit": lambda a, b, shape, *_, **__: (shape[0], None),
    "bitsandbytes::int8_linear_matmul": lambda a, b, *_, **__: (b.shape[0], "int8"),
    "bitsandbytes::int8_scaled_mm": lambda a, b, *_, **__: (b.shape[0], "int8"),
    "bitsandbytes::int8_mixed_scaled_mm": lambda a, ca, cb, *_, **__: (cb.shape[0], "int8"),
    "_int_mm": lambda a, b, *_: (b.shape[1], "int8"),
    "linear": lambda x, weight, *_: (weight.shape[0], None),
    "mv": lambda matrix, vector: (1, None),
    "dot": lambda left, right: (1, None),
}


# --- bytes ---------------------------------------------------------------------------------


def nbytes(tensor: Tensor) -> int:
    """Bytes of the elements that a tensor really has: those repeated by a stride of zero once."""
    if tensor.layout is not torch.strided:
        return tensor.numel() * tensor.element_size()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in pairs if stride or not size) * tensor.element_size()


def _bytes(
    func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> tuple[int, int]:
    """Bytes (read, written)."""
    changed = [*_written(func, args)]
    results = _unique([*_tensors(out), *changed, *_tensors(kwargs.get("out"))])
    if name in _SCATTERED:
        place = _SCATTERED[name]
        values = sum(map(nbytes, _tensors(args[place : place + 1])))
        return sum(map(nbytes, _tensors(args[1:]))), values
    written = 0 if name == "_local_scalar_dense" else sum(map(nbytes, results))
    if name in _CREATORS:
        return 0, written
    kept = {key: value for key, value in kwargs.items() if key != "out"}
    skipped = _UNREAD.get(name, (0,) if name in _GATHERED else ())
    others = [arg for place, arg in enumerate(args) if place not in skipped]
    read = sum(map(nbytes, _unique(_tensors((others, kept)))))
    return read + (written if name in _GATHERED else 0), written


def _written(func: Any, args: tuple[Any, ...]) -> Iterator[Tensor]:
    """Arguments that the op changes in place."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(value)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _unique(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [*{id(tensor): tensor for tensor in tensors}.values()]
