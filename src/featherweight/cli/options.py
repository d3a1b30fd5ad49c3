"""Options that several commands share, spelled alike everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from featherweight.errors import FeatherweightError
from featherweight.sizes import parse_size

F = TypeVar("F", bound=Callable[..., Any])


class Duration(click.ParamType[float]):
    """`90`, `90s`, `5m`, `1h30m` → seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if isinstance(value, (int, float)):
            return float(value)
        found = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", value.strip())
        if not found or not any(found.groups()):
            self.fail(f"'{value}' is no duration; write 90s, 5m or 1h30m", param, ctx)
        hours, minutes, seconds = (float(part or 0) for part in found.groups())
        return hours * 3600 + minutes * 60 + seconds


class Numbers(click.ParamType[tuple[int, ...]]):
    """`1,8` → (1, 8)."""

    name = "n,n,…"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"'{value}' is no list of whole numbers such as 1,8", param, ctx)
        if len(set(numbers)) != len(numbers) or min(numbers) < 1:
            self.fail(f"'{value}': give different numbers from 1 upwards", param, ctx)
        return numbers


class Size(click.ParamType[int]):
    """`1343MiB`, `12GiB`, `8GB`, or a plain number of bytes → bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except FeatherweightError as error:
            self.fail(str(error), param, ctx)


def source_options(function: F) -> F:
    """How a model is found."""
    for decorate in (
        click.option("--revision", help="Branch, tag or commit of a hub id."),
        click.option(
            "--trust-remote-code", is_flag=True, help="Run code that comes with the checkpoint."
        ),
    ):
        function = decorate(function)
    return function


def model_options(function: F) -> F:
    """How a model is found and where it runs."""
    for decorate in (
        source_options,
        click.option(
            "--threads", type=click.IntRange(1), help="Threads of torch. [default: torch's own]"
        ),
        click.option("--device", help="Such as cpu or cuda:0. [default: cpu]"),
    ):
        function = decorate(function)
    return function
