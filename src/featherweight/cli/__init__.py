"""The command line: one file a command, imported only when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

import click

from featherweight import __version__
from featherweight.errors import FeatherweightError

COMMANDS = {
    "compare": "Measure recipes side by side: memory, speed, quality.",
    "generate": "Continue a prompt, streaming, with speed and memory at the end.",
    "fit": "Find recipes, contexts and batches that fit into a memory, and what to run.",
    "memory": "Predict from the config alone what a model needs, and where it goes.",
    "profile": "Show where the time goes: operations under this machine's roofline.",
    "quantize": "Write a lighter checkpoint that anyone can read.",
    "merge": "Merge an adapter into its base, and write a plain checkpoint.",
    "env": "Show what was found: versions, processor, native library, bandwidth, GPUs.",
}


class Lazy(click.Group):
    """Knows its commands by name and help line; imports one when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"featherweight.cli.{name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            meant = f"did you mean '{near[0]}'? " if near else ""
            raise click.UsageError(
                f"no command '{args[0]}'; {meant}allowed: {', '.join(COMMANDS)}", ctx
            )
        return super().resolve_command(ctx, args)


@click.group(cls=Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-v", "--version", message="featherweight %(version)s")
def cli() -> None:
    """See what a transformer weighs, make it lighter and faster here, and prove that it still says
    the same.

    \b
    Examples:
      featherweight compare smollm2-135m
      featherweight compare ./my-model fp32 bf16 bnb-nf4:double+flash --budget 5m
      featherweight generate smollm2-135m "The capital of France is"
    """


def main() -> None:
    """Run the command line; errors are one line, tracebacks only with FEATHERWEIGHT_DEBUG=1."""
    try:
        status = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        if isinstance(error, click.exceptions.NoArgsIsHelpError):
            error.show()
            sys.exit(error.exit_code)
        _complain(error.format_message(), error)
        sys.exit(error.exit_code)
    except FeatherweightError as error:
        _complain(str(error), error)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:  # a bug, which the user still gets as one line
        _complain(f"unexpected {type(error).__name__}: {error}", error)
        click.echo("set FEATHERWEIGHT_DEBUG=1 for the traceback, and please report it", err=True)
        sys.exit(70)
    sys.exit(status if isinstance(status, int) else 0)


def _complain(message: str, error: Exception) -> None:
    if os.environ.get("FEATHERWEIGHT_DEBUG") == "1":
        traceback.print_exception(error, file=sys.stderr)
    click.echo(f"featherweight: {' '.join(message.split())}", err=True)
