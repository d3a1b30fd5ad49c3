"""What is predicted: one workload, as data that goes to another process and into JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from featherweight.anatomy import optimizers
from featherweight.errors import FeatherweightError

LOSSES = (None, "logits.sum")
MIXED = (None, "fp16", "bf16")
OUTPUTS = (None, "held", "dropped")


@dataclass(frozen=True)
class Work:
    """A training step, a generation, or a forward pass.

    `seq_len` is of training and forward passes, `prompt_tokens` and `new_tokens` of generation.
    """

    kind: str  # "train", "generate" or "forward"
    batch_size: int = 1
    seq_len: int = 512
    padding: float = 0.0  # share of positions that are padding; above 0 a mask is passed
    optimizer: str = "adamw"
    loss: str | None = None  # None: the model's own, of labels
    mixed_precision: str | None = None
    accumulate: int = 1
    max_grad_norm: float | None = 1.0
    prompt_tokens: int = 512
    new_tokens: int = 128
    num_beams: int = 1
    outputs: str | None = None  # of a pass, until those of the next are there; None: as is usual
    halved: bool = False  # by `model.half()` once it was loaded, which casts every buffer too

    def __post_init__(self) -> None:
        for name in ("batch_size", "seq_len", "accumulate", "prompt_tokens", "num_beams"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise FeatherweightError(
                    f"{name} is {value!r}", hint="give a whole number from 1 upwards"
                )
        if not isinstance(self.new_tokens, int) or self.new_tokens < 0:
            raise FeatherweightError(
                f"new_tokens is {self.new_tokens!r}", hint="give a whole number from 0 upwards"
            )
        if not 0 <= self.padding < 1:
            raise FeatherweightError(
                f"padding is {self.padding!r}", hint="give 0, or a share of positions below 1"
            )
        if self.loss not in LOSSES:
            raise FeatherweightError(
                f"loss is '{self.loss}'", hint="allowed: logits.sum; or none: the model's own"
            )
        if self.mixed_precision not in MIXED:
            raise FeatherweightError(
                f"mixed_precision is '{self.mixed_precision}'", hint="allowed: fp16, bf16, or none"
            )
        if self.outputs not in OUTPUTS:
            raise FeatherweightError(
                f"outputs is '{self.outputs}'", hint="allowed: held, dropped, or none: as is usual"
            )
        optimizers.check(self.optimizer)

    def described(self) -> str:
        """The workload in a few words."""
        return self._described() + (f", outputs {self.outputs}" if self.outputs else "")

    def _described(self) -> str:
        if self.kind == "generate":
            beams = f", {self.num_beams} beams" if self.num_beams > 1 else ""
            return (
                f"generation, batch {self.batch_size}, {self.prompt_tokens:,} prompt and"
                f" {self.new_tokens:,} new tokens{beams}"
            )
        size = f"batch {self.batch_size} × {self.seq_len:,} tokens"
        if self.kind == "forward":
            return f"forward pass, {size}"
        parts = [f"training, {size}"]
        if self.accumulate > 1:
            parts.append(f"{self.accumulate} steps accumulated")
        if self.mixed_precision:
            parts.append(f"{self.mixed_precision} mixed precision")
        parts.append("no optimizer" if self.optimizer == "none" else self.optimizer)
        return ", ".join(parts)

    @classmethod
    def of(cls, data: dict[str, Any]) -> Work:
        """The inverse of `dataclasses.asdict`."""
        return cls(**data)
