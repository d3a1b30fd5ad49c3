"""`featherweight compare`."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from featherweight.cli.options import Duration, Numbers, model_options
from featherweight.cli.output import Line, writable, written
from featherweight.report import FORMATS


@click.command("compare")
@click.argument("model")
@click.argument("recipes", nargs=-1, metavar="[RECIPE]…")
@click.option("--prompt-tokens", "-p", default=512, show_default=True, type=click.IntRange(1))
@click.option("--new-tokens", "-n", default=64, show_default=True, type=click.IntRange(2))
@click.option(
    "--batch-size",
    "-b",
    type=Numbers(),
    default=None,
    help="Sequences at once; several by comma. [default: 1; encoders: 16]",
)
@click.option("--runs", "-r", default=5, show_default=True, type=click.IntRange(1), help="Rounds.")
@click.option("--budget", type=Duration(), help="Time for everything, such as 90s or 5m.")
@click.option(
    "--quality-tokens",
    default=2048,
    show_default=True,
    type=click.IntRange(0),
    help="Tokens of text to compare outputs on; 0: none.",
)
@click.option("--text", type=click.Path(), help="Text to measure on. [default: CPython's help]")
@click.option("--prompts", type=click.Path(), help="JSONL of prompts: outputs side by side.")
@click.option("--max-kld", type=float, help="Exit 1 if a recipe's KL divergence is above this.")
@click.option("--max-ppl-ratio", type=float, help="Exit 1 if a perplexity ratio is above this.")
@click.option("--seed", default=0, show_default=True, help="Of random tokens.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="human", show_default=True)
@click.option("--output", "-o", type=click.Path(), help="Write to this file, not to stdout.")
@model_options
def command(
    model: str,
    recipes: tuple[str, ...],
    batch_size: tuple[int, ...] | None,
    budget: float | None,
    form: str,
    output: str | None,
    **settings: Any,
) -> int:
    """Measure MODEL under each RECIPE; the first is the baseline.

    MODEL is a hub id, a folder, a gguf file, or smollm2-135m or minilm-l6. Without recipes: the
    checkpoint's own dtype, and what is worth knowing beside it.

    \b
    Recipes join techniques by +, options follow a colon:
      fp32  bf16  fp16  int8  nf4:double  fp4  eager  sdpa  flash  bnb-int8  bnb-nf4:double
      bf16+flash  nf4:double:head=int8+fastpath  int8:threshold=6:skip=score  bf16:compute=fp32

    \b
    Examples:
      featherweight compare smollm2-135m fp32 int8 nf4:double bnb-nf4:double --budget 5m
      featherweight compare ./model bf16 bnb-nf4 --max-kld 0.05 --format json -o result.json
    """
    target = writable(output)
    from featherweight.measure.compare import compare
    from featherweight.report import render

    with Line() as line:
        report = compare(
            model,
            recipes,
            batch_sizes=batch_size or (),
            budget_s=budget,
            progress=line.show,
            **settings,
        )
    terminal = target is None and sys.stdout.isatty()
    text = render(report, form, color=terminal and "NO_COLOR" not in os.environ) + "\n"
    if target is None or not written(target, text):
        click.echo(text, nl=False)
    if report.interrupted:
        return 130
    failed = report.rows and all(row.status == "failed" for row in report.rows)
    return 1 if report.gates or failed else 0
