"""Predicted against published memory: `python benchmarks/memory_published.py FILE.csv [--only ID]`.

FILE has the columns id, model, task, transformers, settings, dtype, attn, batch, seq, optimizer,
device, measured, unit, kind, source. Each row is predicted by a dry run under the transformers of
its day (installed once, into the cache) with the habits of its torch. Nothing is fitted: a row is
read as words (below), and what its words do not say is taken as the programs of the time did it.
"""

from __future__ import annotations

import csv
import re
import sys
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import click

from featherweight.anatomy import gpus
from featherweight.anatomy.asked import ask as put
from featherweight.anatomy.result import Memory
from featherweight.errors import FeatherweightError

UNITS = {"MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6, "GB": 10**9, "B": 1}
OLDEST = (4, 23)  # older ones have no wheels of tokenizers for today's Pythons
RELEASES = {  # the last of a minor version, where a row names that alone
    "4.23": "4.23.1", "4.33": "4.33.3", "4.40": "4.40.2", "4.41": "4.41.2", "4.42": "4.42.4",
    "4.43": "4.43.3",
}  # fmt: skip
DTYPES = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "fp16-amp": "fp32", "bf16-amp": "fp32"}
QUANTISED = {
    "int8": "fp16+bnb-int8",
    "fp4": "fp16+bnb-fp4:compute=fp16",
    "nf4": "bf16+bnb-nf4:compute=bf16",
    "nf4:double": "bf16+bnb-nf4:double:compute=bf16",
}
# What the words of a row do not say.
PROMPT_LONG = 3000  # tokens of the tutorial's system prompt, ten times
GENERATED = 100  # new tokens where transformers' benchmark of attention lets a language model write


@dataclass
class Asked:
    """A row as keywords of `fw.memory`, and what must be said of the reading."""

    model: str
    recipe: str
    keywords: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    halved: bool = False

    def predict(self, cuda_context: int | None) -> Memory:
        """The dry run, as `fw.memory` does it."""
        question = put(self.model, self.recipe, cuda_context=cuda_context, **self.keywords)
        return replace(question, work=replace(question.work, halved=self.halved)).predict()


def ask(row: dict[str, str]) -> Asked:
    """Read a row; FeatherweightError where it is of no model that can be traced."""
    notes: list[str] = []
    words = row["settings"].lower()
    quantised = QUANTISED.get(row["dtype"])
    recipe = quantised or DTYPES.get(row["dtype"]) or row["dtype"]
    recipe += f"+{row['attn'] or 'eager'}"
    if "lora" in words:
        recipe += _lora(words)
    if "checkpoint" in words and "no checkpoint" not in words:
        recipe += "+checkpointing"
    keywords: dict[str, Any] = {"gpu": _gpu(row["device"]), "task": _task(row["model"])}
    keywords |= _work(row, words, notes)
    torch = re.search(r"torch (\d+\.\d+)", row["transformers"])
    keywords["torch_version"] = torch[1] if torch else None
    keywords["transformers"] = _release(row["transformers"], notes)
    if quantised or (row["attn"] in ("sdpa", "flash") and _before(keywords["transformers"], 4, 36)):
        keywords["transformers"] = None
        notes.append("traced under the transformers at hand: that version has no such layers")
    halved = row["task"] == "forward" and row["dtype"] == "fp16"
    return Asked(_model(row["model"]), recipe, keywords, notes, halved)


def _gpu(device: str) -> str:
    """Where a name fits boards of two sizes, the smaller: a prediction does not depend on it."""
    return next((name for name in gpus.names() if name.startswith(f"{device.lower()}-")), device)


def _lora(words: str) -> str:
    """Rank and targets; PEFT's own for decoders like Llama, where a row names no other."""
    rank = re.search(r"\br(?:ank)?[ =]*(\d+)", words)
    everywhere = re.search(r"all.linear|qlora|all layers", words)
    return f"+lora:r={rank[1] if rank else 8}" + ("" if everywhere else ":target=q_proj,v_proj")


def _work(row: dict[str, str], words: str, notes: list[str]) -> dict[str, Any]:
    batch = int(row["batch"] or 1)
    if row["task"] == "generate":
        tokens = re.search(r"(\d+) new", words)
        prompt = int(row["seq"]) if row["seq"].isdigit() else PROMPT_LONG
        if row["seq"] and not row["seq"].isdigit():
            notes.append(f"prompt taken as {PROMPT_LONG:,} tokens: the source does not count them")
        return {
            "batch_size": batch,
            "prompt_tokens": prompt if row["seq"] else 512,
            "new_tokens": int(tokens[1]) if tokens else 128,
        }
    asked: dict[str, Any] = {"batch_size": batch, "seq_len": int(row["seq"])}
    if row["task"] == "forward":
        return _inference(row, asked)
    accumulate = re.search(r"accumulation (\d+)", words)
    asked |= {
        "train": True,
        "accumulate": int(accumulate[1]) if accumulate else 1,
        "optimizer": _optimizer(row),
        "mixed_precision": row["dtype"].removesuffix("-amp") if "-amp" in row["dtype"] else None,
    }
    if "logits.sum" in words or (row["optimizer"] in ("", "none")):
        asked["loss"] = "logits.sum"  # how the benchmarks of attention in transformers do it
    if "up to" in words:
        asked["padding"] = 0.1  # a batch of texts of different lengths has a mask
    return asked


