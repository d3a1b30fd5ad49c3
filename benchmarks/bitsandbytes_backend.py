"""How much faster is an existing bitsandbytes model once the backend is switched on?

A model is saved as a plain bitsandbytes checkpoint, loaded as any user loads it, and run with the
backend off and on in turns; a ratio is the median over rounds with its 95 % interval. With
AVX512-BF16, bitsandbytes repacks 4-bit weights; what it does on every other processor is measured
beside it, on a model that was loaded while it could not see that instruction set.

    python benchmarks/bitsandbytes_backend.py [--model smollm2-135m] [--new-tokens 32] [--rounds 7]
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

os.environ["FEATHERWEIGHT_BNB"] = "0"  # switched by hand, below

import bitsandbytes.nn.modules as bnb
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from featherweight import native
from featherweight.integrations import bitsandbytes as backend
from featherweight.measure import clock
from featherweight.measure.stats import paired_ratio
from featherweight.models import load

CONFIGS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "int8": {"load_in_8bit": True},
}


@dataclass
class Side:
    """One way to run a model."""

    name: str
    model: Any
    on: bool

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """[1, S, V], by this side's kernels."""
        with switched(self.on):
            return self.model(ids).logits

    @torch.no_grad()
    def rates(self, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
        """Tokens a second of a prompt, and of tokens one by one."""
        with switched(self.on):
            prompt = ids.numel() / clock.prefill(self.model, ids)
            return prompt, new_tokens / clock.decode(self.model, ids[:, :new_tokens])


@contextmanager
def switched(on: bool) -> Iterator[None]:
    """The backend on or off inside the block."""
    (backend.enable if on else backend.disable)()
    try:
        yield
    finally:
        backend.disable()


@contextmanager
def without_avx512bf16() -> Iterator[None]:
    """Layers made inside the block do not see that this processor has it."""
    before = bnb.has_avx512bf16
    bnb.has_avx512bf16 = lambda: False
    try:
        yield
    finally:
        bnb.has_avx512bf16 = before


def sides(kind: str, folder: Path) -> list[Side]:
    """Stock here, stock elsewhere, and ours; ours last."""
    here = AutoModelForCausalLM.from_pretrained(folder)
    if kind == "int8":
        return [Side("stock", here, False), Side("backend on", here, True)]
    with without_avx512bf16():
        elsewhere = AutoModelForCausalLM.from_pretrained(folder)
    found = [Side("stock, no AVX512-BF16", elsewhere, False), Side("backend on", elsewhere, True)]
    return [Side("stock, repacked", here, False), *found] if bnb.has_avx512bf16() else found


def compare(kind: str, model: Any, tokenizer: Any, new_tokens: int, rounds: int) -> None:
    """Print rates and quality (against the model before it was quantised) of each side."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = BitsAndBytesConfig(**CONFIGS[kind])
        quantised = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
        checkpoint = Path(folder) / kind
        quantised.save_pretrained(checkpoint)
        del quantised
        found = sides(kind, checkpoint)
    ids = tokenizer(topics["assignment"], return_tensors="pt").input_ids[:, :128]
    samples: dict[str, list[tuple[float, float]]] = {side.name: [] for side in found}
    for turn in range(rounds + 1):  # the first warms up
        for side in found:
            rates = side.rates(ids, new_tokens)
            if turn:
                samples[side.name].append(rates)
    ours = found[-1]
    for part, name in enumerate(("prompt", "decode")):
        mine = [rates[part] for rates in samples[ours.name]]
        for side in found:
            rates = [pair[part] for pair in samples[side.name]]
            ratio = paired_ratio(mine, rates)
            print(
                f"{kind} {name:<7} {side.name:<22} {median(rates):6.1f}"
                f" ({min(rates):.1f}-{max(rates):.1f}) t/s;"
                f" ours {ratio.value:.2f} ({ratio.low:.2f}-{ratio.high:.2f}) times as fast"
            )
    with torch.no_grad():
        exact = model(ids).logits.log_softmax(-1)
    for side in found:
        logits = side.logits(ids).log_softmax(-1)
        kld = torch.nn.functional.kl_div(logits, exact, log_target=True, reduction="sum")
        same = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
        print(f"{kind} quality {side.name:<22} KLD {kld / ids.numel():.4f}, same top {same:.1%}")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    for name, default in (("new-tokens", 32), ("rounds", 7), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a line for every int8 layer
    print(f"{native.status().isa}, {arguments.threads} threads, load {os.getloadavg()[0]:.2f}")
    loaded = load(arguments.model)
    for kind in CONFIGS:
        compare(kind, loaded.model, loaded.tokenizer, arguments.new_tokens, arguments.rounds)


if __name__ == "__main__":
    main()
