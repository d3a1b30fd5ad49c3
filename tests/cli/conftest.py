"""The command line as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    status: int
    out: str
    errors: str

    @property
    def complaint(self) -> str:
        """The one line on stderr that is no progress."""
        lines = [line for line in self.errors.splitlines() if not line.startswith("[")]
        assert len(lines) == 1, self.errors
        return lines[0]


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """`python -m featherweight …`, with pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", "featherweight", *map(str, arguments)],
        env=os.environ | {"COLUMNS": "150"} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background of a shell ignores it, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def run(*arguments: object, **environment: str) -> Done:
    """Run a command to its end."""
    process = start(*arguments, **environment)
    out, errors = process.communicate()
    return Done(process.returncode, out, errors)


@pytest.fixture(name="start", scope="session")
def start_fixture() -> Callable[..., Any]:
    """`start(*arguments, **environment)`: a running command."""
    return start


@pytest.fixture(name="run", scope="session")
def run_fixture() -> Callable[..., Done]:
    """`run(*arguments, **environment)`: status, stdout and stderr."""
    return run


@pytest.fixture(scope="session")
def run_all() -> Callable[[dict[str, tuple[Any, ...]]], dict[str, Done]]:
    """Run commands by name, two at a time: most of their time goes into imports."""
    from concurrent.futures import ThreadPoolExecutor

    one_thread = {"OMP_NUM_THREADS": "1"}

    def run_each(commands: dict[str, tuple[Any, ...]]) -> dict[str, Done]:
        with ThreadPoolExecutor(2) as pool:
            done = {}
            for name, arguments in commands.items():
                given = [a for a in arguments if not isinstance(a, dict)]
                environment = next((a for a in arguments if isinstance(a, dict)), {})
                done[name] = pool.submit(run, *given, **one_thread | environment)
            return {name: future.result() for name, future in done.items()}

    return run_each
