"""`featherweight quantize`."""

from __future__ import annotations

from pathlib import Path

import click

from featherweight.cli.options import model_options


@click.command("quantize")
@click.argument("model")
@click.argument("recipe")
@click.option(
    "--output", "-o", required=True, type=click.Path(path_type=Path), help="Folder to write."
)
@click.option(
    "--max-shard-size", default="5GB", show_default=True, help="Largest file, such as 900MB."
)
@click.option("--detail", is_flag=True, help="What was done to each module, as JSON to stdout.")
@model_options
def command(
    model: str,
    recipe: str,
    output: Path,
    max_shard_size: str,
    detail: bool,
    threads: int | None,
    device: str | None,
    trust_remote_code: bool,
    revision: str | None,
) -> None:
    """Write MODEL, made lighter by RECIPE, as a checkpoint that anyone can read.

    int8, nf4 and fp4 become bitsandbytes checkpoints: transformers with bitsandbytes, PEFT and vLLM
    load them without Featherweight.

    \b
    Examples:
      featherweight quantize ./my-model nf4:double -o ./my-model-nf4
      featherweight quantize ./my-model bf16+int8:skip=score -o ./my-model-int8
    """
    import json

    import torch
    import transformers

    from featherweight.saving import quantize

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if threads:
        torch.set_num_threads(threads)
    receipt, size = quantize(
        model,
        recipe,
        output,
        max_shard_size=max_shard_size,
        device=device,
        trust_remote_code=trust_remote_code,
        revision=revision,
    )
    if detail:
        click.echo(json.dumps(receipt.to_json(), indent=1))
    click.echo(str(receipt), err=True)
    click.echo(f"{output}: {size / 2**20:,.1f} MiB of weights", err=detail)
