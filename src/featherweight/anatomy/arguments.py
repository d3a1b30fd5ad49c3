"""Settings out of the objects that users of Trainer and PEFT have already."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from featherweight.errors import FeatherweightError
from featherweight.recipe import Recipe
from featherweight.techniques.base import Technique


@dataclass(frozen=True)
class Given:
    """What `TrainingArguments` say; None where they were not given."""

    batch_size: int | None = None
    accumulate: int | None = None
    optimizer: str | None = None
    mixed_precision: str | None = None
    max_grad_norm: float | None = None
    checkpointing: bool = False


def given(train: Any) -> Given:
    """The settings of `TrainingArguments`, nothing for a bool; FeatherweightError for the rest."""
    if isinstance(train, bool):
        return Given()
    if not hasattr(train, "per_device_train_batch_size"):
        raise FeatherweightError(
            f"train is a {type(train).__name__}", hint="give True, or TrainingArguments"
        )
    return Given(
        batch_size=train.per_device_train_batch_size,
        accumulate=train.gradient_accumulation_steps,
        optimizer=str(getattr(train.optim, "value", train.optim)),
        mixed_precision="fp16" if train.fp16 else "bf16" if train.bf16 else None,
        max_grad_norm=train.max_grad_norm,
        checkpointing=bool(train.gradient_checkpointing),
    )


def lora_technique(config: Any) -> Technique:
    """The technique of a PEFT `LoraConfig`."""
    from featherweight.techniques.lora import Lora

    targets = config.target_modules or ()
    if targets == "all-linear":
        targets = ()
    if isinstance(targets, str):
        raise FeatherweightError(
            f"target_modules is the pattern '{targets}'", hint="list names of layers instead"
        )
    return Lora(
        r=config.r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target=tuple(sorted(targets)),
        rslora=bool(config.use_rslora),
    )


def with_technique(recipe: Recipe, technique: str | Technique) -> Recipe:
    """The recipe with one more technique, unless it has one in that slot."""
    if isinstance(technique, str):
        (technique,) = Recipe.parse(technique)
    if any(own.slot == technique.slot for own in recipe):
        return recipe
    return Recipe((*recipe.techniques, technique))


def first(*values: Any) -> Any:
    """The first that is not None; None if all are."""
    return next((value for value in values if value is not None), None)
