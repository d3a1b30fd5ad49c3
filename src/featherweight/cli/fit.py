"""`featherweight fit`."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any

import click

from featherweight.cli.options import Size, source_options
from featherweight.cli.output import Line, quiet, writable, written
from featherweight.report import FORMATS

# Options that mean nothing without --train, and those that mean nothing with it.
_TRAINING = ("seq_len", "optimizer", "mixed_precision")
_INFERENCE = ("ctx",)


@click.command("fit")
@click.argument("model")
@click.option(
    "--memory",
    "-m",
    type=Size(),
    help="Such as 12GiB. [default: what is available here, or all of --gpu]",
)
@click.option(
    "--ctx",
    type=click.IntRange(2),
    help="Tokens of prompt and answer. [default: 4096, or the model's longest if shorter]",
)
@click.option(
    "--batch-size",
    "-b",
    type=click.IntRange(1),
    help="Sequences at once, or in a step. [default: 1; --train: as many as fit]",
)
@click.option("--recipe", help="This one alone. [default: all that are worth knowing]")
@click.option("--train", is_flag=True, help="Training: the largest micro-batch.")
@click.option("--seq-len", type=click.IntRange(1), help="Tokens of a row. [default: 512]")
@click.option("--optimizer", help="A name of Trainer's, or none. [default: adamw]")
@click.option("--mixed-precision", type=click.Choice(["fp16", "bf16"]), help="Autocast.")
@click.option("--task", help="The head, such as sequence-classification. [default: its own]")
@click.option("--gpu", help="Such as a100-40gb. [default: this machine's CPU]")
@click.option("--cuda-context", type=Size(), help="Such as 1343MiB. [default: of the GPU's kind]")
@click.option(
    "--torch", "torch_version", metavar="VERSION", help="Habits of an older one, such as 1.10."
)
@click.option("--format", "form", type=click.Choice(FORMATS), default="human", show_default=True)
@click.option("--output", "-o", type=click.Path(), help="Write to this file, not to stdout.")
@source_options
def command(model: str, form: str, output: str | None, **asked: Any) -> int:
    """Say which recipes let MODEL fit into a memory, how long a context, and what to run.

    Only the config is read; each recipe is run dry. Exit status 1 if nothing fits.

    \b
    Examples:
      featherweight fit llama-2-7b --memory 12GiB
      featherweight fit qwen3-8b --gpu rtx3060 --ctx 16384
      featherweight fit llama-2-7b --gpu rtx4080 --train --seq-len 2048
          --recipe bnb-nf4:double+lora:r=8+checkpointing
      featherweight fit bert-large --memory 8GiB --gpu v100-16gb --train --batch-size 4
          --task sequence-classification
    """
    given = {name: value for name, value in asked.items() if value is not None}
    _check(given)
    target = writable(output)
    with Line() as line, warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, about itself
        line.show(f"reading the config of {model}", None)
        quiet()
        from featherweight.fitting.fit import fit

        found = fit(model, progress=line.show, **given)
    from featherweight.report.fit import render

    terminal = target is None and sys.stdout.isatty()
    text = render(found, form, color=terminal and "NO_COLOR" not in os.environ) + "\n"
    if target is None or not written(target, text):
        click.echo(text, nl=False)
    return 0 if found.fits else 1


def _check(given: dict[str, Any]) -> None:
    """Refuse what would be ignored."""
    train = given["train"]
    for name in _INFERENCE if train else _TRAINING:
        if name in given:
            option = f"--{name.replace('_', '-')}"
            hint = "means nothing to training: leave --train out" if train else "needs --train"
            raise click.UsageError(f"{option} {hint}")
