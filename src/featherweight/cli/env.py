"""`featherweight env`: what was found here, and what could be added."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

_GIB = 1 << 30

# What there is to say about one subject: (label, text) pairs.
Lines = Iterator[tuple[str, str]]


@click.command("env", epilog="Example: featherweight env --format json")
@click.option(
    "--format",
    "form",
    type=click.Choice(["human", "json"]),
    default="human",
    show_default=True,
    help="How to print it.",
)
@click.option("--refresh", is_flag=True, help="Measure again what the cache already knows.")
def command(form: str, refresh: bool) -> None:
    """Show versions, processor, native library, measured rates, GPUs."""
    from rich.console import Console

    with Console(stderr=True).status("Measuring this machine: a few seconds, once …"):
        found = collect(refresh)
    if form == "json":
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _print(found)


def collect(refresh: bool = False) -> dict[str, Any]:
    """Everything that the command shows, as JSON types."""
    from dataclasses import asdict

    from featherweight import machine, native
    from featherweight.paths import cache_dir
    from featherweight.versions import EXTRAS, version, versions

    missing = {
        package: f"pip install 'featherweight[{extra}]'"
        for extra, packages in EXTRAS.items()
        for package in packages
        if version(package) is None
    }
    return {
        "versions": versions(),
        "missing": missing,
        "machine": machine.describe().to_json(),
        "native": asdict(native.status()) | {"bitsandbytes": _backend()},
        "rates": machine.probe(refresh).to_json(),
        "cache": str(cache_dir()),
    }


def _backend() -> str:
    """Whether bitsandbytes' layers would run on our kernels; does not import bitsandbytes."""
    import os

    from featherweight import native
    from featherweight.integrations.bitsandbytes import VARIABLE
    from featherweight.versions import version

    asked = os.environ.get(VARIABLE) == "1"
    if version("bitsandbytes") is None:
        return "not installed"
    if not native.status().available:
        return f"its own kernels{f', though {VARIABLE}=1' if asked else ''}: there are no others"
    if asked:
        return f"these kernels, by {VARIABLE}=1"
    return f"its own kernels; these with {VARIABLE}=1 or 'import featherweight.bitsandbytes'"


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    sections = {
        "Versions": _version_lines(found),
        "Machine": _machine_lines(found["machine"]),
        "Native library": _native_lines(found["native"]),
        "Measured": _rate_lines(found["rates"]),
        "Files": iter([("cache", found["cache"])]),
    }
    for title, lines in sections.items():
        table.add_row(Text(title, style="bold"))
        for label, text in lines:
            table.add_row(Text(f"  {label}"), Text(text))
    Console().print(table)


def _version_lines(found: dict[str, Any]) -> Lines:
    yield from found["versions"].items()
    for package, install in found["missing"].items():
        yield package, f"not installed: {install}"


def _machine_lines(machine: dict[str, Any]) -> Lines:
    yield "system", f"{machine['system']}, {machine['architecture']}"
    yield "processor", machine["cpu"]
    yield "features", " ".join(machine["features"]) or "not known"
    yield (
        "cores",
        f"{machine['physical_cores'] or '?'} physical, {machine['logical_cores']} logical, "
        f"{machine['usable_cores']:g} usable; torch uses {machine['torch_threads']}",
    )
    yield (
        "memory",
        f"{machine['memory_total'] / _GIB:.1f} GiB, "
        f"{machine['memory_available'] / _GIB:.1f} GiB available",
    )
    cache = machine["last_level_cache"]
    yield "last-level cache", f"{cache / (1 << 20):.0f} MiB" if cache else "not known"
    for dtype in ("bf16", "fp16"):
        fast = machine[f"has_fast_{dtype}"]
        yield f"{dtype} on CPU", "in hardware" if fast else "by way of fp32: saves memory, not time"
    for gpu in machine["gpus"]:
        memory = f"{gpu['memory'] / _GIB:.1f} GiB"
        yield "GPU", f"{gpu['name']}, {memory}, capability {gpu['capability']}"
    if not machine["gpus"]:
        yield "GPU", "none that torch can use"


def _native_lines(status: dict[str, Any]) -> Lines:
    if not status["available"]:
        yield "not available", status["error"]
        yield "meanwhile", "everything runs on torch alone, slower"
        return
    chosen = f"forced by FEATHERWEIGHT_ISA={status['forced']}" if status["forced"] else "chosen"
    yield "instruction set", f"{status['isa']} ({chosen})"
    yield "built for", " ".join(status["built"])
    yield "this CPU runs", " ".join(status["detected"])
    yield "threads", "torch's OpenMP pool" if status["openmp"] else "one: built without OpenMP"
    yield "compiler", status["compiler"]
    yield "file", status["path"]
    yield "bitsandbytes", status["bitsandbytes"]


def _rate_lines(rates: dict[str, Any]) -> Lines:
    for threads, rate in rates["bandwidth"].items():
        yield f"read, {threads} thread{'s' * (threads != '1')}", _rate(rate)
    for kind in ("fp32", "int8"):
        if rates[kind]:
            yield f"{kind} arithmetic", _rate(rates[kind])
    origin = "from the cache; --refresh measures again" if rates["from_cache"] else "just now"
    yield "how", f"by {rates['source']}, {rates['working_set'] / (1 << 20):.0f} MiB read, {origin}"
    for note in rates["notes"]:
        yield "note", note


def _rate(rate: dict[str, Any]) -> str:
    """`26.4 GB/s (25.6–27.0, cv 2.0 %, n = 9)`."""
    cv = 100 * rate["sd"] / (sum(rate["samples"]) / len(rate["samples"]))
    spread = f"{rate['low']:.1f}–{rate['high']:.1f}, cv {cv:.1f} %, n = {len(rate['samples'])}"
    return f"{rate['value']:.1f} {rate['unit']} ({spread})"
