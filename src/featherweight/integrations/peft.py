"""LoRA on frozen layers: what PEFT does with `nn.Linear`, on codes that cannot be added to.

`enable` teaches PEFT two things, without a word in anybody's `LoraConfig`: which class adapts our
layers, and that "all-linear" means them too. `featherweight.nn` calls it once PEFT is imported.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from peft.tuners import tuners_utils
from peft.tuners.lora import model as lora
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from safetensors.torch import save
from torch import nn

from featherweight.errors import UnsupportedError
from featherweight.nn.frozen import FrozenLinear
from featherweight.paths import write_atomic

# Initialisations that do not look at the weight, which here is codes.
_INITIALISATIONS = (True, False, "gaussian", "eva")


class FrozenLoraLinear(Linear):
    """A frozen layer [N, K] with adapters: base(x) + B(A(dropout(x))) · scaling for each active.

    Merging puts a dense `nn.Linear` in the place of the frozen layer, because codes with a change
    added would be other codes; unmerging puts the frozen layer back, bit for bit.
    """

    merged_adapters: list[str]

    def __init__(self, base_layer: FrozenLinear, *args: Any, **kwargs: Any) -> None:
        self._input_dtype: torch.dtype | None = None  # of the last call
        super().__init__(base_layer, *args, **kwargs)
        self._frozen = (base_layer,)  # in a tuple: no submodule, and so in no state dict

    def _get_in_out_features(self, module: Any) -> tuple[int, int]:
        return module.in_features, module.out_features

    def _get_base_layer_device_and_dtype(
        self, base_layer: Any
    ) -> tuple[torch.device, torch.dtype | None]:
        """No dtype: that of a frozen weight says nothing about the arithmetic."""
        return base_layer.weight.device, None

    def update_layer(self, adapter_name: str, *args: Any, config: Any, **kwargs: Any) -> None:
        """Add an adapter; UnsupportedError for one that needs to see or change the weight."""
        base = type(self._frozen_layer()).__name__
        if config.init_lora_weights not in _INITIALISATIONS:
            raise UnsupportedError(
                f"init_lora_weights='{config.init_lora_weights}' is made from a dense weight, which"
                f" a {base} does not have",
                hint=f"choose one of {', '.join(map(str, _INITIALISATIONS))}",
            )
        super().update_layer(adapter_name, *args, config=config, **kwargs)

    def resolve_lora_variant(self, *, config: Any, **kwargs: Any) -> None:
        """Plain LoRA; UnsupportedError for DoRA and the other variants."""
        variant = super().resolve_lora_variant(config=config, **kwargs)
        if variant is not None:
            raise UnsupportedError(
                f"{type(variant).__name__} cannot adapt a {type(self._frozen_layer()).__name__}",
                hint="use plain LoRA (use_dora=False and no other variant in the LoraConfig)",
            )

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x [..., K] → [..., N] in the dtype of x."""
        self._input_dtype = x.dtype
        return super().forward(x, *args, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put a dense layer with the adapters added in the frozen layer's place.

        Args:
            safe_merge: raise UnsupportedError, and change nothing, if a merged value is NaN or
                infinite.
            adapter_names: default: the active ones.
        """
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        if not names:
            return
        merged = [*self.merged_adapters, *names]
        dense = self._dense(merged)
        if safe_merge and not all(p.isfinite().all() for p in dense.parameters()):
            raise UnsupportedError(
                f"merging {', '.join(names)} gives weights with NaN or infinity",
                hint="the adapter is broken: train it again, or merge another",
            )
        _say_that_it_grows(self._frozen_layer(), dense)
        self.base_layer = dense
        self.merged_adapters = merged

    def unmerge(self) -> None:
        """Put the frozen layer back."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        frozen = self._frozen_layer()
        self.base_layer = frozen.to(self.base_layer.weight.device)
        self.merged_adapters = []

    @torch.no_grad()
    def _dense(self, adapters: list[str]) -> nn.Linear:
        """The dequantised weight with the adapters added in float32, rounded once."""
        frozen = self._frozen_layer()
        weight, bias = frozen.dequantize(), frozen.bias
        for name in adapters:
            # Not in place: a float32 weight dequantises to itself.
            weight = weight + self.get_delta_weight(name).to(weight)
            if self.lora_bias[name]:
                if bias is None:
                    raise UnsupportedError(
                        f"the bias of adapter '{name}' (lora_bias=True) cannot be merged into a"
                        " layer without bias",
                        hint="keep the adapter, or train one with lora_bias=False",
                    )
                bias = bias + self.lora_B[name].bias * self.scaling[name]
        dtype = self._merged_dtype()
        dense = nn.Linear(
            self.in_features, self.out_features, bias=False, device="meta", dtype=dtype
        )
        dense.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        if bias is not None:
            dense.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        return dense.train(self.training)

    def _merged_dtype(self) -> torch.dtype:
        """What the layer was last given; before that its bias, or else its adapters, tell."""
        bias = self._frozen_layer().bias
        first = next(iter(self.lora_A.values())).weight
        return self._input_dtype or (first if bias is None else bias).dtype

    def _frozen_layer(self) -> Any:
        # While `Linear.__init__` adds the first adapter, the attribute is yet to come.
        return self._frozen[0] if hasattr(self, "_frozen") else self.base_layer


def _say_that_it_grows(frozen: Any, dense: nn.Linear) -> None:
    """Once a kind of layer: Python shows the same warning of the same line once."""
    before = frozen.weight.nbytes / dense.weight.numel()
    warnings.warn(
        f"merging dequantises: a {type(frozen).__name__} becomes a dense nn.Linear,"
        f" {dense.weight.itemsize} bytes a weight instead of {before:.1g}, because codes made anew"
        " would answer differently",
        stacklevel=1,
    )


def save_adapter(
    model: Any,
    save_directory: str | os.PathLike[str],
    state_dict: dict[str, torch.Tensor] | None = None,
    save_peft_format: bool = True,
    **options: Any,
) -> None:
    """Write the active adapter of a transformers model, and nothing of the base.

    The folder is what `PeftModel.save_pretrained` writes. transformers' own method does the same,
    but asks for a version of PEFT that may not be out yet.

    Args:
        state_dict: what to write instead of the model's own tensors, by their names in it.
        save_peft_format: with PEFT's prefix of names; transformers reads them without it too.
        options: those of `save_pretrained` that an adapter has no use for; a warning names them.

    Raises UnsupportedError unless exactly one adapter is active.
    """
    if options:
        warnings.warn(f"not used for an adapter: {', '.join(options)}", stacklevel=4)
    names = next(m.active_adapters for m in model.modules() if isinstance(m, BaseTunerLayer))
    if len(names) != 1:
        raise UnsupportedError(
            f"{len(names)} adapters are active ({', '.join(names)}); one is saved at a time",
            hint="activate one of them alone: set_adapter('name')",
        )
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    state = get_peft_model_state_dict(
        model, state_dict, adapter_name=names[0], save_embedding_layers=False
    )
    prefix = "base_model.model." if save_peft_format else ""
    tensors = {f"{prefix}{n}": t.contiguous() for n, t in state.items()}
    write_atomic(folder / "adapter_model.safetensors", save(tensors, {"format": "pt"}))
    model.peft_config[names[0]].save_pretrained(folder)


def enable() -> None:
    """Let PEFT adapt our layers with LoRA; calling it again changes nothing."""
    if not hasattr(lora.dispatch_default, "featherweight"):
        lora.dispatch_default = _dispatching(lora.dispatch_default)
    if not hasattr(tuners_utils._maybe_include_all_linear_layers, "featherweight"):
        tuners_utils._maybe_include_all_linear_layers = _including(
            tuners_utils._maybe_include_all_linear_layers
        )


def _dispatching(default: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT's last resort for a layer, with ours before it."""

    @wraps(default)
    def dispatch(target: Any, adapter_name: str, config: Any, **kwargs: Any) -> Any:
        if isinstance(target, FrozenLinear) and kwargs.get("parameter_name") is None:
            return FrozenLoraLinear(target, adapter_name, config=config, **kwargs)
        return default(target, adapter_name, config=config, **kwargs)

    dispatch.featherweight = True  # type: ignore[attr-defined]
    return dispatch


def _including(default: Callable[..., Any]) -> Callable[..., Any]:
    """PEFT's reading of "all-linear": the names of plain linear layers, and here of ours too."""

    @wraps(default)
    def include(config: Any, model: nn.Module) -> Any:
        given = getattr(config, "target_modules", None)
        config = default(config, model)
        if getattr(config, "target_modules", None) is not given:
            config.target_modules |= _frozen_names(model)
        return config

    include.featherweight = True  # type: ignore[attr-defined]
    return include


def _frozen_names(model: Any) -> set[str]:
    """Our linear layers but for the output head, and those that have adapters already."""
    known = getattr(model, "get_output_embeddings", None)
    head = known() if known else None
    adapted = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    left = {id(head), *(id(inner) for outer in adapted for inner in outer.modules())}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, FrozenLinear) and id(module) not in left
    }
