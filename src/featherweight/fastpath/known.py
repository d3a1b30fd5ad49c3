"""The architectures that the fast path knows, found from the files of this package."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache
from typing import Any

from featherweight import fastpath
from featherweight.errors import UnsupportedError
from featherweight.fastpath.block import Block


@cache
def blocks() -> dict[str, Block]:
    """By the name of the inner model's class."""
    found: dict[str, Block] = {}
    for info in pkgutil.iter_modules(fastpath.__path__):
        module = importlib.import_module(f"{fastpath.__name__}.{info.name}")
        block = getattr(module, "BLOCK", None)
        if isinstance(block, Block):
            found |= dict.fromkeys(block.classes, block)
    return found


def inner_of(model: Any) -> tuple[Any, Block]:
    """The decoder in a model, and what its block is.

    Raises UnsupportedError that names the nearest known architecture and how to add another.
    """
    for module in model.modules():
        block = blocks().get(type(module).__name__)
        if block is not None and type(module).__module__.startswith("transformers."):
            return module, block
    name = type(getattr(model, "base_model", model)).__name__
    near = difflib.get_close_matches(name, blocks(), n=1, cutoff=0)
    raise UnsupportedError(
        f"the fast path does not know {name}; the nearest it knows is {near[0]}",
        hint="describe its block in a file of featherweight/fastpath, as llama.py does",
    )
