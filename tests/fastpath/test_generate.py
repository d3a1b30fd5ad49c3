"""`generate()` and pipelines: the same tokens as without the fast path."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache, TextStreamer, pipeline

import featherweight as fw

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "sampling": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "beams-several": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "beams-sampling": {"num_beams": 2, "do_sample": True},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "no-cache": {"use_cache": False},
    "chunked": {"prefill_chunk_size": 7},
    "forced": {"min_new_tokens": 5, "eos_token_id": 7, "bad_words_ids": [[5]]},
}


def generate(model: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Twenty tokens behind ids, always with the same seed."""
    torch.manual_seed(3)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 20} | options
    found: torch.Tensor = model.generate(ids, pad_token_id=0, **options)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "neox", "bigcode"])
def test_same_tokens(
    name: str,
    way: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    forward_of: Callable[[Any], Any],
) -> None:
    """In every way of decoding, and nothing of it goes to the original."""
    model, ids = build(name), tokens(1, 19)
    wanted = generate(model, ids, **WAYS[way])
    fw.apply(model, "fastpath")
    assert torch.equal(generate(model, ids, **WAYS[way]), wanted)
    assert forward_of(model).reasons == {}


def test_batch_padded_left(
    architecture: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    forward_of: Callable[[Any], Any],
) -> None:
    """Prompts of several lengths in one batch."""
    model, ids = build(architecture), tokens(4, 33)
    mask = (torch.arange(33) >= 33 - torch.tensor([33, 32, 1, 17])[:, None]).long()
    ids[mask == 0] = 0
    wanted = generate(model, ids, attention_mask=mask)
    fw.apply(model, "fastpath")
    with torch.no_grad():
        model(ids[:, :2])  # forgets how long dynamic angles have become
    assert torch.equal(generate(model, ids, attention_mask=mask), wanted)
    assert forward_of(model).reasons == {}


def test_longer_than_the_first_buffer(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor]
) -> None:
    """The cache grows past its first 256 tokens of room, and once more."""
    model, ids = build("llama", max_position_embeddings=1024), tokens(1, 10)
    wanted = generate(model, ids, max_new_tokens=600)
    fw.apply(model, "fastpath")
    assert torch.equal(generate(model, ids, max_new_tokens=600), wanted)


@pytest.mark.parametrize("fast", ["both", "model", "assistant"])
def test_assisted(
    fast: str, build: Callable[..., Any], tokens: Callable[..., torch.Tensor]
) -> None:
    """A smaller model proposes, on the fast path or not."""
    model, assistant, ids = build("llama"), build("llama", num_hidden_layers=2), tokens(1, 19)
    wanted = generate(model, ids)
    for one, name in ((model, "model"), (assistant, "assistant")):
        if fast in ("both", name):
            fw.apply(one, "fastpath")
    assert torch.equal(generate(model, ids, assistant_model=assistant), wanted)


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
def test_cache_goes_on(
    argument: str,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    forward_of: Callable[[Any], Any],
) -> None:
    """A conversation in two turns, with the cache under its name and its old name."""
    model, ids, more = build("llama"), tokens(1, 19), tokens(1, 6, seed=2)

    def talk() -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        said = generate(model, ids, **{argument: cache})
        return generate(model, torch.cat([said, more], 1), **{argument: cache})

    wanted = talk()
    fw.apply(model, "fastpath")
    assert torch.equal(talk(), wanted)
    assert forward_of(model).reasons == {}


def test_prompt_in_a_cache(build: Callable[..., Any], tokens: Callable[..., torch.Tensor]) -> None:
    """One prompt, read once and copied, before several questions."""
    model, prompt = build("llama"), tokens(1, 30)
    texts = [torch.cat([prompt, tokens(1, n, seed=n)], 1) for n in (1, 5)]
    wanted = [generate(model, text) for text in texts]
    fw.apply(model, "fastpath")
    with torch.no_grad():
        cache = model(prompt, cache=DynamicCache(config=model.config)).cache
    for text, ids in zip(texts, wanted, strict=True):
        assert torch.equal(generate(model, text, cache=copy.deepcopy(cache)), ids)


def test_scores_and_embeddings(
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
) -> None:
    """Scores on request, and a prompt given as embeddings."""
    model, ids = build("llama"), tokens(2, 19)
    embeds = model.get_input_embeddings()(ids).detach()

    def scores() -> torch.Tensor:
        out = model.generate(
            inputs_embeds=embeds,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=8,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return torch.stack(out.logits)

    wanted = scores()
    fw.apply(model, "fastpath")
    assert difference(scores(), wanted) < 2e-5


def test_pipeline_and_streamer(
    tiny_llama: Path,
    read: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Text in, text out: one prompt, a batch of several, and streamed."""
    model, tokenizer = read(tiny_llama), AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.padding_side = "left"
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    texts = ["An assignment", "If the target list is a single target", "x"]
    options = {"max_new_tokens": 12, "do_sample": False}

    def work() -> list[Any]:
        ids = tokenizer(texts[0], return_tensors="pt")
        model.generate(**ids, **options, streamer=TextStreamer(tokenizer))
        return [
            write(texts[0], **options),
            write(texts, batch_size=3, **options),
            capsys.readouterr().out,
        ]

    wanted = work()
    assert wanted[-1].startswith(texts[0])
    with fw.apply(model, "fastpath"):
        assert work() == wanted


def test_real_model(smollm2: str) -> None:
    """SmolLM2 says the same sixty tokens, also to a batch."""
    loaded = fw.load(smollm2)
    tokenizer = loaded.tokenizer
    tokenizer.padding_side = "left"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(["Gravity is", "My favourite food is"], padding=True, return_tensors="pt")
    options = {"max_new_tokens": 30, "do_sample": False}
    wanted = loaded.model.generate(**inputs, **options)
    fw.apply(loaded.model, "fastpath")
    assert torch.equal(loaded.model.generate(**inputs, **options), wanted)
