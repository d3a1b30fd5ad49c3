"""What is known of a model without running it: bytes of its weights, and which a token reads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featherweight.anatomy import build
from featherweight.anatomy.asked import Asked, own_dtype
from featherweight.errors import UnsupportedError
from featherweight.recipe import Recipe
from featherweight.tensors import EXPERTS, held_tensors

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_target_positions")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


class Facts:
    """Of one model, from its config; models are built on the meta device."""

    def __init__(self, asked: Asked) -> None:
        self.name, self.config = asked.model, asked.config
        self._read = build.read_config(self.config)
        self.own_task = build.task_of(self._read)
        self.task = asked.task or self.own_task
        self.notes: list[str] = []

    @property
    def versions(self) -> dict[str, str]:
        """Of the libraries whose classes are built."""
        import transformers

        return {"torch": torch.__version__, "transformers": transformers.__version__}

    @property
    def two_sided(self) -> bool:
        """Whether it encodes first and then decodes."""
        return bool(getattr(self._read, "is_encoder_decoder", False))

    @property
    def writes(self) -> bool:
        """Whether it writes text, token by token."""
        return self.task in ("causal-lm", "seq2seq", "speech-seq2seq")

    @property
    def longest(self) -> int | None:
        """Tokens that the model was made for; None where the config does not say."""
        text = self._read.get_text_config()
        found = (getattr(text, name, None) for name in _LENGTHS)
        return next((length for length in found if length), None)

    @cached_property
    def has_fast_path(self) -> bool:
        """Whether the fast path knows the architecture."""
        from featherweight.fastpath.known import inner_of

        try:
            inner_of(self._plain)
        except UnsupportedError:
            return False
        return True

    def weights(self, recipe: Recipe, rows: int) -> tuple[int, int | None]:
        """Bytes of all weights under a recipe, and of those read for one token in each of `rows`.

        The latter is None where it cannot be told. Raises as `build`.
        """
        model = self._built(recipe)
        return _nbytes(model), self._decoded(model, rows)

    def loading(self, recipe: Recipe) -> int:
        """Bytes that loading needs besides the finished weights.

        What the recipe changes is changed tensor by tensor, and the pages of the mapped file are
        given back: two tensors as stored, at most. What it leaves stays a view of its file. But a
        gguf file is read whole, into float32, before anything is made of it.
        """
        new = dict(_named(self._built(recipe)))
        changed = [old for name, old in _named(self._plain) if not _alike(old, new.get(name))]
        largest = max((tensor.nbytes for tensor in changed), default=0)
        if self._is_gguf:
            return max(0, _nbytes(self._plain) + largest - self.weights(recipe, 1)[0])
        return 2 * largest

    @property
    def _is_gguf(self) -> bool:
        path = Path(self.name).expanduser()
        in_folder = path.is_dir() and not (path / "config.json").is_file()
        return path.suffix == ".gguf" or (in_folder and len(list(path.glob("*.gguf"))) == 1)

    @cached_property
    def _plain(self) -> Any:
        """As stored."""
        return self._built(Recipe.parse(own_dtype(self.config)))

    def _built(self, recipe: Recipe) -> Any:
        # read again each time: building sets the config's dtype
        return build.build(build.read_config(self.config), recipe, self.task).model

    def _decoded(self, model: Any, rows: int) -> int | None:
        """All but an untied input embedding; of experts as many as tokens can choose."""
        if self.two_sided:
            parts = [model.get_decoder(), model.get_output_embeddings()]
            return _nbytes([part for part in parts if part is not None])
        inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
        tied = outputs is None or inputs.weight is outputs.weight
        read = _nbytes(model) - (0 if tied else _nbytes(inputs))
        text = self._read.get_text_config()
        count = next((n for name in EXPERTS if (n := getattr(text, name, None))), None)
        if not count:
            return read
        chosen = next((n for name in _CHOSEN if (n := getattr(text, name, None))), None)
        experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
        if not chosen or not experts:
            self._note(f"which of the {count} experts a token reads is not known")
            return None
        most = min(count, rows * chosen)
        self._note(f"of {count} experts, {most} are read for a step")
        return int(read - _nbytes(experts) * (1 - most / count))

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters by the names that they have without adapters."""
    for name, parameter in model.named_parameters():
        yield name.replace(".base_layer.", "."), parameter


def _alike(old: torch.Tensor, new: torch.Tensor | None) -> bool:
    return new is not None and (new.dtype, new.shape) == (old.dtype, old.shape)


def _nbytes(root: nn.Module | list[Any]) -> int:
    """Bytes of every tensor reachable, each once."""
    return sum(tensor.nbytes for tensor in held_tensors(root))
