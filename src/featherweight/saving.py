"""Writing a model with light weights as a checkpoint that anyone can read.

Quantised layers are written as bitsandbytes writes them (their state dict is that already), with
its `quantization_config`: transformers with bitsandbytes load it without Featherweight.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

from featherweight.errors import RecipeError, UnsupportedError
from featherweight.folder import replacing, stale
from featherweight.nn import FourBitLinear, HalfEmbedding, HalfLinear, Int8Embedding
from featherweight.nn.frozen import Frozen
from featherweight.nn.quantised import QuantisedLinear
from featherweight.receipt import Receipt
from featherweight.recipe import Recipe, name_of
from featherweight.techniques.linears import always_left, is_linear

# Heads of other tasks, which a model may get on this base: not in the checkpoint, never quantised.
_HEADS = ("lm_head", "score", "classifier", "qa_outputs")


# Arguments of `save_pretrained` that are for the hub alone.
_HUB = ("repo_id", "token", "commit_message", "create_pr", "private", "revision")


@cache
def watch_saving() -> Callable[..., None]:
    """Wrap transformers' `save_pretrained`, once: models that are or were light go to `save`.

    Gives the original. In the class, since in a model it would be a cycle that keeps it in memory.
    """
    from transformers import PreTrainedModel

    original = PreTrainedModel.save_pretrained
    signature = inspect.signature(original)

    @wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        if is_light(self) or is_adapted(self) or was_quantised(self):
            given = signature.bind(self, *args, **kwargs).arguments
            save(given.pop("self"), **given.pop("kwargs", {}), **given)
        else:
            original(self, *args, **kwargs)

    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]
    return original


def save(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    push_to_hub: bool = False,
    **options: Any,
) -> None:
    """`model.save_pretrained` of a model with light layers, with the same arguments.

    The folder becomes the checkpoint in one step: a crash leaves what was there before. Raises
    UnsupportedError if bitsandbytes has no form for the layers; nothing is written then. Of a model
    with adapters, the active one is written alone, into a folder that may be that of its base.
    A warning says what is no part of the checkpoint.
    """
    if not is_main_process:
        return
    hub = {name: options.pop(name) for name in _HUB if name in options}
    if is_adapted(model):
        from featherweight.integrations.peft import save_adapter

        save_adapter(model, save_directory, **options)
    else:
        with replacing(save_directory, stale(options.get("variant"))) as temporary:
            write_model(model, temporary, **options)
        for note in not_saved(model):
            warnings.warn(note, stacklevel=3)  # the caller of save_pretrained
    if push_to_hub:
        model.push_to_hub(hub.pop("repo_id", Path(save_directory).name), **hub)


def quantize(
    name: str, recipe: str, output: Path, *, max_shard_size: str = "5GB", **loading: Any
) -> tuple[Receipt, int]:
    """Write a model under a recipe, with its tokenizer: the receipt, and bytes of weights.

    `loading` is passed to `load`. Raises RecipeError for a recipe with techniques that are not
    of the weights, UnsupportedError if they cannot be saved; nothing is written then.
    """
    from featherweight.models import load

    parsed = Recipe.parse(recipe)
    other = next((t for t in parsed if t.slot not in ("dtype", "weights")), None)
    if other:
        raise RecipeError(
            f"'{name_of(other)}' changes the {other.slot}, which is no part of a checkpoint",
            hint="leave it out here, and name it when the model is loaded",
        )
    loaded = load(name, parsed, **loading)
    assert loaded.applied is not None
    with replacing(output) as temporary:
        try:
            write_model(loaded.model, temporary, max_shard_size=max_shard_size)
        except ValueError as error:  # of a size that is none
            raise RecipeError(f"--max-shard-size: {error}", hint="write 900MB or 5GB") from None
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(temporary)
        size = sum(file.stat().st_size for file in temporary.glob("*.safetensors"))
    loaded.applied.receipt.notes += not_saved(loaded.model)
    return loaded.applied.receipt, size


def write_model(model: Any, folder: Path, **options: Any) -> None:
    """The model's own `save_pretrained`, once it is sure that the checkpoint can be read."""
    with _config_says(model):
        watch_saving()(model, folder, **options)


