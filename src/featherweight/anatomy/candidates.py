"""What may be tried to need less memory: recipes, and single changes, each with what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from featherweight.anatomy.asked import own_dtype
from featherweight.anatomy.work import Work
from featherweight.recipe import Recipe, name_of
from featherweight.techniques.base import Technique

# The order in which techniques of these slots stand in a recipe.
SLOTS = ("dtype", "weights", "attention", "adapter", "activations", "forward")
SHORTEST = 128  # tokens; nothing below is offered

CHECKPOINTING = "one more forward pass: a step takes about a third longer"
SDPA = "none: the same result up to rounding, and faster"
EIGHT_BIT_STATES = "optimizer states in 8 bits; needs bitsandbytes"
FACTORED_STATES = "one factored state instead of two: the learning rate must be found anew"
ADAPTERS = "trains adapters of rank 8, not the model"
FOUR_BITS = "weights in 4 bits: compare shows what that does to the outputs"
EIGHT_BITS = "weights in 8 bits: compare shows what that does to the outputs"
HALF_TRAINING = "weights, gradients and states in bf16: small updates are rounded away"
_WITH_ALL_STATES = ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "rmsprop", "adagrad")


@dataclass(frozen=True)
class Candidate:
    """A recipe and a workload to try. `cost` is what one pays, in one line."""

    label: str  # what is different, in a few words
    recipe: Recipe
    work: Work
    cost: str


def changes(
    recipe: Recipe,
    work: Work,
    config: dict[str, Any],
    on_gpu: bool,
    *,
    half: str = "bf16",
    has_sdpa: bool = True,
) -> list[Candidate]:
    """Single changes to these settings that are known to save memory, cheapest first.

    None that is there already. Whether a model can have one (checkpointing, an output head in 8
    bits) is left to the dry run, which refuses with a FeatherweightError.

    Args:
        config: what the model's config.json says.
        half: the dtype in which the device multiplies fast, `bf16` or `fp16`.
        has_sdpa: False for a torch before 2.0.
    """
    found = [*_attention(recipe, work, has_sdpa)]
    if work.kind == "train":
        found += _training(recipe, work, config, on_gpu, half)
    else:
        found += _weights(recipe, work, config, on_gpu, half)
        if work.num_beams > 1:
            greedy = replace(work, num_beams=1)
            found.append(Candidate("no beams", recipe, greedy, "one hypothesis: another text"))
    return found + list(_less_work(recipe, work))


def inference(config: dict[str, Any], on_gpu: bool, *, half: str = "bf16") -> list[str]:
    """Recipes worth knowing for a model that answers, heaviest first."""
    own = own_dtype(config)
    dtypes = list(dict.fromkeys(["fp32", own if own != "fp32" else half, half]))
    if on_gpu:
        return [*dtypes, "bnb-int8", _four_bits(on_gpu, half)]
    light = ["int8", "nf4:double"]
    if _writes(config):
        light = ["int8", "int8:head=int8", "nf4:double", "nf4:double:head=int8"]
    return [*dtypes, *(["bf16:compute=fp32"] if "bf16" in dtypes else []), *light]


def training(
    work: Work, on_gpu: bool, *, half: str = "bf16", has_sdpa: bool = True
) -> list[Candidate]:
    """Settings to train with, in the order in which to take them.

    First those that compute the same update, the fastest first; then other optimizers; then half
    weights; then adapters, which train something else. An optimizer that was asked for stays.
    """
    full = Recipe.parse("fp32" if has_sdpa else "fp32+eager")
    again = with_technique(full, "checkpointing")
    found = [
        Candidate("plain", full, work, "nothing"),
        Candidate("checkpointing", again, work, CHECKPOINTING),
    ]
    lighter = []
    if work.optimizer in _WITH_ALL_STATES:
        lighter = [("8-bit Adam", "adamw_bnb_8bit", EIGHT_BIT_STATES)] if on_gpu else []
        lighter.append(("Adafactor", "adafactor", FACTORED_STATES))
    for recipe, also, price in ((full, "", ""), (again, " and checkpointing", CHECKPOINTING)):
        for label, optimizer, cost in lighter:
            other = replace(work, optimizer=optimizer)
            found.append(Candidate(label + also, recipe, other, _both(cost, price)))
    if half == "bf16" and work.mixed_precision is None:
        halves = with_technique(again, "bf16")
        for label, optimizer, cost in [("", work.optimizer, ""), *lighter]:
            name = " and ".join(part for part in ("bf16 weights, checkpointing", label) if part)
            other = replace(work, optimizer=optimizer)
            price = _both(HALF_TRAINING, _both(CHECKPOINTING, cost))
            found.append(Candidate(name, halves, other, price))
    thin = with_technique(with_technique(again, half), "lora:r=8")  # what is frozen may be half
    thinner = with_technique(thin, _four_bits(on_gpu, half))
    cost = _both(ADAPTERS, CHECKPOINTING)
    found.append(Candidate("LoRA and checkpointing", thin, work, cost))
    cost = _both(FOUR_BITS, cost)
    found.append(Candidate("LoRA on 4-bit weights, checkpointing", thinner, work, cost))
    return found


def _both(one: str, other: str) -> str:
    return "; ".join(part for part in (one, other) if part)


def has(recipe: Recipe, slot: str) -> Technique | None:
    """The technique that decides the slot, if one does."""
    return next((technique for technique in recipe if technique.slot == slot), None)


def with_technique(recipe: Recipe, text: str) -> Recipe:
    """The recipe with this technique, in the place of another of its slot."""
    (new,) = Recipe.parse(text)
    others = [technique for technique in recipe if technique.slot != new.slot]
    return Recipe(tuple(sorted([*others, new], key=lambda one: SLOTS.index(one.slot))))


def dtype_of(recipe: Recipe, config: dict[str, Any]) -> str:
    """`fp32`, `bf16` or `fp16`: of the recipe, else of the checkpoint."""
    own = has(recipe, "dtype")
    return name_of(own) if own else own_dtype(config)


def _attention(recipe: Recipe, work: Work, has_sdpa: bool) -> Iterator[Candidate]:
    own = has(recipe, "attention")
    if own and name_of(own) == "eager" and has_sdpa:
        yield Candidate("sdpa attention", with_technique(recipe, "sdpa"), work, SDPA)


def _training(
    recipe: Recipe, work: Work, config: dict[str, Any], on_gpu: bool, half: str
) -> Iterator[Candidate]:
    adapter, dtype = has(recipe, "adapter"), dtype_of(recipe, config)
    full = "fp32" in (dtype, getattr(adapter, "dtype", None))  # something is trained in float32
    if work.mixed_precision is None and full:
        name = half if dtype == "fp32" else dtype  # autocast does not mix the two
        yield Candidate(
            f"{name} mixed precision",
            recipe,
            replace(work, mixed_precision=name),
            f"products in {name}, what is trained stays in fp32",
        )
    if not has(recipe, "activations"):
        checkpointed = with_technique(recipe, "checkpointing")
        yield Candidate("checkpointing", checkpointed, work, CHECKPOINTING)
    if adapter is None and work.optimizer in _WITH_ALL_STATES:
        if on_gpu:
            eight = replace(work, optimizer="adamw_bnb_8bit")
            yield Candidate("8-bit Adam", recipe, eight, EIGHT_BIT_STATES)
        factored = replace(work, optimizer="adafactor")
        yield Candidate("Adafactor", recipe, factored, FACTORED_STATES)
    if dtype == "fp32" and half == "bf16" and work.mixed_precision is None and adapter is None:
        yield Candidate("bf16 weights", with_technique(recipe, "bf16"), work, HALF_TRAINING)
    if adapter is None and not has(recipe, "weights"):
        yield Candidate("LoRA", with_technique(recipe, "lora:r=8"), work, ADAPTERS)
    elif adapter is not None:
        four = _four_bits(on_gpu, half)
        weights = has(recipe, "weights")
        if weights is None or "int8" in name_of(weights):
            yield Candidate("4-bit weights", with_technique(recipe, four), work, FOUR_BITS)
        if getattr(adapter, "dtype", None) == "fp32" and dtype != "fp32":
            thin = replace(adapter, dtype=dtype)  # type: ignore[call-arg]
            halves = with_technique(recipe, str(Recipe((thin,))))
            cost = f"what is trained is in {dtype}: small updates are rounded away"
            yield Candidate(f"adapters in {dtype}", halves, work, cost)


def _weights(
    recipe: Recipe, work: Work, config: dict[str, Any], on_gpu: bool, half: str
) -> Iterator[Candidate]:
    weights = has(recipe, "weights")
    name = name_of(weights) if weights else ""
    if not weights and dtype_of(recipe, config) == "fp32":
        cost = f"weights and products rounded to {half}"
        yield Candidate(f"{half} weights", with_technique(recipe, half), work, cost)
    if not weights:
        eight = "bnb-int8" if on_gpu else "int8"
        yield Candidate("8-bit weights", with_technique(recipe, eight), work, EIGHT_BITS)
    if not weights or name in ("int8", "bnb-int8"):
        four = _four_bits(on_gpu or name.startswith("bnb"), half)
        yield Candidate("4-bit weights", with_technique(recipe, four), work, FOUR_BITS)
    if weights and name.startswith("bnb") is False and not _head(weights) and _writes(config):
        eighth = replace(weights, head="int8")  # type: ignore[call-arg]
        others = with_technique(recipe, str(Recipe((eighth,))))
        yield Candidate("output head in 8 bits", others, work, "the head rounded to 8 bits")
    if weights and getattr(weights, "double", None) is False:
        double = with_technique(recipe, str(Recipe((replace(weights, double=True),))))  # type: ignore[call-arg]
        yield Candidate("nested scales", double, work, "scales in 8 bits: hardly another output")


def _less_work(recipe: Recipe, work: Work) -> Iterator[Candidate]:
    rows = work.batch_size
    if rows > 1 and work.kind == "train":
        steps = work.accumulate * rows
        yield Candidate(
            f"batch 1, accumulated {steps} times",
            recipe,
            replace(work, batch_size=1, accumulate=steps),
            "the same gradient from smaller products, which keep a device less busy",
        )
    elif rows > 1:
        fewer = replace(work, batch_size=rows // 2)
        yield Candidate(f"batch {rows // 2}", recipe, fewer, "fewer sequences at once")
    name = "prompt_tokens" if work.kind == "generate" else "seq_len"
    tokens = getattr(work, name) // 2
    if tokens >= SHORTEST:
        shorter = replace(work, **{name: tokens})
        what = "prompts" if work.kind == "generate" else "sequences"
        yield Candidate(f"{what} of {tokens:,} tokens", recipe, shorter, "longer texts are cut")


def _four_bits(on_gpu: bool, half: str) -> str:
    return f"bnb-nf4:double:compute={half}" if on_gpu else "nf4:double"


def _head(technique: Technique) -> str | None:
    return getattr(technique, "head", None)


def _writes(config: dict[str, Any]) -> bool:
    """Whether the model has an output head over its vocabulary, as decoders have."""
    (name, *_) = config.get("architectures") or [""]
    return "CausalLM" in name or "LMHead" in name
