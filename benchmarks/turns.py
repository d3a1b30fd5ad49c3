"""What benchmarks of decoders share: our side, a plain read of memory, and taking turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median

import torch

import featherweight as fw
from featherweight import native
from featherweight.measure import clock
from featherweight.measure.stats import paired_ratio
from featherweight.tensors import held_bytes

READ = 512 << 20  # bytes
# Threads of OpenMP look busily for work for some milliseconds before they sleep; who comes next
# waits for that.
SETTLE = 0.05  # seconds


class Ours:
    """A recipe in this process."""

    def __init__(self, folder: Path, recipe: str) -> None:
        self.model = fw.load(folder, recipe).model

    def decode(self, ids: torch.Tensor, new_tokens: int) -> float:
        """Tokens a second of all sequences [B, P], between the first new one and the last."""
        return len(ids) * (new_tokens - 1) / clock.generate(self.model, ids, new_tokens)[1]

    def prefill(self, ids: torch.Tensor) -> float:
        """Tokens a second."""
        return ids.numel() / clock.prefill(self.model, ids)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Of the last token, [V]."""
        return clock.forward(self.model, ids)[0][0, -1].float()

    def bytes_of_weights(self) -> int:
        """Read for one token: weights and scales of the layers, and the head."""
        inner = self.model.model
        return held_bytes([inner.layers, inner.norm, self.model.get_output_embeddings()])

    def bytes_of_cache(self) -> int:
        """Read for one token, for each token before it: float32."""
        config = self.model.config
        head_dim = self.model.model.layers[0].self_attn.head_dim
        return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4

    def bytes_read(self, context: float) -> float:
        """For one token after `context` others."""
        return self.bytes_of_weights() + self.bytes_of_cache() * context

    def reasons(self) -> dict[str, int]:
        """Why calls went to the model's own forward, if any did."""
        return getattr(self.model.model.forward, "reasons", {})


def seconds(run: Callable[[], object]) -> float:
    """Of one call: the mean of several where that is short."""
    start = time.perf_counter()
    for calls in range(1, 100):  # noqa: B007
        run()
        if time.perf_counter() - start > clock.LEAST_SECONDS:
            break
    return (time.perf_counter() - start) / calls


class Read:
    """A plain read of memory far beyond the caches; GB/s."""

    def __init__(self) -> None:
        self.data = torch.ones(READ, dtype=torch.uint8)

    def decode(self, *_: object) -> float:
        """Of as long as a sample of the others may last."""
        return READ / seconds(lambda: native.sum_words(self.data)) / 1e9


def take_turns(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """A sample of each side a round, after one round that warms up; each second one backwards."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            time.sleep(SETTLE)
            rate = sides[name]()
            if turn:
                samples[name].append(rate)
    return samples


def times(ours: Iterable[float], theirs: Iterable[float]) -> str:
    """The paired ratio, and its interval."""
    found = paired_ratio(list(ours), list(theirs))
    return f"{found.value:.2f} ({found.low:.2f}-{found.high:.2f})"


def rate(name: str, samples: list[float], unit: str = "t/s") -> str:
    """Median and range."""
    return f"    {name:<28} {median(samples):7.1f} ({min(samples):.1f}-{max(samples):.1f}) {unit}"
