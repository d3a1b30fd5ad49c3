"""Hidden folders beside a target: marked while in use, cleared away when a run was killed."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def beside(folder: Path) -> Iterator[Path]:
    """A new hidden folder next to this one, in use until the block ends; then it is removed.

    Another process may take it for abandoned before it is marked as in use: then a next one.
    """
    with ExitStack() as marks:
        while True:
            path = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
            path.mkdir()
            with suppress(FileNotFoundError):
                marks.enter_context(held(path))
            if path.exists():
                break
        try:
            yield path
        finally:
            _remove(path)  # what was not put in place, or what was there before


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Mark a folder as in use. The system takes the mark away when this process dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # no locks here: nothing will be taken for abandoned either
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _taken_over(folder: Path) -> Iterator[bool]:
    """Whether no living process holds it, and while the block lasts no other can.

    A lock tells; a process id may be another's by now.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            abandoned = False
        else:
            abandoned = True
        yield abandoned
    finally:
        os.close(descriptor)


def clear_up(folder: Path) -> None:
    """Bring back what a crash between two renames hid, and remove what killed runs left."""
    ours = re.compile(rf"\.{re.escape(folder.name)}\.\d+-[0-9a-f]{{8}}\.(tmp|old)")
    for path in [path for path in folder.parent.iterdir() if ours.fullmatch(path.name)]:
        with _taken_over(path) as abandoned:
            if not abandoned:
                continue
            if path.suffix == ".old" and not folder.exists():
                path.rename(folder)
                continue
            with suppress(OSError):  # another process was faster, or it is another user's
                # Not as .old: what is half removed must never be brought back.
                _remove(path.rename(path.with_suffix(".tmp")))


def _remove(folder: Path) -> None:
    """Remove a folder of ours; a warning says if it stays, since what was asked for is done."""
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.exists(folder):
        warnings.warn(f"'{folder}' is of no more use, but cannot be removed", stacklevel=7)
