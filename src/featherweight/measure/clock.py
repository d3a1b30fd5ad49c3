"""How long the parts of generation take, in seconds, on random tokens of a fixed seed.

The meanings are llama-bench's: `prefill` processes a prompt at once and makes the logits of its
last token; `decode` feeds one token at a time, starting from an empty cache.
"""

from __future__ import annotations

import inspect
import time
from functools import cache as keep
from typing import Any

import torch

LEAST_SECONDS = 0.4  # shorter samples are mostly the noise of the machine


def random_ids(vocabulary: int, batch: int, length: int, seed: int, device: Any) -> torch.Tensor:
    """Token ids [batch, length], the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (batch, length), generator=generator).to(device)


def wait(device: torch.device) -> None:
    """Let a GPU finish what it was given: its calls return at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@keep
def _parameters(model: Any) -> frozenset[str]:
    """Names that a model class's forward pass takes; read once, as it takes 30 µs."""
    return frozenset(inspect.signature(model.forward).parameters)


def forward(model: Any, ids: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:
    """One forward pass on the end of `cache`: logits of the last token [B, 1, V], and the cache."""
    parameters = _parameters(type(model))  # type: ignore[arg-type]  # a type can be hashed
    keywords: dict[str, Any] = {"use_cache": True}
    name = "cache" if "cache" in parameters else "past_key_values"  # transformers 5.24 renamed it
    if cache is not None:
        keywords[name] = cache
    if "logits_to_keep" in parameters:
        keywords["logits_to_keep"] = 1
    output = model(input_ids=ids, **keywords)
    return output.logits, getattr(output, name)


def prefill(model: Any, ids: torch.Tensor) -> float:
    """Seconds to process the prompt `ids` [B, P]; the mean of several times where that is short."""
    start = time.perf_counter()
    for times in range(1, 100):  # noqa: B007  # as often as makes a sample of some length
        forward(model, ids)
        wait(ids.device)
        if time.perf_counter() - start > LEAST_SECONDS:
            break
    return (time.perf_counter() - start) / times


def decode(model: Any, ids: torch.Tensor) -> float:
    """Seconds to process `ids` [B, N] one token at a time from an empty cache."""
    cache = None
    start = time.perf_counter()
    for column in ids.split(1, dim=1):
        _, cache = forward(model, column, cache)
    wait(ids.device)
    return time.perf_counter() - start


class _Stamps:
    """A streamer that notes when each token is handed out; the first one is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(model: Any, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Greedy `generate()` of exactly `new_tokens` (at least 2) after `ids` [B, P].

    Returns seconds to the first token, and seconds from the first to the last.
    """
    stamps = _Stamps()
    vocabulary = model.config.get_text_config().vocab_size
    start = time.perf_counter()
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        # The end of text is looked for at each step, as users have it, but never comes.
        eos_token_id=vocabulary,
        pad_token_id=0,
        streamer=stamps,
    )
    return stamps.times[1] - start, stamps.times[-1] - stamps.times[1]


def encode(model: Any, batches: list[dict[str, torch.Tensor]]) -> float:
    """Seconds for an encoder to read all batches."""
    start = time.perf_counter()
    for inputs in batches:
        model(**inputs)
    wait(batches[0]["input_ids"].device)
    return time.perf_counter() - start
