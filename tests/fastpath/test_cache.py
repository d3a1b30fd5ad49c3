"""Buffers that grow, inside transformers' `DynamicCache`: what it does to layers, done to these."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import featherweight as fw
from featherweight.fastpath.cache import GrowingLayer

TOLERANCE = 2e-5  # float32 sums in another order


def states(tokens: int, seed: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, 3, T, 4]."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(batch, 3, tokens, 4, generator=generator)
    return keys, torch.randn(batch, 3, tokens, 4, generator=generator)


def equal(layer: GrowingLayer, plain: DynamicLayer) -> None:
    """Both layers hold the same."""
    assert layer.get_seq_length() == plain.get_seq_length()
    assert torch.equal(layer.keys, plain.keys)
    assert torch.equal(layer.values, plain.values)


@pytest.fixture
def layers() -> tuple[GrowingLayer, DynamicLayer]:
    """One of ours and one of transformers', with the same five tokens."""
    pair = GrowingLayer(), DynamicLayer()
    for layer in pair:
        layer.update(*states(5, 0))
    return pair


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda layer: None,
    "crop": lambda layer: layer.crop(-2),
    "crop-none": lambda layer: layer.crop(0),
    "crop-all": lambda layer: layer.crop(-5),
    "crop-twice": lambda layer: (layer.crop(-1), layer.crop(-2)),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([1, 0])),
    "reorder-alike": lambda layer: layer.reorder_cache(torch.tensor([1, 1])),
    "interleave": lambda layer: layer.batch_repeat_interleave(3),
    "select": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "select-slice": lambda layer: layer.batch_select_indices(slice(0, 1)),
    "reset": lambda layer: layer.reset(),
    "offload": lambda layer: (layer.offload(), layer.prefetch()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_as_transformers(
    layers: tuple[GrowingLayer, DynamicLayer], change: Callable[[Any], Any]
) -> None:
    """After each change, and after more tokens, both hold the same."""
    for layer in layers:
        change(layer)
    ours, plain = layers
    assert ours.get_seq_length() == plain.get_seq_length()
    assert ours.get_mask_sizes(3) == plain.get_mask_sizes(3)
    if plain.get_seq_length():
        equal(ours, plain)
    batch = plain.keys.shape[0] if plain.is_initialized else 2
    for seed, tokens in enumerate((1, 300, 1), 1):
        for layer in layers:
            layer.update(*states(tokens, seed, batch))
        equal(ours, plain)


def test_tokens_cost_no_copies(layers: tuple[GrowingLayer, DynamicLayer]) -> None:
    """The buffer moves a few times in two thousand tokens, not at each."""
    layer = layers[0]
    places = set()
    for _ in range(2000):
        layer.update(*states(1, 1))
        places.add(layer.keys.data_ptr())
    assert len(places) <= 8


def test_crop_keeps_the_buffer(layers: tuple[GrowingLayer, DynamicLayer]) -> None:
    """Taking tokens back moves nothing, and the room for more stays."""
    layer = layers[0]
    place = layer.keys.data_ptr()
    layer.crop(-2)
    layer.update(*states(2, 1))
    assert layer.keys.data_ptr() == place


def test_room_says_nothing_of_its_tokens(layers: tuple[GrowingLayer, DynamicLayer]) -> None:
    """Room is asked for, tokens count once they are advanced over: an interrupt loses nothing."""
    layer, plain = layers
    stored = layer.room(400, 2, 3, 4)
    assert stored.capacity >= 405
    assert stored.keys.data.shape == stored.values.data.shape
    equal(layer, plain)
    stored.keys.data[:, :, 5:7], stored.values.data[:, :, 5:7] = states(2, 9)
    layer.advance(2)
    plain.update(*states(2, 9))
    equal(layer, plain)


def test_copies_are_apart(layers: tuple[GrowingLayer, DynamicLayer]) -> None:
    """A deep copy, made to use a prompt twice, does not see what is added to the other."""
    layer, plain = layers
    again = copy.deepcopy(layer)
    layer.update(*states(1, 1))
    equal(again, plain)
    again.update(*states(1, 2))
    plain.update(*states(1, 2))
    equal(again, plain)


def test_takes_over_what_is_in_a_cache(
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    forward_of: Callable[[Any], Any],
) -> None:
    """A prompt that transformers has read goes on in the fast path, and back after undo."""
    model, ids = build("llama"), tokens(2, 12)
    with torch.no_grad():
        wanted = model(ids).logits
        cache = model(ids[:, :5]).cache
        with fw.apply(model, "fastpath"):
            found = model(ids[:, 5:8], cache=cache).logits
            assert difference(found, wanted[:, 5:8]) < TOLERANCE
            assert forward_of(model).reasons == {}
            assert all(type(layer) is GrowingLayer for layer in cache.layers)
        found = model(ids[:, 8:], cache=cache).logits
    assert difference(found, wanted[:, 8:]) < TOLERANCE


def test_prompt_used_twice(
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
) -> None:
    """Two continuations of a copied prompt; and one after the other with `crop` between."""
    model, ids, other = build("llama"), tokens(1, 30), tokens(1, 10, seed=5)
    with torch.no_grad():
        wanted = model(torch.cat([ids, other], 1)).logits[:, 30:]
        fw.apply(model, "fastpath")
        prompt = model(ids[:, :20]).cache
        first, second = copy.deepcopy(prompt), copy.deepcopy(prompt)
        model(ids[:, 20:], cache=first)
        model(other, cache=second)
        assert difference(model(other, cache=first).logits, wanted) < TOLERANCE
        model(other, cache=prompt)
        prompt.crop(-10)
        model(ids[:, 20:], cache=prompt)
        assert difference(model(other, cache=prompt).logits, wanted) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 3])
