"""The command line itself: help without torch, one line for every error, exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import click
import pytest

from featherweight import __version__, cli
from featherweight.errors import FeatherweightError

WITHOUT_TORCH = """
import sys
from featherweight.cli import main
sys.argv = ["featherweight", *sys.argv[1:]]
try:
    main()
finally:
    assert not {"torch", "transformers", "numpy"} & set(sys.modules), "imported something heavy"
"""


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["featherweight", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], int]:
    """Run a command that raises; the exit status."""

    def run(error: BaseException) -> int:
        @click.command("env")
        def command() -> None:
            raise error

        monkeypatch.setattr(cli.Lazy, "get_command", lambda self, ctx, name: command)
        return main(monkeypatch, "env")

    return run


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([c, "-h"] for c in cli.COMMANDS)]
)
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_help_lists_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "--help") == 0
    out = capsys.readouterr().out
    for name, line in cli.COMMANDS.items():
        assert f"  {name} " in out
        assert line[:30] in out


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"featherweight {__version__}\n"


def test_without_a_command_the_help_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch) == 2
    assert "Commands:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["compre"],
            "no command 'compre'; did you mean 'compare'? allowed: compare, generate",
        ),
        (["xyz"], "no command 'xyz'; allowed: compare, generate"),
        (["compare"], "Missing argument 'MODEL'"),
        (["compare", "m", "--runs", "0"], "0 is not in the range x>=1"),
        (["compare", "m", "--budget", "soon"], "'soon' is no duration"),
        (["compare", "m", "--batch-size", "1,1"], "different numbers"),
        (["compare", "m", "--format", "xml"], "'xml' is not one of"),
        (["compare", "m", "--no-such-option"], "--no-such-option"),
        (["generate", "m"], "Missing argument 'PROMPT'"),
    ],
)
def test_bad_usage_is_one_line(
    arguments: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(monkeypatch, *arguments) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith("featherweight: ")
    assert says in errors
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (FeatherweightError("no\nmodel", hint="name one"), 2),
        (KeyboardInterrupt(), 130),
        (ValueError("odd"), 70),
    ],
    ids=["expected", "ctrl-c", "bug"],
)
def test_exit_codes(
    failing: Callable[[BaseException], int],
    error: BaseException,
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert failing(error) == status
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    if status == 2:
        assert errors == "featherweight: no model; name one\n"
    if status == 70:
        assert errors.startswith("featherweight: unexpected ValueError: odd\n")


def test_debug_shows_the_traceback(
    failing: Callable[[BaseException], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FEATHERWEIGHT_DEBUG", "1")
    assert failing(FeatherweightError("no")) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_reader_that_stops_early_is_no_error(start: Callable[..., Any]) -> None:
    process = start("--help")
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() in (0, 1)
    assert errors == ""
