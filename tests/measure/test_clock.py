"""The clock: as many forward passes over as many tokens as each figure claims."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from featherweight.measure import clock
from featherweight.models import Loaded

VOCABULARY = 384


def ids(batch: int, length: int) -> torch.Tensor:
    return clock.random_ids(VOCABULARY, batch, length, seed=0, device="cpu")


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


def shapes(calls: list[Any]) -> list[tuple[int, int]]:
    return [shape for shape, _ in calls]


def test_random_ids_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    assert torch.equal(ids(2, 50), ids(2, 50))
    assert not torch.equal(ids(2, 50), clock.random_ids(VOCABULARY, 2, 50, 1, "cpu"))
    assert 0 <= ids(9, 999).min() <= ids(9, 999).max() < VOCABULARY


@pytest.mark.parametrize("batch", [1, 3])
def test_prefill_reads_the_prompt_at_once_and_makes_the_last_logits(
    llama: Loaded, calls: list[Any], batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "LEAST_SECONDS", 0)
    assert clock.prefill(llama.model, ids(batch, 20)) > 0
    assert shapes(calls) == [(batch, 20)]
    assert calls[0][1].logits.shape == (batch, 1, VOCABULARY)


def test_short_prefill_is_repeated_from_an_empty_cache(llama: Loaded, calls: list[Any]) -> None:
    clock.prefill(llama.model, ids(1, 4))
    assert 1 < len(calls) < 100
    assert {output.past_key_values.get_seq_length() for _, output in calls} == {4}


@pytest.mark.parametrize("batch", [1, 3])
def test_decode_feeds_one_token_at_a_time(llama: Loaded, calls: list[Any], batch: int) -> None:
    assert clock.decode(llama.model, ids(batch, 5)) > 0
    assert shapes(calls) == [(batch, 1)] * 5
    assert calls[-1][1].past_key_values.get_seq_length() == 5


def test_decode_says_what_one_pass_says(llama: Loaded, calls: list[Any]) -> None:
    prompt = ids(2, 6)
    clock.decode(llama.model, prompt)
    expected = llama.model(input_ids=prompt).logits[:, -1:]
    torch.testing.assert_close(calls[5][1].logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
def test_generate_makes_exactly_as_many_tokens(llama: Loaded, calls: list[Any], batch: int) -> None:
    first, rest = clock.generate(llama.model, ids(batch, 7), 5)
    assert first > 0
    assert rest > 0
    assert shapes(calls) == [(batch, 7)] + [(batch, 1)] * 4


def test_generate_goes_on_where_the_text_would_end(
    llama: Loaded, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = ids(1, 7)
    says = llama.model(input_ids=prompt).logits[0, -1].argmax().item()
    monkeypatch.setattr(llama.model.generation_config, "eos_token_id", says)
    monkeypatch.setattr(llama.model.generation_config, "num_beams", 3)
    monkeypatch.setattr(llama.model.generation_config, "do_sample", True)
    calls.clear()
    clock.generate(llama.model, prompt, 6)
    assert shapes(calls) == [(1, 7)] + [(1, 1)] * 5


def test_encode_reads_every_batch_once(bert: Loaded, calls: list[Any]) -> None:
    batches = [
        {"input_ids": ids(size, 8), "attention_mask": torch.ones(size, 8)} for size in (3, 2)
    ]
    assert clock.encode(bert.model, batches) > 0
    assert shapes(calls) == [(3, 8), (2, 8)]
