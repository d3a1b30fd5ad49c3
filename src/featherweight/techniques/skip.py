"""Choosing modules by name: what `skip=` means in a recipe."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from featherweight.errors import RecipeError


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted module name, its end, or a module around it fits the fnmatch pattern.

    `lm_head`, `mlp.down_proj`, `model.layers.0` and `*.layers.[01].*` all do what they seem to.
    """
    parts = name.split(".")
    around = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return any(fnmatchcase(outer, p) for outer in around for p in (pattern, f"*.{pattern}"))


def skipped(model: nn.Module, patterns: Iterable[str]) -> set[str]:
    """Names of the modules that the patterns skip; RecipeError for one that fits nothing."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    found: set[str] = set()
    for pattern in patterns:
        hit = {name for name in names if matches(name, pattern)}
        if not hit:
            leaves = sorted({name.rpartition(".")[2] for name in names})
            raise RecipeError(
                f"skip={pattern} fits no module of the model",
                hint=f"names there are: {', '.join(leaves)[:300]}",
            )
        found |= hit
    return found
