"""What attention keeps at growing length: the score matrix of eager, or what flash keeps instead.

Flash attention (Dao et al., arXiv 2205.14135) never writes the scores down: besides its result it
keeps one number a row, the logarithm of the sum of exponentials.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

LENGTHS = (512, 2048, 8192, 32_768, 131_072)


@dataclass(frozen=True)
class Scores:
    """Bytes that one layer's attention holds at one length."""

    tokens: int
    eager: int  # scores [B, H, S, S]
    flash: int  # logsumexp f32 [B, H, S] and the result [B, H, S, D]

    def to_json(self) -> dict[str, int]:
        """As JSON types."""
        return asdict(self)


def scores(
    heads: int, head_dim: int, itemsize: int, lengths: Iterable[int], batch_size: int = 1
) -> list[Scores]:
    """One layer's attention at each length; `itemsize` is that of the model's dtype in bytes.

    The score matrix is counted once. While eager's softmax runs it holds two, or more where it
    computes in float32.
    """
    rows = batch_size * heads
    return [
        Scores(n, rows * n * n * itemsize, rows * n * (4 + head_dim * itemsize)) for n in lengths
    ]


def heads_of(config: Any) -> tuple[int, int] | None:
    """(heads, head_dim) of a transformers config; None where it names none."""
    text = config.get_text_config()
    heads, hidden = (getattr(text, n, None) for n in ("num_attention_heads", "hidden_size"))
    if not isinstance(heads, int) or not isinstance(hidden, int):
        return None
    return heads, getattr(text, "head_dim", None) or hidden // heads
