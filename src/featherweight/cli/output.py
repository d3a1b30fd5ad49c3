"""Where a command's output goes: a file written whole or not at all, and progress on stderr."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import click

from featherweight.errors import FeatherweightError


def writable(output: str | None) -> Path | None:
    """The file to write, tried before anything is measured."""
    if output is None:
        return None
    path = Path(output)
    if path.is_dir() or not os.access(path.parent, os.W_OK) or not path.parent.is_dir():
        raise FeatherweightError(
            f"cannot write to '{path}'", hint="name a file in a folder that can be written to"
        )
    return path


def written(target: Path, text: str) -> bool:
    """Write the file whole or not at all; False, with a line on stderr, if that fails."""
    from featherweight.paths import write_atomic

    try:
        write_atomic(target, text.encode())
    except OSError as error:
        reason = error.strerror or error
        click.echo(f"cannot write to '{target}': {reason}; it follows here instead", err=True)
        return False
    click.echo(f"written to {target}", err=True)
    return True


def quiet() -> None:
    """No warnings of libraries among the hints."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    for name in ("bitsandbytes", "torch._subclasses.fake_tensor"):  # these log tracebacks, too
        logging.getLogger(name).setLevel(logging.CRITICAL)


class Line:
    """Progress on stderr: one line that changes, or a line a step where it is no terminal."""

    def __enter__(self) -> Line:
        self._start = time.monotonic()
        self._last = ""
        return self

    def show(self, doing: str, left: float | None) -> None:
        """Show a step and how long the rest may take."""
        if left is not None:
            doing += f" (about {_clock(left)} left)"
        if sys.stderr.isatty():
            text = f"[{_clock(time.monotonic() - self._start)}] {doing}"
            sys.stderr.write(f"\r\x1b[2K{text[: os.get_terminal_size(2).columns - 1]}")
            sys.stderr.flush()
        elif doing != self._last:
            click.echo(f"[{_clock(time.monotonic() - self._start)}] {doing}", err=True)
        self._last = doing

    def __exit__(self, *_: object) -> None:
        if sys.stderr.isatty() and self._last:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes}:{rest:02d}"
