"""A callback of transformers' `Trainer` that says what training took: time, and memory of what.

    Trainer(…, callbacks=[FeatherweightMemory()])

Weights, gradients and optimizer state are looked at where they are; what is left of the peak is
activations and everything else that comes and goes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import TrainerCallback

from featherweight.anatomy.high_water import HighWater
from featherweight.anatomy.now import used_on_gpu
from featherweight.tensors import held


@dataclass(frozen=True)
class TrainingMemory:
    """What `Trainer.train` took: seconds, and bytes on its device.

    `peak` is the sum of `before`, `gradients`, `optimizer_state` and `rest`: on a CPU the whole
    process, on a GPU its tensors. `before` is what was there when training began, the weights among
    it. Gradients come one by one, so that at the peak `rest` may hold more than is said, and they
    less.
    """

    device: str
    seconds: float
    steps: int
    samples_per_second: float | None  # of all processes together
    peak: int
    before: int
    weights: int
    gradients: int
    optimizer_state: int
    rest: int  # activations, temporaries, and what the allocator keeps
    reserved: int | None  # by torch's allocator of a GPU
    process: int  # as the system monitor or nvidia-smi shows it; on a GPU after training

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        from featherweight.report.words import size

        speed = f", {self.samples_per_second:.3g} samples/s" if self.samples_per_second else ""
        of = "of tensors" if self.reserved is not None else "of the process"
        lines = [
            f"Training took {self.seconds:.1f} s for {self.steps} steps{speed}",
            f"Peak memory {of} on {self.device}: {size(self.peak)}",
            f"  {'before training':<24}{size(self.before):>10}"
            f"  (of it weights {size(self.weights)})",
            f"  {'gradients':<24}{size(self.gradients):>10}",
            f"  {'optimizer state':<24}{size(self.optimizer_state):>10}",
            f"  {'activations and the rest':<24}{size(self.rest):>10}",
        ]
        if self.reserved is not None:
            lines.append(f"Reserved {size(self.reserved)}, process {size(self.process)}")
        return "\n".join(lines)


class FeatherweightMemory(TrainerCallback):
    """Prints after training, once, what it took; `summary` keeps the figures, in every process.

    When training begins, peaks are reset: of torch's GPU allocator, or of the process (on Linux).
    """

    summary: TrainingMemory | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Begin to watch."""
        self.summary = None
        self._first_step = state.global_step
        self._gradients = self._optimizer_state = 0
        device = torch.device(args.device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        else:
            self._high_water = HighWater()

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **given: Any
    ) -> None:
        """Look at the gradients while all are there."""
        there = [p.grad for p in model.parameters() if p.grad is not None]
        self._gradients = max(self._gradients, held(there).total)

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **given: Any
    ) -> None:
        """Look at what the optimizer keeps."""
        kept = list(optimizer.state.values())
        self._optimizer_state = max(self._optimizer_state, held(kept).total)

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **given: Any
    ) -> None:
        """Sum up, and print in the main process."""
        self.summary = self._summed_up(torch.device(args.device), state, model)
        if state.is_world_process_zero:
            print(self.summary)

    def _summed_up(self, device: torch.device, state: Any, model: Any) -> TrainingMemory:
        reserved = None
        if device.type == "cuda":
            peak, before = torch.cuda.max_memory_allocated(device), self._before
            reserved, process = torch.cuda.max_memory_reserved(device), used_on_gpu(device)
        else:
            peak, before = self._high_water.peak, self._high_water.before
            process = peak
            del self._high_water
        rest = peak - before - self._gradients - self._optimizer_state
        logs = [log for log in state.log_history if "train_runtime" in log]
        logged: dict[str, Any] = logs[-1] if logs else {}
        return TrainingMemory(
            device=str(device),
            seconds=logged.get("train_runtime", float("nan")),
            steps=state.global_step - self._first_step,
            samples_per_second=logged.get("train_samples_per_second"),
            peak=peak,
            before=before,
            weights=held(model).total,
            gradients=self._gradients,
            optimizer_state=self._optimizer_state,
            rest=max(0, rest),
            reserved=reserved,
            process=process,
        )
