"""What the fast path does not serve goes to the original forward, and is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache

import featherweight as fw

TOLERANCE = 2e-5  # float32 sums in another order


def test_training(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor], forward_of: Callable[[Any], Any]
) -> None:
    """A training step gives the gradients that it gave before."""
    model, ids = build("llama").train(), tokens(2, 12)
    names = [name for name, _ in model.named_parameters()]

    def gradients() -> list[torch.Tensor]:
        return list(torch.autograd.grad(model(ids, labels=ids).loss, list(model.parameters())))

    wanted = gradients()
    fw.apply(model, "fastpath")
    for name, one, other in zip(names, gradients(), wanted, strict=True):
        assert torch.equal(one, other), name
    assert sum(forward_of(model).reasons.values()) == 1


def test_gradients_in_eval(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor], forward_of: Callable[[Any], Any]
) -> None:
    """So does a backward pass through a model that is not in training mode."""
    model, ids = build("llama"), tokens(2, 12)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(model(ids, labels=ids).loss, parameters)
    fw.apply(model, "fastpath")
    found = torch.autograd.grad(model(ids, labels=ids).loss, parameters)
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
    assert forward_of(model).reasons == {"gradients": 1}


def test_gradients_of_embeddings(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor], forward_of: Callable[[Any], Any]
) -> None:
    """Saliency: the gradient of what is put in, of a model that learns nothing itself."""
    model = build("llama").requires_grad_(False)
    embeds = model.get_input_embeddings()(tokens(1, 9)).requires_grad_()
    (wanted,) = torch.autograd.grad(model(inputs_embeds=embeds).logits.sum(), embeds)
    fw.apply(model, "fastpath")
    (found,) = torch.autograd.grad(model(inputs_embeds=embeds).logits.sum(), embeds)
    assert torch.equal(found, wanted)
    assert forward_of(model).reasons == {"gradients": 1}


def test_frozen_needs_no_no_grad(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor], forward_of: Callable[[Any], Any]
) -> None:
    """Where nothing asks for a gradient it is served, whether gradients are on or not."""
    model = build("llama").requires_grad_(False)
    fw.apply(model, "fastpath")
    model(tokens(1, 9))
    assert forward_of(model).reasons == {}


def test_attentions(
    fast: Any, build: Callable[..., Any], tokens: Callable[..., torch.Tensor],
    forward_of: Callable[[Any], Any],
) -> None:  # fmt: skip
    """They are transformers' own, whether an argument or the config asks for them."""
    plain = build("llama")
    plain.set_attn_implementation("eager")
    ids = tokens(1, 9)
    with torch.no_grad():
        wanted = plain(ids, output_attentions=True)
        found = fast(ids, output_attentions=True)
        fast.config.output_attentions = True
        by_config = fast(ids)
        fast.config.output_attentions = False
        assert fast(ids).attentions is None
    for out in (found, by_config):
        assert torch.equal(out.logits, wanted.logits)
        assert len(out.attentions) == 3
        assert all(
            torch.equal(*pair) for pair in zip(out.attentions, wanted.attentions, strict=True)
        )
    assert forward_of(fast).reasons == {"output_attentions": 2}


def test_served_again_after_recording(
    fast: Any, tokens: Callable[..., torch.Tensor], forward_of: Callable[[Any], Any]
) -> None:
    """The hooks that transformers leaves behind when it recorded attentions hinder nothing."""
    with torch.no_grad():
        fast(tokens(1, 9), output_attentions=True, output_hidden_states=True)
        before = dict(forward_of(fast).reasons)
        fast(tokens(1, 9))
    assert forward_of(fast).reasons == before


def test_packed_sequences(
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    forward_of: Callable[[Any], Any],
) -> None:
    """Positions that begin anew in a row without a cache: texts that do not see each other."""
    model, ids = build("llama"), tokens(1, 20)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with torch.no_grad():
        wanted = model(ids, position_ids=positions, use_cache=False).logits
        fw.apply(model, "fastpath")
        found = model(ids, position_ids=positions, use_cache=False).logits
    assert difference(found, wanted) < TOLERANCE


def test_arbitrary_mask(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor], forward_of: Callable[[Any], Any]
) -> None:
    """A mask [B, 1, T, S] that is more than causal."""
    model, ids = build("llama"), tokens(1, 20)
    mask = torch.full((1, 1, 20, 20), torch.finfo(torch.float32).min).triu(1)
    mask[..., 10:, 4] = mask.min()
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits
        fw.apply(model, "fastpath")
        assert torch.equal(model(ids, attention_mask=mask).logits, wanted)
    assert sum(forward_of(model).reasons.values()) == 1


class Counted(DynamicCache):
    """A cache of somebody's own, that counts what it is given."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """As `DynamicCache`."""
        self.updates = getattr(self, "updates", 0) + 1
        return super().update(*args, **kwargs)


def test_other_caches(
    fast: Any, tokens: Callable[..., torch.Tensor], forward_of: Callable[[Any], Any]
) -> None:
    """Caches of another class are filled by the original forward, layer after layer."""
    cache = Counted(config=fast.config)
    with torch.no_grad():
        fast(tokens(1, 9), cache=cache)
    assert cache.updates == 3
    assert "Counted" in str(forward_of(fast).reasons)


def test_sliding_cache_of_the_original(
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    forward_of: Callable[[Any], Any],
) -> None:
    """A cache that has forgotten what is before the window; and one of ours, given back."""
    model, ids = build("mistral"), tokens(1, 40)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        wanted = model(ids).logits[:, 30:]
        forgetful = model(ids[:, :30]).cache
        fw.apply(model, "fastpath")
        assert difference(model(ids[:, 30:], cache=forgetful).logits, wanted) < TOLERANCE
        assert sum(forward_of(model).reasons.values()) == 1
        cache = model(ids[:, :30]).cache
        found = model(ids[:, 30:], cache=cache, output_attentions=True).logits
        assert difference(found, wanted) < TOLERANCE


def test_tuple(fast: Any, tokens: Callable[..., torch.Tensor]) -> None:
    """`return_dict=False` gives tuples, of the model and of the inner model."""
    with torch.no_grad():
        assert isinstance(fast(tokens(1, 9), return_dict=False), tuple)
        assert isinstance(fast.model(tokens(1, 9), return_dict=False), tuple)


def test_arguments_by_position(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor], difference: Callable[..., float]
) -> None:
    """They are in the architecture's own order: GPT-2 wants the cache second."""
    model, ids = build("gpt2").transformer, tokens(1, 9)
    with torch.no_grad():
        wanted = model(ids).last_hidden_state[:, 5:]
        fw.apply(model, "fastpath")
        cache = model(ids[:, :5]).cache
        found = model(ids[:, 5:], cache).last_hidden_state
    assert difference(found, wanted) < TOLERANCE
