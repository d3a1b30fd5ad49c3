"""A model from its config alone: the real classes, the recipe applied, no byte of weights."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from featherweight.anatomy.attention import ALL
from featherweight.errors import FeatherweightError, ModelError, UnsupportedError
from featherweight.recipe import Recipe
from featherweight.techniques.attention import Attention
from featherweight.techniques.cast import DTYPES, Cast

# What a task puts on a model: the Auto class that has it.
TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "encoder": "AutoModel",
}
# transformers' names of attention, and torch's kernels that may be chosen from.
ATTENTION = {
    "eager": ("eager", ()),
    "sdpa": ("sdpa", ALL),
    "flash": ("sdpa", ("flash",)),
}


def read_config(config: dict[str, Any]) -> Any:
    """The config object of a `config.json`; ModelError if this transformers cannot read it."""
    from transformers import AutoConfig

    rest = {key: value for key, value in config.items() if key != "model_type"}
    try:
        return AutoConfig.for_model(config["model_type"], **rest)
    except (ValueError, KeyError, TypeError) as error:
        import transformers

        raise ModelError(
            f"transformers {transformers.__version__} has no model of type"
            f" '{config.get('model_type')}' as this config has it"
            f" ({str(error).strip().splitlines()[0]})",
            hint="another version may: --transformers",
        ) from None


def task_of(config: Any) -> str:
    """The task that a config's own architecture is for."""
    name = (config.architectures or [""])[0]
    if config.model_type == "whisper":
        return "speech-seq2seq"
    if getattr(config, "is_encoder_decoder", False):
        return "seq2seq"
    if "ForCausalLM" in name or "LMHead" in name:
        return "causal-lm"
    for part, task in (
        ("ForConditionalGeneration", "causal-lm"),  # of images and text
        ("ForMaskedLM", "masked-lm"),
        ("ForPreTraining", "masked-lm"),
        ("ForSequenceClassification", "sequence-classification"),
        ("ForTokenClassification", "token-classification"),
    ):
        if part in name:
            return task
    return "encoder"


@dataclass(frozen=True)
class Built:
    """A model on the meta device with a recipe applied."""

    model: nn.Module
    parameters: int  # before the recipe: a packed weight is two of them a byte
    kernels: tuple[str, ...]  # of attention, that torch may choose from


def build(config: Any, recipe: Recipe, task: str) -> Built:
    """The model of a task with the recipe applied.

    Raises ModelError where the model has no such task or attention, UnsupportedError where it
    cannot have a technique.
    """
    dtype = dtype_of(config, recipe)
    attention, kernels = attention_of(recipe)
    model = construct(config, task, dtype, attention)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if attention is None:
        attention = getattr(model.config, "_attn_implementation", None) or "eager"
        kernels = ATTENTION.get(attention, ATTENTION["sdpa"])[1]
    _apply(model, recipe)
    return Built(model, parameters, kernels)


def positions(model: nn.Module) -> int | None:
    """Rows of the smallest table of learned positions of text, which no sequence may exceed."""
    tables = [
        module.num_embeddings - getattr(module, "offset", 0)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and re.search(r"wpe|position", name.rpartition(".")[2])
        and not re.search(r"vision|image|audio", name)
    ]
    return min(tables, default=None)


def to_fake(model: nn.Module) -> None:
    """Turn tensors of the meta device into fake ones on the CPU; call it in a FakeTensorMode."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _fake(tensor)
                held[name] = made[id(tensor)]  # type: ignore[assignment]


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(new, requires_grad=tensor.requires_grad)
    return new


def dtype_of(config: Any, recipe: Recipe) -> torch.dtype:
    """Of the first dtype technique, else the checkpoint's own."""
    for technique in recipe:
        if isinstance(technique, Cast) and not getattr(technique, "compute", None):
            return technique.dtype
    given = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(given, str):
        given = getattr(torch, given, None)
    return given or torch.float32


def attention_of(recipe: Recipe) -> tuple[str | None, tuple[str, ...]]:
    """transformers' name of the recipe's attention, if it has one, and torch's kernels for it."""
    from featherweight.recipe import name_of

    for technique in recipe:
        if isinstance(technique, Attention):
            return ATTENTION[name_of(technique)]
    return None, ALL


def construct(
    config: Any,
    task: str,
    dtype: torch.dtype,
    attention: str | None,
    device: torch.device | str = "meta",
) -> nn.Module:
    """The model of a task, as `from_pretrained` makes it before it has read a weight."""
    import transformers

    if task not in TASKS:
        raise FeatherweightError(f"no task '{task}'", hint=f"allowed: {', '.join(TASKS)}")
    auto = getattr(transformers, TASKS[task])
    if task == "causal-lm" and type(config) not in auto._model_mapping:
        auto = getattr(transformers, "AutoModelForImageTextToText", auto)
    modern = "attn_implementation" in inspect.getsource(transformers.PreTrainedModel._from_config)
    options: dict[str, Any] = {"dtype" if _reads_dtype() else "torch_dtype": dtype}
    if attention and modern:
        options["attn_implementation"] = attention
    elif attention not in (None, "eager"):
        raise ModelError(
            f"transformers {transformers.__version__} has eager attention alone, not '{attention}'",
            hint="write 'eager' in the recipe, or choose a newer version",
        )
    try:
        with torch.device(device):
            return auto.from_config(config, **options)
    except (ValueError, ImportError, KeyError, AttributeError, NotImplementedError) as error:
        reason = str(error).strip().split(". ")[0].splitlines()[0]
        raise ModelError(f"{type(config).__name__} makes no model for '{task}': {reason}") from None


def _reads_dtype() -> bool:
    import transformers

    return int(transformers.__version__.split(".")[0]) >= 5


def _apply(model: Any, recipe: Recipe) -> None:
    """The techniques that are not in the construction already, one after the other."""
    from featherweight.ledger import Ledger
    from featherweight.receipt import Receipt
    from featherweight.techniques.bnb import Bnb
    from featherweight.techniques.fastpath import FastPath

    ledger = Ledger(model, Receipt(str(recipe)), reversible=False, spill=None)
    for technique in recipe:
        if isinstance(technique, Bnb):
            from featherweight.anatomy.stand_ins import apply_bnb

            apply_bnb(technique, model)
        elif isinstance(technique, FastPath):
            raise UnsupportedError(
                "a dry run cannot look into the fast path, which is one native call",
                hint="predict the recipe without 'fastpath': weights and cache are the same",
            )
        elif isinstance(technique, Attention) or (
            isinstance(technique, Cast) and not getattr(technique, "compute", None)
        ):
            continue
        else:
            technique.apply(model, ledger)


__all__ = ["ATTENTION", "DTYPES", "TASKS", "build", "read_config", "task_of", "to_fake"]
