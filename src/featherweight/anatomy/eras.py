"""What older versions did differently with memory: to understand old figures."""

from __future__ import annotations

import re
from dataclasses import dataclass

from featherweight.errors import FeatherweightError


@dataclass(frozen=True)
class Era:
    """A version of torch, and its habits."""

    version: tuple[int, int]

    @classmethod
    def of(cls, version: str) -> Era:
        """The era of a version such as `2.3` or `1.10.2`; FeatherweightError for what is none."""
        found = _numbers(version)
        if not found:
            raise FeatherweightError(
                f"'{version}' is no version of torch", hint="write it as 2.3 or 1.10"
            )
        return cls(found)

    @property
    def zeroes_gradients(self) -> bool:
        """`zero_grad()` filled gradients with zeros, and so kept them, until 2.0."""
        return self.version < (2, 0)

    @property
    def softmax_keeps_input(self) -> bool:
        """softmax saved its input for backward beside its output, until 1.11."""
        return self.version < (1, 11)

    @property
    def holds_workspace(self) -> bool:
        """cuBLAS gets its workspace from torch's allocator since 1.13; before, from CUDA itself."""
        return self.version >= (1, 13)

    @property
    def steps_at_once(self) -> bool:
        """Optimizers work on all tensors at once by default (`foreach`) since 2.0."""
        return self.version >= (2, 0)

    @property
    def prefers_cudnn(self) -> bool:
        """Attention by cuDNN comes first on Hopper and Blackwell since 2.10 (pytorch#169849)."""
        return self.version >= (2, 10)


def generate_holds_outputs(transformers: str) -> bool:
    """`generate` kept the outputs of a pass, logits and cache, during the next one until 4.42."""
    return (_numbers(transformers) or (0, 0)) < (4, 42)


def generate_copies_logits(transformers: str) -> bool:
    """`generate` copied the logits of all positions to look at the last, in 4.45 and 4.46."""
    return (4, 45) <= (_numbers(transformers) or (0, 0)) < (4, 47)


def _numbers(version: str) -> tuple[int, int] | None:
    """Major and minor of a version such as `2.13.0+cpu`; None where it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None
