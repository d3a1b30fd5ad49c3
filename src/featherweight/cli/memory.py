"""`featherweight memory`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from featherweight.cli.options import Size, source_options
from featherweight.cli.output import Line, quiet, writable, written
from featherweight.errors import FeatherweightError
from featherweight.report import FORMATS

# Options that mean nothing to other workloads, and are refused there rather than ignored.
_TRAINING = ("optimizer", "loss", "accumulate", "max_grad_norm")
_PASSES = ("seq_len", "mixed_precision")  # training and a forward pass
_GENERATION = ("prompt_tokens", "new_tokens", "num_beams")
_PATIENCE = 2.0  # seconds before progress is shown


@click.command("memory")
@click.argument("model")
@click.argument("recipe", required=False)
@click.option("--recipe", "named", help="The same as RECIPE. [default: the checkpoint's own dtype]")
@click.option("--train", is_flag=True, help="A step of training, not generation.")
@click.option("--forward", is_flag=True, help="One forward pass without gradients.")
@click.option("--task", help="The head, such as sequence-classification. [default: its own]")
@click.option("--batch-size", "-b", type=click.IntRange(1), help="Sequences at once. [default: 1]")
@click.option(
    "--seq-len", type=click.IntRange(1), help="Tokens of --train and --forward. [default: 512]"
)
@click.option("--padding", type=float, help="Share of positions that is padding. [default: 0]")
@click.option("--optimizer", help="A name of Trainer's, or none. [default: adamw]")
@click.option("--loss", help="logits.sum instead of the model's own.")
@click.option("--mixed-precision", type=click.Choice(["fp16", "bf16"]), help="Autocast.")
@click.option("--accumulate", type=click.IntRange(1), help="Micro-batches a step. [default: 1]")
@click.option("--max-grad-norm", type=float, help="Clip gradients; 0: do not. [default: 1]")
@click.option("--prompt-tokens", "-p", type=click.IntRange(1), help="[default: 512]")
@click.option("--new-tokens", "-n", type=click.IntRange(0), help="[default: 128]")
@click.option("--num-beams", type=click.IntRange(1), help="[default: 1]")
@click.option(
    "--outputs",
    type=click.Choice(["held", "dropped"]),
    help="Of a pass, until the next has its own. [default: as Trainer and generate do]",
)
@click.option("--gpu", help="Such as a100-40gb. [default: this machine's CPU]")
@click.option("--cuda-context", type=Size(), help="Such as 1343MiB. [default: of the GPU's kind]")
@click.option("--transformers", metavar="VERSION", help="Run dry under another, such as 4.43.3.")
@click.option(
    "--torch", "torch_version", metavar="VERSION", help="Habits of an older one, such as 1.10."
)
@click.option("--detail", is_flag=True, help="Categories, largest holders, phases.")
@click.option("--what-if", is_flag=True, help="What would save memory, and what it would cost.")
@click.option("--measure", is_flag=True, help="Run it for real, too, and show the error.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="human", show_default=True)
@click.option("--output", "-o", type=click.Path(), help="Write to this file, not to stdout.")
@click.option("--html", type=click.Path(), help="Also write a page with the course of it.")
@source_options
def command(
    model: str,
    recipe: str | None,
    named: str | None,
    detail: bool,
    what_if: bool,
    measure: bool,
    form: str,
    output: str | None,
    html: str | None,
    **asked: Any,
) -> None:
    """Predict the memory of MODEL under RECIPE, by a dry run of the program.

    Only the config is read: no weights, no GPU. The first figure is what nvidia-smi or the system
    monitor would show.

    \b
    Examples:
      featherweight memory qwen3-8b nf4:double --gpu rtx3060 -p 8000
      featherweight memory bert-large fp32+eager --train --task sequence-classification
          --batch-size 4 --gpu v100-16gb --detail --html memory.html
      featherweight memory llama-3.1-8b bf16+lora:r=16 --train --gpu a100-40gb --what-if
    """
    if recipe is not None and named is not None:
        raise click.UsageError(f"two recipes, '{recipe}' and '{named}'; name one")
    recipe = recipe if recipe is not None else named
    given = {name: value for name, value in asked.items() if value is not None}
    _check(given)
    real = _measurable(given) if measure else {}
    target, page = writable(output), writable(html)
    if page is not None:
        from featherweight.report.memory_page import plotly_js

        plotly_js()  # said before anything is run, if it is not installed
    changes = measured = None
    with _progress(f"dry run of {model}"):
        from featherweight.anatomy.memory import memory

        quiet()
        found = memory(model, recipe, **given)
    if what_if:
        with _progress(f"dry runs of {model} with a change each"):
            from featherweight.anatomy.what_if import what_if as try_changes

            changes = try_changes(model, recipe, before=found, **given)
    if measure:
        with _progress(f"running {model}"):
            from featherweight.anatomy.measured import measure as run

            measured = run(model, recipe, **real)

    from featherweight.report.memory import render

    terminal = target is None and sys.stdout.isatty()
    color = terminal and "NO_COLOR" not in os.environ
    text = render(found, form, detailed=detail, changes=changes, measured=measured, color=color)
    if target is None or not written(target, text + "\n"):
        click.echo(text)
    if page is not None:
        from featherweight.report.memory_page import write_page

        try:
            write_page(page, found, changes=changes, measured=measured)
        except OSError as error:
            reason = error.strerror or error
            raise FeatherweightError(f"cannot write to '{page}': {reason}") from None
        click.echo(f"written to {page}", err=True)


def _check(given: dict[str, Any]) -> None:
    """Refuse what contradicts itself or would be ignored."""
    train, forward = given["train"], given["forward"]
    if train and forward:
        raise click.UsageError("--train and --forward exclude each other; give one of them")
    if "cuda_context" in given and "gpu" not in given:
        raise click.UsageError("--cuda-context is of a GPU; name it: --gpu a100-40gb")
    kind = "training" if train else "a forward pass" if forward else "generation"
    needs = {name: "--train" for name in _TRAINING if not train}
    if not train and not forward:
        needs |= dict.fromkeys(_PASSES, "--train or --forward")
    else:
        needs |= dict.fromkeys(_GENERATION, "generation, the default")
    for name, need in needs.items():
        if name in given:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} means nothing to {kind}: it needs {need}")


def _measurable(given: dict[str, Any]) -> dict[str, Any]:
    """What to run for real: the same on this machine's GPU, or its CPU, with what is installed."""
    for name, option in (("transformers", "--transformers"), ("torch_version", "--torch")):
        if name in given:
            raise click.UsageError(f"--measure runs the versions at hand; leave {option} out")
    kept = {name: given[name] for name in given if name not in ("gpu", "cuda_context")}
    return kept | {"device": "cuda" if "gpu" in given else "cpu"}


@contextmanager
def _progress(doing: str) -> Iterator[None]:
    """One line on stderr, if it takes long."""
    with Line() as line:
        timer = threading.Timer(_PATIENCE, line.show, (doing, None))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
