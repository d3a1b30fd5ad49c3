"""Options that several commands share."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from featherweight.cli.options import Duration, Numbers, Size, model_options


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("5m", 300), ("1h30m", 5400), ("1.5", 1.5), ("1h2m3.5s", 3723.5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["", "m", "5x", "-5", "1m1h", "1.5h", "five"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write 90s, 5m or 1h30m"):
        Duration().convert(text, None, None)


@pytest.mark.parametrize(("text", "numbers"), [("1", (1,)), ("1,8", (1, 8)), ("8, 1", (8, 1))])
def test_lists_of_numbers_keep_their_order(text: str, numbers: tuple[int, ...]) -> None:
    assert Numbers().convert(text, None, None) == numbers


@pytest.mark.parametrize("text", ["", "1,", "a", "1,1", "0", "-1", "1.5"])
def test_what_is_no_list_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Numbers().convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1343MiB", 1343 * 2**20),
        ("12GiB", 12 * 2**30),
        ("8GB", 8 * 10**9),
        ("1.5 gib", 3 * 2**29),
        ("2TiB", 2**41),
        ("64kB", 64_000),
        ("314572800", 314_572_800),
    ],
)
def test_sizes_are_bytes(text: str, nbytes: int) -> None:
    assert Size().convert(text, None, None) == nbytes


@pytest.mark.parametrize("text", ["", "12G", "-5MiB", "1.5", "MiB", "5x", "1,5GiB", "nanGiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="write 1343MiB, 12GiB, 8GB or bytes"):
        Size().convert(text, None, None)


def test_model_options_have_their_defaults() -> None:
    @click.command()
    @model_options
    def command(**options: object) -> None:
        click.echo(sorted(options.items()))

    result = CliRunner().invoke(command, ["--device", "cuda:0", "--threads", "3"])
    assert result.output.strip() == str(
        [
            ("device", "cuda:0"),
            ("revision", None),
            ("threads", 3),
            ("trust_remote_code", False),
        ]
    )
    assert CliRunner().invoke(command, ["--threads", "0"]).exit_code == 2
