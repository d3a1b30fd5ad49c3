"""Weights of every format: the fast path against the same quantised model without it."""

from __future__ import annotations

from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw
from featherweight.nn import FourBitLinear, HalfLinear, Int8Linear

# Both run the same products. What is exact in float32 differs as float32 sums in another order do.
EXACT = 1e-5
# Activations become int8 codes, and now and then one that lies between two codes falls to the
# other side: a step of 1/127 that the layers behind it carry on. Measured: 0 … 4e-3.
CODES = 1.5e-2
# The original rounds to 16 bits between its operations, the fast path does not; measured: as large
# as what the 16 bits themselves change, 1.5e-2 and 2e-3.
BF16, FP16 = 3e-2, 4e-3
FORMATS = {
    "fp32": EXACT,
    "bf16": BF16,
    "bf16:compute=fp32": EXACT,
    "fp16": FP16,
    "fp16:compute=fp32": EXACT,
    "int8": CODES,
    "int8:threshold=2": CODES,
    "int8:head=int8": CODES,
    "nf4": CODES,
    "nf4:double": CODES,
    "nf4:head=int8": CODES,
    "nf4:exact": EXACT,
    "nf4:blocksize=32": CODES,
    "fp4": CODES,
    "fp4:exact": EXACT,
}


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The norm of the difference over that of what is wanted."""
    assert found.isfinite().all()
    return float((found - wanted).norm() / wanted.norm())


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of a prompt, a chunk of few tokens, and single tokens: one row and several."""
    out = model(ids[:, :30])
    found = [out.logits]
    for begin, end in ((30, 32), *((i, i + 1) for i in range(32, 36))):
        found.append(model(ids[:, begin:end], cache=out.cache).logits)
    found.append(model(ids[:1, :5]).logits)
    return torch.cat([part.flatten(0, 1) for part in found]).float()


@pytest.mark.parametrize("recipe", FORMATS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "neox", "bigcode", "phi3", "qwen3"])
def test_format(
    name: str,
    recipe: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    forward_of: Callable[[Any], Any],
) -> None:
    """Separate, stacked and interleaved q, k and v; gates apart and together; biases."""
    model, ids = build(name), tokens(3, 36)
    with torch.no_grad(), fw.apply(model, recipe):
        wanted = logits(model, ids)
        with fw.apply(model, "fastpath"):
            found = logits(model, ids)
            assert forward_of(model).reasons == {}
        assert relative(found, wanted) < FORMATS[recipe]
        assert torch.equal(logits(model, ids), wanted)


@pytest.mark.parametrize("recipe", ["int8", "nf4:double", "nf4:exact", "bf16:compute=fp32"])
def test_format_on_every_isa(
    recipe: str, isa: str, build: Callable[..., Any], tokens: Callable[..., torch.Tensor]
) -> None:
    """The kernels of each instruction set under the fast path."""
    model, ids = build("llama"), tokens(3, 36)
    fw.apply(model, recipe)
    with torch.no_grad():
        wanted = logits(model, ids)
        fw.apply(model, "fastpath")
        assert relative(logits(model, ids), wanted) < FORMATS[recipe]


def test_in_either_order(build: Callable[..., Any], tokens: Callable[..., torch.Tensor]) -> None:
    """`fastpath+int8` is `int8+fastpath`, and as two recipes one after the other too."""
    ids, found = tokens(2, 36), []
    for recipes in (("int8+fastpath",), ("fastpath+int8",), ("fastpath", "int8")):
        model = build("llama")
        with torch.no_grad():
            for recipe in recipes:
                fw.apply(model, recipe)
                logits(model, ids)
            found.append(logits(model, ids))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", ["llama", "neox"])
def test_mixed(name: str, build: Callable[..., Any], tokens: Callable[..., torch.Tensor]) -> None:
    """Each projection in another format than its neighbours, also q, k and v of one layer."""
    model, ids = build(name), tokens(3, 36)
    kinds = [
        lambda linear: linear,
        lambda linear: Int8Linear.from_weight(linear.weight, linear.bias),
        lambda linear: FourBitLinear.from_weight(linear.weight, linear.bias),
        lambda linear: HalfLinear.from_weight(linear.weight, linear.bias),
        lambda linear: FourBitLinear.from_weight(linear.weight, linear.bias, double=True),
    ]
    paths = [
        path
        for path, module in model.named_modules()
        if type(module) is nn.Linear and ".layers." in path
    ]
    for i, path in enumerate(paths):
        model.set_submodule(path, kinds[i % len(kinds)](model.get_submodule(path)))
    with torch.no_grad():
        wanted = logits(model, ids)
        fw.apply(model, "fastpath")
        found = logits(model, ids)
    assert len({type(model.get_submodule(path)) for path in paths}) == 4
    assert relative(found, wanted) < CODES


def test_verified(build: Callable[..., Any]) -> None:
    """`verify=True` compares a padded batch with the original and is content."""
    applied = fw.apply(build("llama"), "int8+fastpath", verify=True)
    assert applied.receipt.verified is not None


@pytest.mark.parametrize("recipe", ["fp32", "nf4:exact", "int8:head=int8", "nf4"])
def test_real_model(recipe: str, smollm2: str) -> None:
    """SmolLM2's distributions are the same, as far as rounding leaves them the same at all.

    Where activations become int8 codes, a millionth more or less in the embeddings changes some
    of them already: what the fast path changes is measured by that.
    """
    loaded = fw.load(smollm2, recipe)
    ids = loaded.tokenizer(topics["assignment"][:500], return_tensors="pt").input_ids
    generator = torch.Generator().manual_seed(0)

    def logprobs(embeds: torch.Tensor) -> torch.Tensor:
        return loaded.model(inputs_embeds=embeds).logits[0].float().log_softmax(-1)

    def divergence(wanted: torch.Tensor, found: torch.Tensor) -> float:
        return float((wanted.exp() * (wanted - found)).sum(-1).mean())

    with torch.no_grad():
        embeds = loaded.model.get_input_embeddings()(ids)
        noise = torch.randn(embeds.shape, generator=generator) * 1e-6
        wanted, shaken = logprobs(embeds), logprobs(embeds * (1 + noise))
        with fw.apply(loaded.model, "fastpath"):
            found = logprobs(embeds)
    assert divergence(wanted, found) < 1e-5 + 2 * abs(divergence(wanted, shaken))
    if recipe in ("fp32", "nf4:exact"):
        assert divergence(wanted, found) < 1e-5
        assert torch.equal(wanted.argmax(-1), found.argmax(-1))
