"""Weights on their way from a checkpoint into quantised layers, one conversion at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.pytorch_utils import Conv1D

from featherweight.errors import FeatherweightError

if TYPE_CHECKING:
    from featherweight.integrations.transformers import Quantizer


class _Op(ConversionOps):
    """One weight on its way into the model."""

    def __init__(self, hf_quantizer: Quantizer) -> None:
        self.hf_quantizer = hf_quantizer  # under this name transformers looks for it

    def __deepcopy__(self, memo: dict[int, Any]) -> _Op:
        return self  # transformers copies one for each weight, and the quantizer is one

    def fill(self, name: str, model: Any, missing: set[str] | None, fill: Any) -> dict[str, Any]:
        """Call `fill(layer)`, and give the tensors that it set, by their names in the model."""
        prefix = name.removesuffix(".weight")
        layer = model.get_submodule(prefix)
        try:
            fill(layer)
        except FeatherweightError as error:
            self.hf_quantizer.blame(prefix, error)
            (missing or set()).discard(name)
            return {}
        self.hf_quantizer.plain.pop(name, None)
        found = {name: layer.weight}
        found |= {f"{prefix}.{key}": buffer for key, buffer in layer.named_buffers()}
        # The caller puts it in its place, which may be a file.
        layer.weight = nn.Parameter(layer.weight.data.to("meta"), requires_grad=False)
        return found


class Quantise(_Op):
    """A weight in a float dtype, quantised."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        self.hf_quantizer.leave_missing(model)
        weight = _one(next(iter(input_dict.values())))
        plain = self.hf_quantizer.plain[name]
        if weight.shape != plain.weight.shape:  # transformers has its ways with those
            self.hf_quantizer.leave(name, model, "of another shape in the checkpoint")
            return {name: weight}
        upright = weight.T if isinstance(plain, Conv1D) else weight  # [N, K]
        found = self.fill(
            name, model, kwargs.get("missing_keys"), lambda layer: layer.quantise(upright)
        )
        self.hf_quantizer.give_back(weight)
        return found


class Take(_Op):
    """A weight of a bitsandbytes checkpoint, with what belongs to it."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        name, model = kwargs["full_layer_name"], kwargs["model"]
        stored = {key: _one(value) for key, value in input_dict.items()}
        if name not in self.hf_quantizer.empty:
            weight = stored["weight"]
            return {name: weight.to(model.get_parameter_or_buffer(name).dtype)}
        return self.fill(name, model, kwargs.get("missing_keys"), lambda layer: layer.take(stored))


class AsItIs(ConversionOps):
    """Nothing to do; but what a conversion gives is what transformers offloads."""

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **_: Any,
    ) -> dict[str, Any]:
        return input_dict


def _one(value: Any) -> torch.Tensor:
    return value[0] if isinstance(value, list) else value


def is_ours(conversion: Any) -> bool:
    """Whether a conversion of transformers has an operation of this file."""
    return any(isinstance(op, _Op | AsItIs) for op in getattr(conversion, "operations", ()))