def _inference(row: dict[str, str], asked: dict[str, Any]) -> dict[str, Any]:
    """How transformers' benchmark of attention does it: a model that can generates, another
    reads, in a loop that holds its outputs; both after `model.to(torch.float16)`.

    The code is that of a branch: its layers are of the release that it came with, its `generate`
    of the one before, which held outputs until 4.42.
    """
    if _task(row["model"]) != "causal-lm":
        return asked | {"forward": True, "outputs": "held"}
    return {
        "batch_size": asked["batch_size"],
        "prompt_tokens": asked["seq_len"],
        "new_tokens": GENERATED,
        "outputs": "held" if _named(row["transformers"])[0] < (4, 43) else "dropped",
    }


def _optimizer(row: dict[str, str]) -> str:
    """`adamw` was transformers' own until 4.30, and is torch's in programs without Trainer."""
    if row["optimizer"] in ("", "none"):
        return "none"
    if row["optimizer"] != "adamw":
        return row["optimizer"]
    old = tuple(int(part) for part in re.findall(r"\d+", row["transformers"])[:2]) < (4, 30)
    return "adamw_hf" if old else "adamw_torch"


def _model(words: str) -> str:
    """The name at the front: `bigcode/octocoder`, `bert-base-uncased with LM head`."""
    return words.split()[0]


def _task(words: str) -> str | None:
    for part, task in (
        ("sequence classification", "sequence-classification"),
        ("causal", "causal-lm"),
        ("masked", "masked-lm"),
        ("lm head", "causal-lm"),
        ("encoder", "encoder"),
    ):
        if part in words.lower():
            return task
    return None


def _release(words: str, notes: list[str]) -> str | None:
    """The newest version that a row names, as one that pip can install; None: the one at hand."""
    named = _named(words)
    if not named:
        return None
    newest = named[-1]
    if newest < OLDEST:
        notes.append("traced under 4.23.1: older ones cannot be installed for this Python")
        newest = OLDEST
    version = ".".join(map(str, newest))
    return version if len(newest) == 3 else RELEASES.get(version, f"{version}.0")


def _named(words: str) -> list[tuple[int, ...]]:
    """The versions of transformers that a row names, oldest first."""
    found = re.findall(r"(?<![\d.])([45]\.\d+(?:\.\d+)?)", words.partition("(")[0])
    return sorted(tuple(int(part) for part in version.split(".")) for version in found)


def _before(version: str | None, *than: int) -> bool:
    return version is not None and tuple(int(p) for p in version.split(".")[:2]) < than


def _context(rows: list[dict[str, str]]) -> dict[str, int]:
    """Bytes of the CUDA context by device, where the file has a row that measured it alone."""
    return {row["device"]: int(_bytes(row)) for row in rows if row["task"] == "context"}


def _bytes(row: dict[str, str]) -> float:
    return float(row["measured"]) * UNITS[row["unit"]]


def predict(row: dict[str, str], contexts: dict[str, int]) -> tuple[int, list[str]]:
    """Bytes of the kind that the row has, and notes."""
    if row["task"] == "load":
        return _predict_load(row, contexts)
    asked = ask(row)
    found = asked.predict(contexts.get(row["device"]))
    kind = row["kind"] if row["kind"] in ("allocated", "reserved", "process") else "allocated"
    notes = asked.notes + ([] if kind == row["kind"] else ["kind unclear: allocated is shown"])
    return getattr(found.peak, kind), notes


def _predict_load(row: dict[str, str], contexts: dict[str, int]) -> tuple[int, list[str]]:
    asked = ask(row | {"task": "forward", "batch": "1", "seq": "8", "attn": "eager"})
    found = asked.predict(contexts.get(row["device"]))
    return found.categories["weights"] + found.base, ["weights and context"]


@click.command()
@click.argument("file", type=click.File())
@click.option("--only", multiple=True, help="An id, or the beginning of some.")
def main(file: Any, only: tuple[str, ...]) -> None:
    """Print predicted against published for each row of FILE, and what the errors come to."""
    rows = list(csv.DictReader(file))
    contexts = _context(rows)
    errors: dict[str, list[float]] = {}
    print("| id | kind | published | predicted | error | |\n|:--|:--|--:|--:|--:|:--|")
    for row in rows:
        if row["task"] == "context" or (only and not row["id"].startswith(only)):
            continue
        published = _bytes(row)
        try:
            predicted, notes = predict(row, contexts)
        except FeatherweightError as error:
            asked = f"{row['measured']} {row['unit']}"
            print(f"| {row['id']} | {row['kind']} | {asked} | – | – | {error} |")
            continue
        error = predicted / published - 1
        errors.setdefault(row["kind"], []).append(abs(error))
        unit = UNITS[row["unit"]]
        print(
            f"| {row['id']} | {row['kind']} | {published / unit:,.5g} {row['unit']} |"
            f" {predicted / unit:,.5g} | {error:+.2%} | {'; '.join(notes)} |",
            flush=True,
        )
    for kind, values in errors.items():
        print(f"\n{kind}: n = {len(values)}, median {median(values):.2%}, worst {max(values):.2%}")


if __name__ == "__main__":
    sys.exit(main())
