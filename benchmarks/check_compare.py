"""Does `compare` measure what a loop written by hand measures?

Both sides in one run, part by part in turn: a child process as `compare` uses it, and this process
with plain loops around the forward pass and `generate()`. Prints the ratio compare / by hand, with
its 95 % interval, which should contain 1.

    python benchmarks/check_compare.py [MODEL] [--recipe fp32] [--rounds 12]
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch

from featherweight.measure.child import Child
from featherweight.measure.figures import Round
from featherweight.measure.stats import paired_ratio
from featherweight.measure.workload import Workload
from featherweight.models import load

PROMPT, NEW = 128, 64
PARTS = ("prefill", "decode", "generate")


def prefill(model: Any, prompt: torch.Tensor) -> float:
    """Tokens a second of the whole prompt at once."""
    start = time.perf_counter()
    for _ in range(3):
        model(prompt, use_cache=True, logits_to_keep=1)
    return 3 * PROMPT / (time.perf_counter() - start)


def decode(model: Any, prompt: torch.Tensor) -> float:
    """Tokens a second, one at a time."""
    cache = None
    start = time.perf_counter()
    for i in range(NEW):
        output = model(prompt[:, i : i + 1], cache=cache, use_cache=True)
        cache = output.past_key_values
    return NEW / (time.perf_counter() - start)


def generate(model: Any, prompt: torch.Tensor) -> float:
    """Tokens a second of `generate()`: of many new tokens less that of one."""

    def seconds(new_tokens: int) -> float:
        start = time.perf_counter()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
        )
        return time.perf_counter() - start

    return (NEW - 1) / (seconds(NEW) - seconds(1))


def main() -> None:
    """Alternate, and print a line a figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--recipe", default="fp32")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    work = Workload(PROMPT, NEW, (1,))
    loaded = load(options.model, options.recipe)
    model = loaded.model
    vocabulary = model.config.vocab_size
    seed = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, vocabulary, (1, PROMPT), generator=seed)
    by_hand = {"prefill": prefill, "decode": decode, "generate": generate}
    samples: dict[str, list[tuple[float, float]]] = {part: [] for part in PARTS}
    with Child(torch.get_num_threads(), 0) as child, torch.inference_mode():
        child.ask(
            "load",
            model=loaded.provenance.source,
            recipe=options.recipe,
            device=None,
            trust_remote_code=False,
        )

        def by_compare(part: str) -> float:
            seconds = child.ask("sample", workload=work.to_json(), part=part, text=None)
            return Round(work, seconds).value(1, part)

        for number in range(-1, options.rounds):  # the first warms up
            for part in PARTS:
                if number % 2:
                    ours, theirs = by_compare(part), by_hand[part](model, prompt)
                else:
                    theirs, ours = by_hand[part](model, prompt), by_compare(part)
                if number >= 0:
                    samples[part].append((ours, theirs))
    for part, pairs in samples.items():
        ours, theirs = ([pair[i] for pair in pairs] for i in (0, 1))
        ratio = paired_ratio(ours, theirs)
        inside = "contains 1" if ratio.low <= 1 <= ratio.high else "does NOT contain 1"
        print(
            f"{part:9} compare {median(ours):7.1f} t/s  by hand {median(theirs):7.1f} t/s"
            f"  ratio {ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f}), {inside}"
        )


if __name__ == "__main__":
    main()
