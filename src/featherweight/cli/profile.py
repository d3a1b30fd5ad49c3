"""`featherweight profile`."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from featherweight.cli.options import Numbers, model_options
from featherweight.cli.output import Line, quiet, writable, written
from featherweight.report import FORMATS


@click.command("profile")
@click.argument("model")
@click.option("--recipe", help="Such as bf16+flash. [default: the checkpoint as it is]")
@click.option("--train", is_flag=True, help="A forward and a backward pass.")
@click.option("--decode", is_flag=True, help="One token after the prompt, not the prompt.")
@click.option("--batch-size", "-b", default=1, show_default=True, type=click.IntRange(1))
@click.option("--prompt-tokens", "-p", default=512, show_default=True, type=click.IntRange(1))
@click.option(
    "--lengths",
    type=Numbers(),
    help="Tokens at which attention's score matrix is reckoned. [default: 512 to 131072]",
)
@click.option("--runs", "-r", default=5, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True, help="Of random tokens.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="human", show_default=True)
@click.option("--output", "-o", type=click.Path(), help="Write to this file, not to stdout.")
@model_options
def command(
    model: str,
    prompt_tokens: int,
    lengths: tuple[int, ...] | None,
    form: str,
    output: str | None,
    threads: int | None,
    **settings: Any,
) -> None:
    """Run MODEL and show where its time goes: operations by group, FLOPs, bytes, time.

    Each operation stands beside the least time that this machine could take for it, and what it
    waits for: memory or arithmetic. The model is run for real, so that it needs its weights.

    \b
    Examples:
      featherweight profile smollm2-135m
      featherweight profile smollm2-135m --decode --recipe nf4:double+fastpath
      featherweight profile minilm-l6 --train --batch-size 8 --format json -o profile.json
    """
    target = writable(output)
    import torch

    from featherweight.profiling.profile import profile
    from featherweight.profiling.scores import LENGTHS
    from featherweight.report.profile import render

    quiet()
    if threads:
        torch.set_num_threads(threads)
    with Line() as line:
        found = profile(
            model, seq_len=prompt_tokens, lengths=lengths or LENGTHS, progress=line.show, **settings
        )
    terminal = target is None and sys.stdout.isatty()
    text = render(found, form, color=terminal and "NO_COLOR" not in os.environ) + "\n"
    if target is None or not written(target, text):
        click.echo(text, nl=False)
