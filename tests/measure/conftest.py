"""Models in this process, and texts, for the tests of what measures them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from featherweight.measure.text import read_text
from featherweight.models import Loaded, load


@pytest.fixture(scope="session")
def llama(tiny_llama: Path) -> Loaded:
    """The tiny Llama, loaded once; not to be changed."""
    return load(str(tiny_llama))


@pytest.fixture(scope="session")
def bert(tiny_bert: Path) -> Loaded:
    """The tiny BERT, loaded once; not to be changed."""
    return load(str(tiny_bert))


@pytest.fixture(scope="session")
def text() -> str:
    """Some real text."""
    return read_text(None).text


@pytest.fixture(scope="session")
def noisy() -> Callable[[Path], Loaded]:
    """`noisy(folder)`: the model with every weight a little off, as a quantised one has them."""

    @torch.no_grad()
    def build(folder: Path) -> Loaded:
        loaded = load(str(folder))
        generator = torch.Generator().manual_seed(1)
        for parameter in loaded.model.parameters():
            off = torch.randn(parameter.shape, generator=generator) * 0.02
            parameter.data = parameter + off
        return loaded

    return build


@pytest.fixture
def calls(llama: Loaded, bert: Loaded) -> Iterator[list[Any]]:
    """Of every forward pass of the tiny models: shape of the input, and the output."""
    seen: list[Any] = []

    def note(model: Any, args: Any, inputs: dict[str, Any], output: Any) -> None:
        seen.append((tuple(inputs["input_ids"].shape), output))

    hooks = [loaded.model.register_forward_hook(note, with_kwargs=True) for loaded in (llama, bert)]
    yield seen
    for hook in hooks:
        hook.remove()