@contextmanager
def _config_says(model: Any) -> Iterator[None]:
    """Let `config.json` say that bitsandbytes has quantised the layers that are quantised now."""
    config = model.config
    before = vars(config).get("quantization_config")
    if is_quantised(model) and not _as_it_was_read(model):
        config.quantization_config = bitsandbytes_config(model)
    elif not is_quantised(model) and was_quantised(model):
        del config.quantization_config
    try:
        yield
    finally:
        vars(config).pop("quantization_config", None)
        if before is not None:
            config.quantization_config = before


def is_adapted(model: Any) -> bool:
    """Whether it has adapters, by the flag that transformers has for them."""
    return getattr(model, "_hf_peft_config_loaded", False)


def was_quantised(model: Any) -> bool:
    """Whether its config says so in our words; all layers may be dense again, merged by PEFT."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    return getattr(config, "quant_method", None) == "featherweight"


def _as_it_was_read(model: Any) -> bool:
    """Whether the layers are those of a bitsandbytes checkpoint, whose config then holds."""
    if getattr(vars(model.config).get("quantization_config"), "stored", None) is None:
        return False
    layers = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, QuantisedLinear)}
    return bool(layers == model.hf_quantizer.empty)


def not_saved(model: Any) -> list[str]:
    """Notes on options of its layers that no checkpoint has a place for."""
    options = {"exact": "exact", "per_batch": "compat=bitsandbytes"}  # of layers, and of recipes
    return [
        f"'{option}' is how the layers are computed here, and no part of the checkpoint"
        for attribute, option in options.items()
        if any(getattr(layer, attribute, False) for layer in model.modules())
    ]


def is_light(model: Any) -> bool:
    """Whether it has layers of ours."""
    return any(isinstance(module, Frozen) for module in model.modules())


def is_quantised(model: Any) -> bool:
    """Whether it has layers or embeddings of codes."""
    return any(isinstance(m, QuantisedLinear | Int8Embedding) for m in model.modules())


def bitsandbytes_config(model: Any) -> dict[str, Any]:
    """The `quantization_config` with which transformers makes bitsandbytes layers of these.

    Raises UnsupportedError if there is none.
    """
    from transformers import BitsAndBytesConfig

    embedding = next((n for n, m in model.named_modules() if isinstance(m, Int8Embedding)), None)
    if embedding:
        raise UnsupportedError(
            f"'{embedding}' is an int8 embedding, which bitsandbytes cannot read",
            hint="leave 'head=int8' out to save the model",
        )
    halved = (HalfLinear, HalfEmbedding)
    half = next((n for n, m in model.named_modules() if isinstance(m, halved)), None)
    if half:
        raise UnsupportedError(
            f"'{half}' has a half weight and computes in float32, which the config of a"
            " bitsandbytes checkpoint cannot say",
            hint="write 'rest=bf16' instead of 'bf16:compute=fp32' to save the model",
        )
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantisedLinear)}
    kinds = {getattr(layer, "quant_type", "int8") for layer in layers.values()}
    if len(kinds) > 1 or not kinds <= {"int8", "nf4", "fp4"}:
        raise UnsupportedError(
            f"the model has layers of {' and '.join(sorted(kinds))}; a bitsandbytes checkpoint has"
            " one kind, int8, nf4 or fp4",
            hint="leave 'head=int8' out to save the model",
        )
    skip = _skip_modules(model, layers)
    sample: Any = next(iter(layers.values()))
    if not isinstance(sample, FourBitLinear):
        threshold = float(sample.threshold)
        made = BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_threshold=threshold, llm_int8_skip_modules=skip
        )
    else:
        made = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=sample.quant_type,
            bnb_4bit_use_double_quant=sample.nested_absmax is not None,
            bnb_4bit_compute_dtype=model.dtype,
            bnb_4bit_quant_storage=sample.quant_storage,
            llm_int8_skip_modules=skip,
        )
    return made.to_dict()


def _skip_modules(model: Any, layers: Iterable[str]) -> list[str] | None:
    """What bitsandbytes must leave alone: None where that is what transformers always leaves."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    plain = {name for name, module in model.named_modules() if is_linear(module)}
    if plain == always_left(model) & (plain | set(layers)):
        return None
    heads = [head for head in _HEADS if all(should_convert_module(n, [head]) for n in layers)]
    skip = sorted(plain.union(heads))
    lost = next((name for name in layers if not should_convert_module(name, skip)), None)
    if lost:
        raise UnsupportedError(
            f"'{lost}' is quantised, but its name ends like one of those that are not: {skip}",
            hint="choose other layers with skip=",
        )
    return skip
