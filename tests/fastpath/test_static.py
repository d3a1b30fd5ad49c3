"""Static caches with the masks that transformers makes for them, and hidden states on request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import StaticCache

import featherweight as fw

TOLERANCE = 2e-5  # float32 sums in another order


def test_generate_with_a_static_cache(
    architecture: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    forward_of: Callable[[Any], Any],
) -> None:
    """A batch padded on the left; what has sliding windows goes to the original."""
    model, ids = build(architecture), tokens(3, 21)
    mask = (torch.arange(21) >= 21 - torch.tensor([21, 16, 1])[:, None]).long()
    ids[mask == 0] = 0
    options = {
        "attention_mask": mask,
        "max_new_tokens": 12,
        "pad_token_id": 0,
        "cache_implementation": "static",
        "disable_compile": True,
    }
    wanted = model.generate(ids, **options)
    fw.apply(model, "fastpath")
    with torch.no_grad():
        model(ids[:, :2])  # forgets how long dynamic angles have become
    assert torch.equal(model.generate(ids, **options), wanted)
    windows = architecture in ("mistral", "qwen2-windows", "phi3-window", "gemma3")
    assert bool(forward_of(model).reasons) == windows


def test_static_cache_by_hand(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor], both: Callable[..., Any],
    difference: Callable[..., float],
) -> None:  # fmt: skip
    """In pieces, cropped and read again; keys and values are what the original would have."""
    model, ids = build("llama"), tokens(2, 30)

    def work() -> list[torch.Tensor]:
        cache = StaticCache(config=model.config, max_cache_len=32)
        found = [model(ids[:, :20], cache=cache).logits, model(ids[:, 20:21], cache=cache).logits]
        cache.crop(-5)
        found.append(model(ids[:, 16:], cache=cache).logits)
        assert int(cache.get_seq_length()) == 30
        return [*found, *(layer.keys[:, :, :30] for layer in cache.layers)]

    for wanted, found in zip(*both(model, work), strict=True):
        assert difference(found, wanted) < TOLERANCE


def test_static_cache_too_short(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor]
) -> None:
    """More tokens than it has room for are an error, as they are without the fast path."""
    model = build("llama")
    fw.apply(model, "fastpath")
    with torch.no_grad(), pytest.raises((RuntimeError, IndexError)):
        model(tokens(1, 9), cache=StaticCache(config=model.config, max_cache_len=8))


@pytest.mark.parametrize("kind", ["float", "bool"])
def test_mask_of_four_dimensions(
    kind: str,
    architecture: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    forward_of: Callable[[Any], Any],
) -> None:
    """Causal and padded, written out: served where it is all that the architecture hides."""
    model, ids = build(architecture), tokens(2, 12)
    padding = torch.ones(2, 12, dtype=torch.bool)
    padding[1, :5] = False
    seen = padding[:, None, None] & torch.ones(12, 12, dtype=torch.bool).tril()
    mask: Any = seen
    if kind == "float":
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    if architecture in ("gemma3", "qwen2-windows"):  # these want one for each kind of layer
        mask = {"full_attention": mask, "sliding_attention": mask}
    positions = (padding.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, position_ids=positions).logits
        fw.apply(model, "fastpath")
        found = model(ids, attention_mask=mask, position_ids=positions).logits
    assert difference(found[padding], wanted[padding]) < TOLERANCE


@pytest.mark.parametrize("window", ["mistral", "phi3-window"])
def test_mask_that_opens_a_window(
    window: str, build: Callable[..., Any], tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
) -> None:  # fmt: skip
    """A written mask is the whole truth: with one that is only causal there is no window."""
    model, ids = build(window), tokens(1, 40)
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
        fw.apply(model, "fastpath")
        found = model(ids, attention_mask=mask).logits
    assert difference(found, wanted) < TOLERANCE


def test_hidden_states(
    architecture: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    both: Callable[..., Any],
    difference: Callable[..., float],
) -> None:
    """Those of each layer, by argument and by config, of a prompt and of a token."""
    model, ids = build(architecture), tokens(2, 13)

    def work() -> list[torch.Tensor]:
        first = model(ids, output_hidden_states=True)
        token = model(ids[:, :1], cache=first.cache, output_hidden_states=True)
        model.config.output_hidden_states = True
        by_config = model(ids)
        model.config.output_hidden_states = False
        assert model(ids).hidden_states is None
        assert model(ids, output_hidden_states=False).hidden_states is None
        found: list[torch.Tensor] = []
        for out in (first, token, by_config):
            assert len(out.hidden_states) == 4
            found += [out.logits, *out.hidden_states]
        return found

    for wanted, found in zip(*both(model, work), strict=True):
        assert difference(found, wanted) < TOLERANCE
