"""Logits of every architecture against transformers' own forward, however the tokens come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from featherweight.native import decoder

TOLERANCE = 2e-5  # float32 sums in another order; measured 1e-6 … 5e-6
# Around a vector, the strips of 12 and 16 queries, the panels of 16 and 32 keys, and few rows (8).
LENGTHS = (1, 2, 7, 8, 9, 11, 12, 13, 15, 16, 17, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 97)


def padded(length: int, lengths: tuple[int, ...], side: str) -> torch.Tensor:
    """The mask [B, length] of a batch whose rows have these lengths."""
    columns, real = torch.arange(length), torch.tensor(lengths)[:, None]
    return (columns < real if side == "right" else columns >= length - real).long()


def in_pieces(model: Any, ids: torch.Tensor, pieces: tuple[int, ...], **options: Any) -> Any:
    """Logits of all tokens, given in pieces to one cache."""
    logits, cache, begin = [], None, 0
    for piece in pieces:
        chunk = ids[:, begin : begin + piece]
        out = model(chunk, cache=cache, use_cache=True, **options)
        logits.append(out.logits)
        cache, begin = out.cache, begin + piece
    assert begin == ids.shape[1]
    return torch.cat(logits, 1)


def test_every_way_on_every_isa(
    architecture: str,
    isa: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    both: Callable[..., Any],
    difference: Callable[..., float],
) -> None:
    """Prefill, decode, chunks, and padding on both sides."""
    model, ids = build(architecture), tokens(3, 70)

    def work() -> list[torch.Tensor]:
        found = [model(ids).logits, in_pieces(model, ids, (50, 10, *[1] * 10))]
        for side in ("left", "right"):
            mask = padded(70, (70, 33, 31), side)
            found.append(model(ids, attention_mask=mask).logits[mask.bool()])
        return found

    for wanted, found in zip(*both(model, work), strict=True):
        assert difference(found, wanted) < TOLERANCE


def test_lengths_around_the_kernels_tiles(
    architecture: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    both: Callable[..., Any],
    difference: Callable[..., float],
) -> None:
    """One sequence of each length without padding, then all of them in one batch."""
    model, ids = build(architecture), tokens(len(LENGTHS), max(LENGTHS))

    def work() -> list[torch.Tensor]:
        found = [model(ids[:1, :length]).logits for length in LENGTHS]
        for side in ("left", "right"):
            mask = padded(max(LENGTHS), LENGTHS, side)
            position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
            out = model(ids, attention_mask=mask, position_ids=position_ids)
            found.append(out.logits[mask.bool()])
        return found

    for wanted, found in zip(*both(model, work), strict=True):
        assert difference(found, wanted) < TOLERANCE


@pytest.mark.parametrize("pieces", [(1,) * 40, (1, 39), (33, 1, 6), (16, 16, 8), (13, 20, 1, 6)])
def test_pieces(
    architecture: str,
    pieces: tuple[int, ...],
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    both: Callable[..., Any],
    difference: Callable[..., float],
) -> None:
    """Tokens in pieces, also across the edge of a sliding window."""
    model, ids = build(architecture), tokens(2, 40)
    wanted, found = both(model, lambda: in_pieces(model, ids, pieces))
    assert difference(found, wanted) < TOLERANCE


def test_padded_batch_decodes(
    architecture: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    both: Callable[..., Any],
    difference: Callable[..., float],
) -> None:
    """A prompt padded on the left, then one token after another, as `generate` gives them."""
    model, ids = build(architecture), tokens(4, 45)
    mask = padded(45, (45, 32, 9, 41), "left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def work() -> torch.Tensor:
        out = model(ids[:, :40], attention_mask=mask[:, :40], position_ids=positions[:, :40])
        logits = [out.logits[mask[:, :40].bool()]]
        for i in range(40, 45):
            out = model(
                ids[:, i : i + 1],
                attention_mask=mask[:, : i + 1],
                position_ids=positions[:, i : i + 1],
                cache=out.cache,
            )
            logits.append(out.logits[:, 0])
        return torch.cat(logits)

    wanted, found = both(model, work)
    assert difference(found, wanted) < TOLERANCE


@pytest.mark.parametrize("length", [1, 20])
def test_row_of_padding_only(
    architecture: str,
    length: int,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    both: Callable[..., Any],
    difference: Callable[..., float],
) -> None:
    """It is finite, and the other rows are as they are without it."""
    model, ids = build(architecture), tokens(3, length)
    mask = torch.ones(3, length, dtype=torch.long)
    mask[1] = 0

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        return model(ids, attention_mask=mask).logits, model(ids[::2]).logits

    (wanted, _), (found, alone) = both(model, work)
    assert found.isfinite().all()
    assert difference(found[::2], wanted[::2]) < TOLERANCE
    assert difference(found[::2], alone) < TOLERANCE


def test_other_arguments(
    architecture: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    both: Callable[..., Any],
    difference: Callable[..., float],
) -> None:
    """Embeddings, positions, no cache, the last logits only; and the cache is what was asked."""
    model, ids = build(architecture), tokens(2, 21)
    embeds = model.get_input_embeddings()(ids).detach()
    positions = torch.arange(100, 121).repeat(2, 1)
    positions[1] += 7

    def work() -> list[torch.Tensor]:
        without = model(ids, use_cache=False)
        assert without.cache is None
        assert model(ids).cache.get_seq_length() == 21
        return [
            without.logits,
            model(inputs_embeds=embeds).logits,
            model(ids, position_ids=positions).logits,
            model(ids, position_ids=positions[:1]).logits,
            model(ids, logits_to_keep=1).logits,
            model(ids, logits_to_keep=torch.tensor([3, 5])).logits,
            model(ids, attention_mask=torch.ones_like(ids).bool()).logits,
        ]

    for wanted, found in zip(*both(model, work), strict=True):
        assert difference(found, wanted) < TOLERANCE


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu"])
@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "neox"])
def test_activations(
    name: str,
    act: str,
    isa: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    both: Callable[..., Any],
    difference: Callable[..., float],
) -> None:
    """Gated and plain MLPs with each activation."""
    option = "activation_function" if name == "gpt2" else "hidden_act"
    model, ids = build(name, **{option: act}), tokens(1, 19)
    wanted, found = both(model, lambda: model(ids).logits)
    assert difference(found, wanted) < TOLERANCE


def test_cache_of_one_is_that_of_the_other(
    architecture: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    both: Callable[..., Any],
    difference: Callable[..., float],
) -> None:
    """Keys and values are transformers' own: rotated, in its layout."""
    model, ids = build(architecture), tokens(2, 7)  # shorter than any window

    def work() -> list[torch.Tensor]:
        layers = model(ids).cache.layers
        return [tensor for layer in layers for tensor in (layer.keys, layer.values)]

    for wanted, found in zip(*both(model, work), strict=True):
        assert difference(found, wanted) < TOLERANCE


def test_one_token_and_layer_a_call(
    architecture: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    both: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Many short native calls, of a token and a layer each, give the same but for rounding."""
    model, ids = build(architecture), tokens(2, 35)
    _, at_once = both(model, lambda: model(ids).logits)
    monkeypatch.setattr(decoder, "PRODUCTS", 1)
    with torch.no_grad():
        found = model(ids).logits
    assert (found - at_once).abs().max() < 2e-5 * at_once.std()


def test_nothing_finite_is_not_hidden(
    isa: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    both: Callable[..., Any],
) -> None:
    """A NaN reaches exactly what it reaches in the original, and no other row of the batch."""
    model, ids = build("llama"), tokens(2, 20)
    embeds = model.get_input_embeddings()(ids).detach().clone()
    embeds[0, 5, 3] = torch.nan
    wanted, found = both(model, lambda: model(inputs_embeds=embeds).logits)
    assert found[0, 5:].isnan().all()
    assert wanted[1].isfinite().all()
    assert found[1].isfinite().all()
