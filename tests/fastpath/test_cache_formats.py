"""Keys and values in fewer bits: `fastpath:cache=`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

import featherweight as fw
from featherweight.errors import RecipeError
from featherweight.fastpath.cache import FORMATS, GrowingLayer

# Of logits, as `difference` counts: float32 sums in another order, and now and then a number that
# is rounded the other way for it.
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 4e-3, "int8": 3e-2}
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "int8": 1.0}


def rounded(x: torch.Tensor, format: str) -> torch.Tensor:
    """What a format leaves of x [B, H, T, D]."""
    if format != "int8":
        return x.to(FORMATS[format]).float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


class Rounding(DynamicLayer):
    """transformers' own, after what a format does to keys and values."""

    format = "fp32"

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Append what is left of them."""
        return super().update(*(rounded(x, self.format) for x in (key_states, value_states)))


def rounding_cache(model: Any, format: str) -> DynamicCache:
    """For the original forward, as if it kept keys and values in that format."""
    cache = DynamicCache(config=model.config)
    kind = type("Layer", (Rounding,), {"format": format})
    cache.layers = [kind() for _ in range(model.config.num_hidden_layers)]
    return cache


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["llama", "bigcode"])
def test_prompt_and_tokens(
    name: str,
    format: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    forward_of: Callable[[Any], Any],
) -> None:
    """At once, in parts and token by token: what the original gives on such a cache."""
    model, ids = build(name), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, cache=rounding_cache(model, format)).logits[:, 9:]
        fw.apply(model, f"fastpath:cache={format}")
        whole = model(ids, attention_mask=mask)
        cache, parts = DynamicCache(config=model.config), []
        for begin, end in ((0, 11), (11, 32), *((i, i + 1) for i in range(32, 40))):
            seen = mask[:, :end]
            parts.append(model(ids[:, begin:end], attention_mask=seen, cache=cache).logits)
    assert forward_of(model).reasons == {}
    assert {layer.dtype for layer in cache.layers} == {FORMATS[format]}
    assert difference(whole.logits[:, 9:], wanted) < TOLERANCE[format]
    assert difference(torch.cat(parts, 1)[:, 9:], wanted) < TOLERANCE[format]
    for layer in whole.cache.layers:
        assert layer.keys.shape == layer.values.shape
        assert layer.keys.shape[2] == 40


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_kept(
    format: str, build: Callable[..., Any], tokens: Callable[..., torch.Tensor]
) -> None:
    """The first layer's keys are those of float32, rounded; buffers have as many bytes as said."""
    model, ids = build("llama"), tokens(1, 20)
    with torch.no_grad():
        plain = model(ids).cache.layers[0]
        fw.apply(model, f"fastpath:cache={format}")
        layer = model(ids).cache.layers[0]
    for found, exact in ((layer.keys, plain.keys), (layer.values, plain.values)):
        # A number half-way between two codes may go either way.
        off = (found.float() - rounded(exact, format)).abs() > 1e-4 * exact.abs().max()
        assert off.float().mean() < 0.01
    stored = layer.room(0, 1, *layer.keys.shape[1::2])
    head_dim = layer.keys.shape[3]
    for numbers in (stored.keys, stored.values):
        there = numbers.data.nbytes + (0 if numbers.absmax is None else numbers.absmax.nbytes)
        wanted = BYTES[format] + (4 / head_dim if format == "int8" else 0)
        assert there == numbers.data.numel() * wanted


@pytest.mark.parametrize("format", FORMATS)
def test_changes_are_exact(format: str) -> None:
    """What transformers does to a cache, done to rounded numbers: nothing is rounded twice."""
    dtype, generator = FORMATS[format], torch.Generator().manual_seed(0)

    def states(batch: int) -> torch.Tensor:
        return rounded(torch.randn(batch, 3, 5, 8, generator=generator), format)

    ours, plain = GrowingLayer(dtype), DynamicLayer()
    for change in (
        lambda layer: None,
        lambda layer: layer.crop(-3),
        lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
        lambda layer: layer.batch_repeat_interleave(2),
        lambda layer: layer.batch_select_indices(torch.tensor([3, 1])),
    ):
        for layer in (ours, plain):
            change(layer)
        batch = plain.keys.shape[0] if plain.is_initialized else 2
        new = states(batch), states(batch)
        for layer in (ours, plain):
            layer.update(*new)
        assert ours.get_seq_length() == plain.get_seq_length()
        torch.testing.assert_close(ours.keys.float(), plain.keys, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(ours.values.float(), plain.values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("format", ["bf16", "int8"])
def test_beams_and_original(
    format: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
) -> None:
    """Beam search reorders such a cache; the original forward reads and writes it."""
    model, ids = build("llama"), tokens(2, 12)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(ids, cache=rounding_cache(model, format)).logits[:, 6:]
        fw.apply(model, f"fastpath:cache={format}")
        options = {"num_beams": 3, "max_new_tokens": 9, "pad_token_id": 0, "do_sample": False}
        written = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert written.shape == (2, 21)
        cache = model(ids[:, :6]).cache
        first = model(ids[:, 6:9], cache=cache, output_attentions=True).logits
        rest = model(ids[:, 9:], cache=cache).logits
    assert difference(torch.cat([first, rest], 1), wanted) < TOLERANCE[format]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_static_cache_in_the_models_dtype(
    dtype: torch.dtype,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    forward_of: Callable[[Any], Any],
) -> None:
    """Half a model has half a static cache, whatever is asked for dynamic ones."""
    model, ids = build("llama").to(dtype), tokens(2, 20)
    with torch.no_grad():
        wanted = model(ids).logits
        fw.apply(model, "fastpath:cache=int8")
        cache = StaticCache(config=model.config, max_cache_len=32)
        first = model(ids[:, :12], cache=cache).logits
        rest = model(ids[:, 12:], cache=cache).logits
    assert forward_of(model).reasons == {}
    assert cache.layers[0].keys.dtype is dtype
    assert difference(torch.cat([first, rest], 1).float(), wanted.float()) < 0.1


def test_unknown_format() -> None:
    """Named, with what there is."""
    with pytest.raises(RecipeError, match="int8"):
        fw.Recipe.parse("fastpath:cache=int4")


def test_formats_mixed(
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    forward_of: Callable[[Any], Any],
) -> None:
    """A cache keeps the format that it began with; layers of two formats go to the original."""
    model, ids = build("llama"), tokens(1, 12)
    with torch.no_grad():
        wanted = model(ids, cache=rounding_cache(model, "bf16")).logits[:, 6:]
        with fw.apply(model, "fastpath:cache=bf16"):
            cache = model(ids[:, :6]).cache
        fw.apply(model, "fastpath:cache=int8")
        assert difference(model(ids[:, 6:9], cache=cache).logits, wanted[:, :3]) < TOLERANCE["bf16"]
        assert forward_of(model).reasons == {}
        other = GrowingLayer(torch.float32)
        other.update(cache.layers[1].keys.float(), cache.layers[1].values.float())
        cache.layers[1] = other
        assert difference(model(ids[:, 9:], cache=cache).logits, wanted[:, 3:]) < TOLERANCE["bf16"]
        assert forward_of(model).reasons == {"a cache of several formats": 1}
