"""How fast does a decoder write with the fast path, beside llama.cpp on the same machine?

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install llama-cpp-python gguf
    python benchmarks/decoding.py [decode | prefill] [--model smollm2] [--rounds 9]

`decode` is greedy `generate()` of ours against llama.cpp's own loop of one token a call; `prefill`
a prompt of 512 tokens at once, also against torch in float32. Sides take turns, one sample a round,
with the same threads and token ids; a ratio is the median over rounds with its 95 % interval. The
head is in 8 bits on both sides. `read` is a plain read of memory in the same rounds.

llama.cpp runs in a process of its own, of any Python that has it (`--python`), with the instruction
sets it was compiled for: `--isa avx2` holds ours and torch only. To hold it too, name a Python that
has it compiled with CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON".
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from llama_cpp_side import FORMATS, LlamaCpp, files
from random_checkpoint import default_folder, write
from transformers.utils.logging import disable_progress_bar
from turns import Ours, Read, rate, take_turns, times

import featherweight as fw
from featherweight import native
from featherweight.measure import clock
from featherweight.named import NAMED, fetch
from featherweight.paths import cache_dir

PAIRS = {
    "nf4:head=int8+fastpath": ("Q4_0", "IQ4_NL"),
    "int8:head=int8+fastpath": ("Q8_0",),
}
DECODED = ["Q4_0", "IQ4_NL", "Q8_0"]
PROMPT = 512  # tokens of `prefill`
HELD = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


class Theirs:
    """A gguf file in llama.cpp's process."""

    def __init__(self, side: LlamaCpp, path: Path, tokens: int) -> None:
        self.side, self.name, self.own = side, path.stem, 0.0
        self.bytes = side("load", name=self.name, path=str(path), tokens=tokens)

    def decode(self, ids: torch.Tensor, new_tokens: int) -> float:
        """Tokens a second between the first new one and the last."""
        done = self.side("generate", name=self.name, ids=ids[0].tolist(), new_tokens=new_tokens)
        self.own = (new_tokens - 1) / done["own"]
        return (new_tokens - 1) / done["seconds"]

    def prefill(self, ids: torch.Tensor) -> float:
        """Tokens a second."""
        return ids.numel() / self.side("prefill", name=self.name, ids=ids[0].tolist())

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Of the last token, [V]."""
        return torch.tensor(self.side("logits", name=self.name, ids=ids[0].tolist()))


def alternate(
    sides: dict[str, Any], part: str, rounds: int, rival: LlamaCpp, *given: Any
) -> dict[str, list[float]]:
    """Samples of all sides in turns. Also prints how busy the process was that waited."""
    busy, spent = [], []

    def watched(side: Any) -> Callable[[], float]:
        def sample() -> float:
            waits = time.process_time if isinstance(side, Theirs) else rival.cpu_seconds
            start, before = time.perf_counter(), waits()
            rate = getattr(side, part)(*given)
            busy.append(waits() - before)
            spent.append(time.perf_counter() - start)
            return rate

        return sample

    samples = take_turns({name: watched(side) for name, side in sides.items()}, rounds)
    print(f"    (while one side ran, the other used {sum(busy) / sum(spent):.2%} of a core)")
    return samples


@torch.inference_mode()
def decode(sides: dict[str, Any], options: argparse.Namespace, rival: LlamaCpp) -> None:
    """Print tokens a second, the share of the bandwidth, and the pairs."""
    print(f"\ndecode: {options.new_tokens} tokens after {options.prompt_tokens}")
    sides = {"read": Read()} | sides
    ids = clock.random_ids(options.vocabulary, 1, options.prompt_tokens, 0, "cpu")
    samples = alternate(sides, "decode", options.rounds, rival, ids, options.new_tokens)
    read = samples["read"]
    print(rate("read", read, "GB/s"))
    for name, side in sides.items():
        if isinstance(side, Ours):
            nbytes = side.bytes_read(options.prompt_tokens + options.new_tokens / 2)
            speed = [sample * nbytes / 1e9 for sample in samples[name]]
            share = f"{median(speed):.1f} GB/s, of the read {times(speed, read)}"
            print(f"{rate(name, samples[name])}; {nbytes / 1e6:.0f} MB a token, {share}")
        elif isinstance(side, Theirs):
            size = f"{side.bytes / 1e6:.0f} MB of weights"
            print(f"{rate(name, samples[name])}; last by its own clock {side.own:.1f}; {size}")
    for ours, theirs in PAIRS.items():
        for other in theirs:
            print(f"    {ours} / {other}: {times(samples[ours], samples[other])}")


@torch.inference_mode()
def prefill(sides: dict[str, Any], options: argparse.Namespace, rival: LlamaCpp) -> None:
    """Print tokens a second of every side, and the best of ours against the others."""
    print(f"\nprefill: {PROMPT} tokens (cosine of the last logits with those of torch fp32)")
    ids = clock.random_ids(options.vocabulary, 1, PROMPT, 0, "cpu")
    samples = alternate(sides, "prefill", options.rounds, rival, ids)
    exact = sides["fp32"].logits(ids)
    for name, side in sides.items():
        cosine = torch.cosine_similarity(side.logits(ids), exact, dim=0)
        print(f"{rate(name, samples[name])}; cosine {cosine:.4f}")
    middle = {name: median(rates) for name, rates in samples.items() if name != "fp32"}
    best = {
        kind: max((n for n in middle if isinstance(sides[n], kind)), key=middle.__getitem__)
        for kind in (Ours, Theirs)
    }
    for other in (best[Theirs], "fp32"):
        print(f"    {best[Ours]} / {other}: {times(samples[best[Ours]], samples[other])}")


def run(options: argparse.Namespace, rival: LlamaCpp) -> None:
    """Make files and load models as they are needed."""
    small = options.model == "smollm2"
    folder = fetch(NAMED["smollm2-135m"]) if small else write("1.1b", default_folder("1.1b"))
    kinds = DECODED if options.part == "decode" else list(FORMATS)
    stored = cache_dir() / "gguf" / options.model
    paths = files(rival, stored, kinds, lambda: fw.load(folder, "fp32").model)
    room = max(options.prompt_tokens + options.new_tokens, PROMPT)
    ours: dict[str, Any] = {recipe: Ours(folder, recipe) for recipe in (*PAIRS, *options.also)}
    theirs = {p.stem: Theirs(rival, p, room) for p in paths}
    options.vocabulary = next(iter(ours.values())).model.config.vocab_size
    if options.part != "prefill":
        decode(ours | {name: theirs[name] for name in DECODED}, options, rival)
    if options.part != "decode":
        prefill({"fp32": Ours(folder, "fp32")} | ours | theirs, options, rival)
    for name, side in ours.items():
        if side.reasons():
            print(f"NOT SERVED by the fast path of {name}: {side.reasons()}")


def main() -> None:
    """Print the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=("decode", "prefill"), help="default: both")
    parser.add_argument("--model", choices=("smollm2", "1.1b"), default="smollm2")
    for name, default in (("threads", 2), ("rounds", 9), ("new-tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="before those of `decode`")
    parser.add_argument("--also", action="append", default=[], help="one more recipe of ours")
    parser.add_argument("--isa", help="hold ours to one instruction set (avx2: torch too)")
    parser.add_argument("--python", default=sys.executable, help="has llama-cpp-python")
    options = parser.parse_args()
    if options.isa == "avx2" and HELD.items() - os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | HELD)  # read but once
    disable_progress_bar()
    torch.set_num_threads(options.threads)
    rival = LlamaCpp(options.python, options.threads)
    with native.forced_isa(options.isa) if options.isa else nullcontext():
        load = f"load average {os.getloadavg()[0]:.2f}"
        print(f"{options.model}, {native.status().isa}, {options.threads} threads, {load}")
        print(f"llama-cpp-python {rival.version}, compiled for {rival.system}")
        if options.isa:
            print(f"llama.cpp cannot be held to {options.isa}: see the line above for what it uses")
        run(options, rival)


if __name__ == "__main__":
    main()
