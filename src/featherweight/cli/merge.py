"""`featherweight merge`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("merge")
@click.argument("base")
@click.argument("adapter", type=click.Path(path_type=Path))
@click.option(
    "--output", "-o", required=True, type=click.Path(path_type=Path), help="Folder to write."
)
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "fp16", "fp32"]),
    help="Of the merged weights. [default: that of the base]",
)
@click.option(
    "--verify", is_flag=True, help="Compare outputs with those of base and adapter first."
)
@click.option("--revision", help="Branch, tag or commit of a hub id.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the checkpoint.")
def command(
    base: str,
    adapter: Path,
    output: Path,
    dtype: str | None,
    verify: bool,
    revision: str | None,
    trust_remote_code: bool,
) -> None:
    """Merge ADAPTER, a folder written by PEFT, into BASE, and write a plain dense checkpoint.

    A quantised BASE is dequantised first.

    \b
    Example:
      featherweight merge smollm2-135m ./my-adapter -o ./merged --verify --dtype bf16
    """
    import logging

    import transformers

    from featherweight.merge import merge

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which PEFT imports if it is there
    merged = merge(
        base,
        adapter,
        output,
        dtype=dtype,
        verify=verify,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    click.echo(f"{merged.folder}: {merged.dtype}, adapter merged into {merged.modules} modules")
    if merged.verified:
        checks = ", ".join(f"{side} {value:.2g}" for side, value in merged.verified.items())
        click.echo(f"verified, relative difference of outputs: {checks}")
    for note in merged.notes:
        click.echo(f"note: {note}", err=True)
