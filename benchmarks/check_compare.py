"""Does `compare` measure what a loop written by hand measures?

Both sides in one run, taking turns: a child process as `compare` uses it, and this process with
plain loops around `generate()` and the forward pass. Prints the ratio compare / by hand, with its
95 % interval, which should contain 1.

    python benchmarks/check_compare.py [MODEL] [--recipe fp32] [--rounds 8]
"""

from __future__ import annotations

import argparse
import time

import torch

from featherweight.measure.child import Child
from featherweight.measure.figures import Round
from featherweight.measure.stats import paired_ratio
from featherweight.measure.workload import Workload
from featherweight.models import load

PROMPT, NEW = 128, 64


def by_hand(model, prompt: torch.Tensor) -> dict[str, float]:
    """Tokens a second of prompt, decode and generate, without anything of `measure`."""

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

    start = time.perf_counter()
    for _ in range(4):
        model(prompt, use_cache=True, logits_to_keep=1)
    prefill = (time.perf_counter() - start) / 4
    cache = None
    start = time.perf_counter()
    for i in range(NEW):
        output = model(prompt[:, i : i + 1], cache=cache, use_cache=True)
        cache = output.past_key_values
    decode = time.perf_counter() - start
    generate = seconds(NEW) - seconds(1)
    return {"prefill": PROMPT / prefill, "decode": NEW / decode, "generate": (NEW - 1) / generate}


def main() -> None:
    """Alternate, and print a line a figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--recipe", default="fp32")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    threads = torch.get_num_threads()
    work = Workload(PROMPT, NEW, (1,))
    model = load(options.model, options.recipe).model
    prompt = torch.randint(
        0, model.config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0)
    )
    ours: dict[str, list[float]] = {"prefill": [], "decode": [], "generate": []}
    theirs: dict[str, list[float]] = {name: [] for name in ours}
    with Child(threads, 0) as child, torch.inference_mode():
        child.ask(
            "load",
            model=options.model,
            recipe=options.recipe,
            device=None,
            trust_remote_code=False,
        )
        for number in range(-1, options.rounds):  # the first warms up
            order = (0, 1) if number % 2 else (1, 0)
            for side in order:
                if side == 0:
                    seconds = child.ask("round", workload=work.to_json(), text=None)
                    done = Round(work, seconds)
                    values = {name: done.value(1, name) for name in ours}
                else:
                    values = by_hand(model, prompt)
                if number >= 0:
                    for name, value in values.items():
                        (ours if side == 0 else theirs)[name].append(value)
    for name in ours:
        ratio = paired_ratio(ours[name], theirs[name])
        inside = "contains 1" if ratio.low <= 1 <= ratio.high else "does NOT contain 1"
        print(
            f"{name:9} compare {sorted(ours[name])[len(ours[name]) // 2]:8.1f} t/s"
            f"  by hand {sorted(theirs[name])[len(theirs[name]) // 2]:8.1f} t/s"
            f"  ratio {ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f}), {inside}"
        )


if __name__ == "__main__":
    main()