def test_cache_of_another_batch(
    rows: int, build: Callable[..., Any], tokens: Callable[..., torch.Tensor]
) -> None:
    """Rows that the cache is not of are an error, as in transformers, and nothing is written."""
    model = build("llama")
    fw.apply(model, "fastpath")
    with torch.no_grad():
        cache = model(tokens(2, 9)).cache
        before = [layer.keys.clone() for layer in cache.layers]
        with pytest.raises(RuntimeError):
            model(tokens(rows, 2), cache=cache)
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)


def test_original_writes_in_its_dtype(
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    forward_of: Callable[[Any], Any],
) -> None:
    """A bf16 model reads part of a text itself, because of a mask, into the same cache."""
    model, ids = build("llama").bfloat16(), tokens(1, 24)
    hidden = torch.full((1, 1, 8, 8), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    mask = hidden.triu(1)
    mask[..., 4:, 1] = hidden[0, 0, 0, 0]  # arbitrary
    with torch.no_grad():
        cache = model(ids[:, :8], attention_mask=mask).cache
        wanted = [model(ids[:, 8:20], cache=cache).logits, model(ids[:, 20:], cache=cache).logits]
        fw.apply(model, "fastpath")
        cache = DynamicCache(config=model.config)
        model(ids[:, :8], attention_mask=mask, cache=cache)
        assert len(forward_of(model).reasons) == 1
        found = [model(ids[:, 8:20], cache=cache).logits, model(ids[:, 20:], cache=cache).logits]
    for one, other in zip(found, wanted, strict=True):
        assert difference(one, other) < 0.1  # bf16 between the operations of one of them


def test_inference_mode_between(
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
) -> None:
    """A cache made in inference mode goes on outside of it, in the original forward too."""
    model, ids = build("llama"), tokens(1, 20)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(ids).logits[:, 12:]
        fw.apply(model, "fastpath")
        with torch.inference_mode():
            cache = model(ids[:, :12]).cache
        first = model(ids[:, 12:15], cache=cache).logits
        rest = model(ids[:, 15:], cache=cache, output_attentions=True).logits
    assert difference(torch.cat([first, rest], 1), wanted) < TOLERANCE


@torch.inference_mode()
def test_what_padding_holds_is_never_looked_at(build: Callable[..., Any]) -> None:
    """A padded value beyond what fp16 holds is infinite, and infinity times 0 is not a number."""
    model = build("llama")
    ids = torch.randint(0, 50, (2, 80), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 81, dtype=torch.long)
    mask[1, :70] = 0
    with fw.apply(model, "fastpath:cache=fp16"):
        cache = model(ids, attention_mask=mask[:, :-1], use_cache=True).cache
        poisoned = copy.deepcopy(cache)
        for layer in poisoned.layers:
            layer.values[1, :, :40] = torch.inf
        right = model(ids[:, :1], attention_mask=mask, cache=cache).logits
        found = model(ids[:, :1], attention_mask=mask, cache=poisoned).logits
    assert torch.equal(found, right)
    assert right.isfinite().all()
