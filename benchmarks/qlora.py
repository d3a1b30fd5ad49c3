"""QLoRA of SmolLM2-135M: seconds a step and peak memory, ours beside bitsandbytes.

A step is forward, loss, backward and AdamW on the adapters. Sides take turns, step by step, in one
process; ratios are medians over rounds with their 95 % interval. Memory is measured in a child
process a side: what is resident after loading, and the peak of the steps above that.

    python benchmarks/qlora.py [--gradient-checkpointing] [--isa avx2] [--profile]

`--isa avx2` holds our kernels and torch to AVX2; bitsandbytes looks at the processor itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

HELD = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
if "avx2" in sys.argv and any(os.environ.get(name) != value for name, value in HELD.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | HELD)  # torch reads it once

import torch  # noqa: E402
import transformers  # noqa: E402

from featherweight import models, native  # noqa: E402
from featherweight.measure.resident import CPU, Watch, resident  # noqa: E402
from featherweight.measure.stats import paired_ratio  # noqa: E402

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RECIPE = "nf4:double+lora:r=8:target=" + ",".join(TARGETS)
MIB = 1 << 20

Step = Callable[[], float]


def ours(folder: str, rest: torch.dtype) -> Any:
    """Our layers, quantised from the checkpoint; what is not quantised in `rest`."""
    name = {torch.float32: "fp32", torch.bfloat16: "bf16"}[rest]
    recipe = RECIPE.replace("double", f"double:rest={name}")
    return models.load(folder, recipe, reversible=False).model


def bitsandbytes(folder: str, rest: torch.dtype) -> Any:
    """Stock transformers, bitsandbytes and PEFT."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=rest,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=rest)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    return model


SIDES: dict[str, Callable[[str], Any]] = {
    "ours fp32": partial(ours, rest=torch.float32),
    "ours bf16": partial(ours, rest=torch.bfloat16),
    "bnb fp32": partial(bitsandbytes, rest=torch.float32),
    "bnb bf16": partial(bitsandbytes, rest=torch.bfloat16),
}


def prepare(model: Any, batch: int, length: int, checkpointing: bool) -> Step:
    """One training step of a model, on the same tokens each time; gives the loss."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def memory(side: str, folder: str, options: argparse.Namespace) -> dict[str, float]:
    """In this process, in MiB: anonymous after loading, the peak of three steps above it, VmHWM."""
    model = SIDES[side](folder)
    step = prepare(model, options.batch, options.length, options.gradient_checkpointing)
    gc.collect()
    floor = resident(CPU)
    with open("/proc/self/status") as lines:
        loading = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    with Watch(floor, CPU) as watch:
        losses = [step() for _ in range(3)]
    peak = watch.peak
    return {
        "after loading": floor.anonymous / MIB,
        "steps above it": peak.anonymous / MIB,
        "sum": (floor.anonymous + peak.anonymous) / MIB,
        "peak RSS of steps": (floor.total + peak.total) / MIB,
        "peak RSS of loading": loading / 1024,
        "loss": losses[-1],
    }


def in_child(side: str) -> dict[str, float]:
    """`memory` in a process of its own."""
    command = [sys.executable, *sys.argv, "--memory-of", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def times(folder: str, options: argparse.Namespace) -> None:
    """Print seconds a step, and how many times faster ours are."""
    steps = {
        side: prepare(
            SIDES[side](folder), options.batch, options.length, options.gradient_checkpointing
        )
        for side in options.sides
    }
    samples: dict[str, list[float]] = {side: [] for side in steps}
    for turn in range(options.rounds + 2):
        for side, step in steps.items():
            start = time.perf_counter()
            step()
            if turn > 1:
                samples[side].append(time.perf_counter() - start)
    for side, spent in samples.items():
        print(f"{side}: {median(spent):.2f} s a step ({min(spent):.2f}-{max(spent):.2f})")
    for mine in (side for side in samples if side.startswith("ours")):
        for theirs in (side for side in samples if side.startswith("bnb")):
            found = paired_ratio(samples[theirs], samples[mine])
            print(f"{mine} vs {theirs}: {found.value:.2f} ({found.low:.2f}-{found.high:.2f})")


def profile(side: str, folder: str, options: argparse.Namespace) -> None:
    """Print where the time of a step goes, by operation."""
    step = prepare(
        SIDES[side](folder), options.batch, options.length, options.gradient_checkpointing
    )
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        for _ in range(3):
            step()
    rows = sorted(found.key_averages(), key=lambda row: -row.self_cpu_time_total)
    total = sum(row.self_cpu_time_total for row in rows)
    print(f"\n{side}: {total / 3e6:.2f} s a step, of the first thread")
    for row in rows[:24]:
        share = row.self_cpu_time_total / total
        print(f"    {row.key:<44} {share:6.1%} {row.count // 3:6d} calls")


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--isa", help="hold the kernels to one instruction set")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--profile", action="store_true", help="where the time goes, instead")
    parser.add_argument("--memory-of", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    folder = str(models.locate("smollm2-135m")[0])
    with native.forced_isa(options.isa) if options.isa else nullcontext():
        if options.memory_of:
            print(json.dumps(memory(options.memory_of, folder, options)))
            return
        isa, load = native.status().isa, os.getloadavg()[0]
        print(f"{isa}, {options.threads} threads, load average {load:.2f}", flush=True)
        if options.profile:
            for side in options.sides:
                profile(side, folder, options)
            return
        times(folder, options)
        for side in options.sides:
            found = in_child(side)
            told = ", ".join(f"{name} {value:.0f}" for name, value in found.items())
            print(f"{side}, MiB: {told}", flush=True)


if __name__ == "__main__":
    main()
