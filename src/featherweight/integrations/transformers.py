"""Recipes as transformers' `quantization_config`: weights are quantised while they are loaded.

    AutoModelForCausalLM.from_pretrained(name, quantization_config=QuantConfig("nf4:double"))

The model is first made on the meta device, its layers empty quantised ones. Then transformers reads
tensor by tensor; each is quantised and dropped before the next. What is in the recipe besides
quantised layers follows when all are there. bitsandbytes checkpoints take the same way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from featherweight.errors import (
    FeatherweightError,
    ModelError,
    RecipeError,
    UnsupportedError,
)
from featherweight.integrations.conversions import AsItIs, Quantise, Take, is_ours
from featherweight.ledger import Applied, Ledger
from featherweight.nn import Int8Embedding
from featherweight.nn.quantised import QuantisedLinear
from featherweight.quant import quant_state
from featherweight.receipt import Receipt
from featherweight.recipe import Recipe
from featherweight.residency import Mappings, give_back
from featherweight.saving import watch_saving
from featherweight.stored import described
from featherweight.techniques.base import Technique
from featherweight.techniques.cast import Cast, short
from featherweight.techniques.linears import refuse_meta
from featherweight.techniques.quantiser import Quantiser
from featherweight.techniques.replace import places
from featherweight.tensors import held

METHOD = "featherweight"


@register_quantization_config(METHOD)
class QuantConfig(QuantizationConfigMixin):
    """A recipe with one of `int8`, `nf4`, `fp4`, for `from_pretrained(quantization_config=…)`.

    Raises RecipeError for another recipe, or none. In a `config.json` it becomes bitsandbytes' own
    config.
    """

    def __init__(
        self,
        recipe: str | Recipe | None = None,
        *,
        stored: dict[str, Any] | None = None,
        **_: Any,  # transformers passes what a config.json says
    ) -> None:
        self.quant_method: Any = METHOD
        if recipe is None and stored is None:
            raise RecipeError(
                "a QuantConfig needs a recipe",
                hint="write QuantConfig('nf4'); if it is a config.json that names"
                f" '{METHOD}', take 'quantization_config' out of it",
            )
        self.stored = stored  # a bitsandbytes config, as the model's config.json has it or will
        self.recipe = Recipe.parse(recipe) if recipe is not None else None
        if self.recipe and not any(isinstance(t, Quantiser) for t in self.recipe):
            raise RecipeError(
                f"'{self.recipe}' quantises nothing",
                hint="name int8, nf4 or fp4; a dtype alone is dtype=, attn_implementation= says"
                " the attention",
            )

    def to_dict(self) -> dict[str, Any]:
        """What stands in `config.json`."""
        if self.stored is not None:
            return dict(self.stored)
        return {"quant_method": METHOD, "recipe": str(self.recipe)}


@register_quantizer(METHOD)
class Quantizer(HfQuantizer):
    """What transformers asks while it loads a model with a `QuantConfig`."""

    quantization_config: QuantConfig
    requires_calibration = False
    # A weight is looked for under these names, and given to `Take`, whatever it is.
    serialized_names: dict[str, list[str]] = {  # noqa: RUF012  transformers reads it
        "weight": [
            "weight",
            *(f"weight.{name}" for name in quant_state.STATISTICS),
            *(f"{quant_state.PREFIX}{name}" for name in quant_state.QUANT_TYPES),
            "SCB",
            "weight_format",
        ]
    }

    def __init__(self, quantization_config: QuantConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.receipt = Receipt(str(quantization_config.recipe))
        self.empty: set[str] = set()  # names of the weights that are loaded into quantised layers
        self.plain: dict[str, Any] = {}  # what these layers were, until they are filled
        self._there: set[str] = set()  # those of the names that the checkpoint has
        self._files = ""  # what is read, quoted
        self._mappings: Mappings | None = None
        self.error: FeatherweightError | None = None  # transformers would bury it in a log

    @property
    def recipe(self) -> Recipe:
        """The recipe, of a model that was not quantised before."""
        assert self.quantization_config.recipe is not None
        return self.quantization_config.recipe

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """A dtype in the recipe is the dtype in which the rest is loaded."""
        if self.pre_quantized:
            return dtype
        return next(iter(self._at_once.values()), dtype)

    @property
    def _at_once(self) -> dict[Technique, torch.dtype]:
        """The technique that is a dtype alone; `compute=fp32` waits until the layers are there."""
        return {
            technique: technique.dtype
            for technique in self.recipe
            if isinstance(technique, Cast) and getattr(technique, "compute", None) is None
        }

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_: Any
    ) -> None:
        """Put empty layers where quantised ones will be."""
        tied = getattr(model, "all_tied_weights_keys", {})
        self.receipt.bytes_before = sum(
            parameter.nbytes for name, parameter in model.named_parameters() if name not in tied
        )
        ledger = Ledger(model, self.receipt, reversible=False, spill=None)
        if self.pre_quantized:
            threshold = (self.quantization_config.stored or {}).get("llm_int8_threshold", 6.0)
            self._files = ", ".join(f"'{file}'" for file in checkpoint_files or ())
            for name, layer in described(model, checkpoint_files or (), threshold).items():
                ledger.replace_module(name, layer)
        else:
            plain = {f"{name}.weight": module for name, module in model.named_modules()}
            _quantiser(self.recipe).skeleton(model, ledger)
        self.empty = {
            f"{name}.weight"
            for name, module in model.named_modules()
            if isinstance(module, QuantisedLinear)
        }
        if not self.pre_quantized:
            self.plain = {name: plain[name] for name in self.empty}

    def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
        """Whether it is the weight of a quantised layer.

        transformers asks this of every tensor in the checkpoint before it reads the first.
        """
        self._there.add(param_name)
        return param_name in self.empty

    def get_quantize_ops(self) -> ConversionOps:
        """For one weight in a float dtype."""
        return Quantise(self)

    def get_load_operations(self) -> dict[str, Any]:
        """For one weight of a bitsandbytes checkpoint."""
        return {"deserialize": Take}

    def get_weight_conversions(self) -> list[WeightConverter]:
        """Also where there is nothing to convert: what a converter gives is what is offloaded."""
        if self.pre_quantized:
            return super().get_weight_conversions()
        ends = sorted({".".join(name.split(".")[-2:]) for name in self.empty})
        return [WeightConverter(end, end, [AsItIs()]) for end in ends]

    def blame(self, layer: str, error: FeatherweightError) -> None:
        """Keep the first error, to be raised when transformers is through."""
        if self.error is None and self.pre_quantized:
            self.error = ModelError(
                f"'{layer}' in {self._files}: {error.message}",
                hint=error.hint or "download or write the checkpoint again",
            )
        elif self.error is None:
            self.error = UnsupportedError(
                f"'{layer}' cannot be quantised: {error.message}", hint=f"add skip={layer}"
            )

    def leave(self, name: str, model: Any, why: str) -> None:
        """Put the plain layer back in the place of an empty one: transformers sees to it."""
        plain, prefix = self.plain.pop(name), name.removesuffix(".weight")
        self.empty.discard(name)
        layer = model.get_submodule(prefix)
        plain.bias = layer.bias  # which may have been there
        for place in places(model, lambda module: module is layer)[0]:
            model.set_submodule(place, plain)
        self.receipt.changes = [c for c in self.receipt.changes if c.module != prefix]
        self.receipt.record(prefix, "skipped", type(plain).__name__, why=why)

    def leave_missing(self, model: Any) -> None:
        """Leave what has no weight in the checkpoint, such as a new head; known at the first."""
        for name in [name for name in self.plain if name not in self._there]:
            self.leave(name, model, "not in the checkpoint: set at random")

    def give_back(self, weight: torch.Tensor) -> None:
        """Free the pages of a weight that is a view of its file, now that it has been read."""
        self._mappings = self._mappings or Mappings()  # all files are mapped by now
        if self._mappings.file_of(weight):
            self.receipt.bytes_given_back += give_back(weight)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        """What is left of the recipe, on a model that has its weights."""
        done = getattr(model, "_weight_conversions", None) or []
        # Saving would undo them.
        model._weight_conversions = [each for each in done if not is_ours(each)]
        if self.error:
            raise self.error
        if self.pre_quantized:
            model.is_loaded_in_8bit = True  # see `techniques.saving`
            return model
        if self.plain:
            raise ModelError(
                f"the checkpoint has none of the weights to quantise, such as '{min(self.plain)}'",
                hint="see that config.json and the weights belong together",
            )
        ledger = Ledger(model, self.receipt, reversible=False, spill=None)
        for technique in self.recipe:
            if isinstance(technique, Quantiser):
                technique.after_loading(model, ledger)
            elif technique in self._at_once:
                self.receipt.actual["dtype"] = short(self._at_once[technique])
            else:
                technique.check(model)
                technique.apply(model, ledger)
        ledger.settle()
        self.receipt.bytes_after = held(model).total
        return model

    def applied(self, model: Any) -> Applied:
        """The account of the loading, as of an `apply` that cannot be undone."""
        ledger = Ledger(model, self.receipt, reversible=False, spill=None)
        return Applied(model, self.recipe, ledger)

    def is_serializable(self) -> bool:
        """As a bitsandbytes checkpoint."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Through adapters."""
        return True

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """`model.dequantize()`: dense layers of what the codes stand for.

        Raises UnsupportedError, and changes nothing, if a layer is offloaded.
        """
        if isinstance(dtype, str):  # as the config of a model that was saved has it
            dtype = getattr(torch, dtype)
        kinds = QuantisedLinear | Int8Embedding
        names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
        for name in names:
            refuse_meta(name, model.get_submodule(name).weight)
        weights: dict[nn.Parameter, nn.Parameter] = {}  # of codes; tied layers share them
        for name in names:
            layer = model.get_submodule(name)
            dense = layer.to_dense(dtype or torch.float32)
            dense.weight = weights.setdefault(layer.weight, dense.weight)
            model.set_submodule(name, dense)
        vars(model).pop("is_loaded_in_8bit", None)
        return model


def _quantiser(recipe: Recipe) -> Quantiser:
    return next(technique for technique in recipe if isinstance(technique, Quantiser))


watch_saving()  # also where it is a pickled model that brings this module in
