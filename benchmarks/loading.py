"""How long quantising while loading takes beside reading the file, and how much memory.

    python benchmarks/loading.py 1.1b --recipe nf4:double --rounds 5
    python benchmarks/loading.py 7b --rounds 1

Rounds alternate: a plain read of all shards, then `featherweight.load`, each with the files in the
page cache (`warm`) or dropped from it before (`cold`). Memory is that of a child process that loads
once: peak anonymous memory over what it had before, beside the bytes of the quantised model.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch
import transformers
from random_checkpoint import GEOMETRIES, default_folder, write

import featherweight as fw
from featherweight.measure.resident import CPU, Watch, resident
from featherweight.tensors import held

CHUNK = 16 << 20


def read(folder: Path) -> float:
    """Seconds to read all weights once, as fast as one thread does."""
    buffer = bytearray(CHUNK)
    start = time.perf_counter()
    for file in sorted(folder.glob("*.safetensors")):
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - start


def load(folder: Path, recipe: str) -> float:
    """Seconds to load and quantise."""
    start = time.perf_counter()
    loaded = fw.load(folder, recipe)
    seconds = time.perf_counter() - start
    del loaded
    return seconds


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory(folder: Path, recipe: str) -> dict[str, int]:
    """In this process: peak anonymous bytes while loading, and what is left."""
    from featherweight.native.library import available

    available()  # the library and torch's threads are no part of the loading
    with Watch(resident(CPU), CPU) as watch:
        loaded = fw.load(folder, recipe)
    largest = sorted((2 * p for p in _sizes(folder)), reverse=True)[:2]
    kept = held(loaded.model)
    return {
        "peak_anonymous": watch.peak.anonymous or 0,
        "quantised": kept.total - kept.mapped,
        "mapped": kept.mapped,
        "peak_total": watch.peak.total,
        "two_largest": sum(largest),
    }


def _sizes(folder: Path) -> list[int]:
    from featherweight.stored import entries

    found = entries(folder.glob("*.safetensors")).values()
    return [torch.Size(entry.shape).numel() for entry in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("--recipe", default="nf4:double")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    folder = write(options.geometry, default_folder(options.geometry))
    if options.memory:
        print(json.dumps(memory(folder, options.recipe)))
        return
    for state in ("warm", "cold"):
        reads, loads = [], []
        for _ in range(options.rounds):
            for samples, run in (
                (reads, lambda: read(folder)),
                (loads, lambda: load(folder, options.recipe)),
            ):
                if state == "cold":
                    forget(folder)
                samples.append(run())
        ratios = sorted(b / a for a, b in zip(reads, loads, strict=True))
        print(
            f"{state}: read {median(reads):.2f} s, load {median(loads):.2f} s,"
            f" ratio {median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})"
        )
    command = [sys.executable, __file__, options.geometry, "--recipe", options.recipe, "--memory"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    allowed = 1.1 * (found["quantised"] + found["two_largest"])
    print({name: f"{size / 1e6:,.0f} MB" for name, size in found.items()})
    print(f"peak over (quantised + two largest) · 1.1: {found['peak_anonymous'] / allowed:.2f}")


if __name__ == "__main__":
    main()
