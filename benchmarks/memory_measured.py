"""Predicted against measured memory on this machine's CPU: `python benchmarks/memory_measured.py`.

Eight settings of training and generation, each predicted from its config and then run for real.
"In use" is the growth of a process whose malloc gives back what is freed, beside the bytes of
tensors predicted; "process" is a whole process whose malloc is left as it comes.
"""

from __future__ import annotations

from typing import Any

import click

import featherweight as fw
from featherweight.anatomy.measured import measure

MIB = 1 << 20
TRAIN: dict[str, Any] = {"train": True, "seq_len": 256, "batch_size": 2}
HEAD = {"task": "sequence-classification"}
SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "train eager": ("smollm2-135m", "fp32+eager", TRAIN),
    "train sdpa": ("smollm2-135m", "fp32+sdpa", TRAIN),
    "train checkpointed": (
        "smollm2-135m",
        "fp32+sdpa+checkpointing",
        TRAIN | {"batch_size": 4},
    ),
    "train lora": ("smollm2-135m", "fp32+sdpa+lora:r=8", TRAIN),
    "train accumulated": (
        "smollm2-135m",
        "fp32+sdpa",
        TRAIN | {"batch_size": 1, "accumulate": 4},
    ),
    "generate": (
        "smollm2-135m",
        "fp32",
        {"batch_size": 4, "prompt_tokens": 512, "new_tokens": 64},
    ),
    "encoder eager": (
        "minilm-l6",
        "fp32+eager",
        TRAIN | HEAD | {"batch_size": 16, "seq_len": 128},
    ),
    "encoder sdpa": ("minilm-l6", "fp32+sdpa", TRAIN | HEAD | {"batch_size": 32}),
}


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(SETTINGS)), help="One setting.")
def main(only: tuple[str, ...]) -> None:
    """Print predicted against measured, in MiB."""
    print("| | tensors predicted | in use | error | process predicted | process | error |")
    print("|:--|--:|--:|--:|--:|--:|--:|")
    for name in only or SETTINGS:
        model, recipe, keywords = SETTINGS[name]
        found = fw.memory(model, recipe, **keywords)
        real = measure(model, recipe, **keywords)
        cells = []
        for predicted, measured in (
            (found.peak.allocated, real.resident),
            (found.peak.process, real.process),
        ):
            assert measured is not None
            cells += [f"{predicted / MIB:,.0f}", f"{measured / MIB:,.0f}"]
            cells.append(f"{predicted / measured - 1:+.1%}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
