"""The modules of a decoder as the structs that the native library reads: pointers, no copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from featherweight.errors import UnsupportedError
from featherweight.fastpath.block import Block
from featherweight.native import decoder as native
from featherweight.native import linear as products
from featherweight.nn import FourBitLinear, HalfLinear, Int8Linear
from featherweight.quant.blockwise import DTYPES

_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh", "GELUActivation": "gelu", "ReLU": "relu",
}  # fmt: skip


class Weights:
    """Structs of all layers, and the tensors that they point to."""

    def __init__(self, inner: Any, block: Block) -> None:
        self._kept: list[torch.Tensor] = []
        layers = block.layer_list(inner)
        first = layers[0]
        attention: Any = first.get_submodule(block.attention)
        head_dim = int(getattr(attention, "head_dim", 0) or attention.head_size)
        o, up = (first.get_submodule(path) for path in (block.o, block.up))
        hidden, inside = sizes(o)[0], sizes(o)[1]
        qkv = block.qkv(inner.config)
        keys = sizes(first.get_submodule(block.k))[0] if block.k else None
        stacked = sizes(first.get_submodule(block.q))[0] - inside
        self.decoder = native.Decoder(
            hidden=hidden,
            heads=inside // head_dim,
            kv_heads=(stacked // 2 if keys is None else keys) // head_dim,
            head_dim=head_dim,
            intermediate=sizes(up)[0] // (2 if block.gate_with_up else 1),
            activation=native.ACTIVATIONS[activation(first.get_submodule(block.mlp))],
            parallel=int(block.parallel(inner.config)),
            qkv=qkv,
            gate_with_up=int(block.gate_with_up),
        )
        self.layers = native.table([self._layer(layer, block, inner.config) for layer in layers])
        self.last = self._norm(inner.get_submodule(block.final_norm), block)
        self.count = len(layers)
        self.window = min((layer.window for layer in self.layers if layer.window), default=0)
        # What a rotary embedding with several kinds of angles (Gemma's) wants to know of a layer.
        several = block.rotary and isinstance(inner.get_submodule(block.rotary).rope_type, dict)
        self.kinds: list[Any] = [
            layer.get_submodule(block.attention).layer_type if several else None for layer in layers
        ]
        self.multiply_adds = sum(  # of one layer, for one token
            sizes(first.get_submodule(path))[0] * sizes(first.get_submodule(path))[1]
            for path in block.projections.values()
        )
        self.places = places(inner, block)

    def _layer(self, layer: Any, block: Block, config: Any) -> native.Layer:
        made = native.Layer()
        for name, path in block.projections.items():
            setattr(made, name, self._projection(layer.get_submodule(path), path))
        for name, path in block.norms.items():
            setattr(made, name, self._norm(layer.get_submodule(path), block))
        attention = layer.get_submodule(block.attention)
        made.scaling = float(attention.scaling)
        unset = getattr(config, "sliding_window", None)
        made.window = getattr(attention, "sliding_window", unset) or 0
        return made

    def _projection(self, module: Any, path: str) -> native.Projection:
        bias = None if module.bias is None else self._float(module.bias)
        threshold, flags = 0.0, 0
        if isinstance(module, FourBitLinear):
            matrix = products.four_bit(
                (module.out_features, module.in_features),
                module.weight.data,
                module.absmax,
                module.nested_absmax,
                module.nested_quant_map,
                module.nested_offset,
                module.quant_map,
                module.blocksize,
            )
            self._kept += [module.weight.data, *module.buffers()]
            flags = products.EXACT if module.exact else 0
        elif isinstance(module, Int8Linear):
            matrix = products.int8(module.weight.data, module.absmax)
            self._kept += [module.weight.data, module.absmax]
            threshold = module.threshold
        else:
            weight = module.weight.data.T if isinstance(module, Conv1D) else module.weight.data
            matrix = products.floats(weight)
            self._kept.append(weight)
        address = bias.data_ptr() if bias is not None else None
        return native.Projection(matrix, address, threshold, flags)

    def _norm(self, module: Any, block: Block) -> native.Norm:
        weight = self._float(block.norm_weight(module.weight))
        bias = getattr(module, "bias", None)
        bias = None if bias is None else self._float(bias)
        eps = next(getattr(module, n) for n in ("variance_epsilon", "eps") if hasattr(module, n))
        return native.norm(weight, bias, float(eps), block.center)

    def _float(self, tensor: torch.Tensor) -> torch.Tensor:
        """In float32: the very tensor where it is that already, else a small copy."""
        kept = tensor.detach().float().contiguous()
        self._kept.append(kept)
        return kept


def places(inner: Any, block: Block) -> list[Any]:
    """Which modules there are, where their tensors lie, and how often these were changed."""
    parts = [inner.get_submodule(block.layers), inner.get_submodule(block.final_norm)]
    modules = [module for part in parts for module in part.modules()]
    tensors = (tensor for part in parts for tensor in part.parameters())
    return [
        *((id(module), "forward" in vars(module)) for module in modules),
        *((t.data_ptr(), 0 if t.is_inference() else t._version) for t in tensors),
    ]


def sizes(module: Any) -> tuple[int, int]:
    """(out_features, in_features), also of a Conv1D."""
    if isinstance(module, Conv1D):
        return module.weight.shape[1], module.weight.shape[0]
    return module.out_features, module.in_features


def check(inner: Any, block: Block) -> None:
    """Raise UnsupportedError that names what the native library has no form for."""
    refused = block.refuse(inner.config)
    if refused:
        raise UnsupportedError(
            f"the fast path does not have {refused}", hint="leave 'fastpath' out"
        )
    for name, module in inner.named_modules():
        if name and "forward" in vars(module):
            raise UnsupportedError(
                f"the forward of '{name}' was replaced, which the fast path would pass over",
                hint="leave 'fastpath' out",
            )
    for name, tensor in inner.named_parameters():
        readable = tensor.dtype in DTYPES or not tensor.is_floating_point()
        if tensor.device.type != "cpu" or not readable:
            raise UnsupportedError(
                f"'{name}' is {tensor.dtype} on {tensor.device}, which the fast path cannot read",
                hint="it reads float32, bfloat16, float16 and codes in the memory of the CPU",
            )
    for number, layer in enumerate(block.layer_list(inner)):
        for path in block.projections.values():
            module = layer.get_submodule(path)
            kinds = (nn.Linear, Conv1D, HalfLinear, FourBitLinear, Int8Linear)
            if type(module) not in kinds or getattr(module, "per_batch", False):
                raise UnsupportedError(
                    f"'{block.layers}.{number}.{path}' is a {type(module).__module__}."
                    f"{type(module).__name__}, with which the fast path cannot multiply",
                    hint="merge adapters first; load bitsandbytes checkpoints with featherweight",
                )
        activation(layer.get_submodule(block.mlp))
        attention: Any = layer.get_submodule(block.attention)
        scaling = float(attention.scaling)
        if not scaling > 0:
            raise UnsupportedError(
                f"the fast path does not have scores scaled by {scaling:g}",
                hint="it scales them by numbers above 0; leave 'fastpath' out",
            )


def activation(mlp: Any) -> str:
    """The native name of an MLP's activation; UnsupportedError for one that there is not."""
    act = next(getattr(mlp, n) for n in ("act_fn", "activation_fn", "act") if hasattr(mlp, n))
    name = type(act).__name__
    if name not in _ACTIVATIONS:
        raise UnsupportedError(
            f"the fast path has no activation '{name}'",
            hint=f"it has {', '.join(native.ACTIVATIONS)}",
        )
    return _ACTIVATIONS[name]
