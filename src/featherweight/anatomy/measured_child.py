"""One workload for real, in a process of its own: `python -m featherweight.anatomy.measured_child`.

A request comes as JSON on standard input, the answer goes as the last line of standard output. The
model is the config's, with random weights: memory does not depend on their values.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from featherweight.anatomy import build, program
from featherweight.anatomy.eras import Era
from featherweight.anatomy.high_water import HighWater
from featherweight.anatomy.now import used_on_gpu
from featherweight.anatomy.tracker import Tracker
from featherweight.anatomy.work import Work
from featherweight.errors import FeatherweightError, MissingExtraError, ModelError
from featherweight.ledger import apply
from featherweight.measure import resident
from featherweight.measure.resident import MEASURED_THRESHOLD, Watch
from featherweight.native import libc
from featherweight.recipe import Recipe


class Untracked:
    """Stands where the program wants a tracker: nothing comes between it and torch."""

    def label(self, tensors: Iterable[Any], category: str) -> None:
        """Nothing to say."""

    def phase(self, name: str) -> None:
        """Nothing to begin."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Nothing around an optimizer's step."""
        yield


class RealTracker(Tracker):
    """The tracker on real tensors: every operation runs, and answers for itself."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, name)
        return out


Run = Callable[[Any], float]  # takes a tracker, gives seconds


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Build the model, run the workload, and measure it in one of two ways; bytes and seconds.

    `in_use`: peaks of memory in use, as far as a process can tell, and then of tensors alone;
    otherwise those of a process that nobody prepared, and on a GPU those of its allocator.
    """
    work, recipe = Work.of(request["work"]), Recipe.parse(request["recipe"])
    device = torch.device(request["device"])
    _import_what_is_needed(recipe)
    _warm_up(device)
    if request["in_use"]:
        libc.set_mmap_threshold(MEASURED_THRESHOLD)  # what building frees is gone as well
    before = resident.floor(device)
    config = build.read_config(request["config"])
    task = request["task"] or build.task_of(config)
    attention, _ = build.attention_of(recipe)
    dtype = build.dtype_of(config, recipe)
    model: Any = build.construct(config, task, dtype, attention, device)
    apply(model, recipe, reversible=False)
    gc.collect()

    def run(tracker: Any) -> float:
        start = time.perf_counter()
        try:
            with device:  # where the program makes its inputs
                _run(model, work, task, tracker)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                raise MemoryError(_first_line(error)) from error
            raise ModelError(
                f"{type(model).__name__} cannot run {work.described()}:"
                f" {type(error).__name__}: {_first_line(error)}",
                hint="check the task and the lengths; FEATHERWEIGHT_DEBUG=1 shows where",
            ) from error
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return _in_use(model, run, before) if request["in_use"] else _as_it_comes(run, before, device)


def _in_use(model: Any, run: Run, before: resident.Resident) -> dict[str, Any]:
    with Watch(before, resident.CPU) as watch:
        run(Untracked())
    gc.collect()
    tracker = RealTracker()
    with tracker:
        tracker.phase("load")
        tracker.watch(model)
        run(tracker)
    return {"resident": watch.peak.total, "allocated": int(tracker.trace.allocated().max())}


def _as_it_comes(run: Run, before: resident.Resident, device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        seconds = run(Untracked())
        return {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
            "process": used_on_gpu(device),
            "seconds": seconds,
        }
    watched = HighWater()
    seconds = run(Untracked())
    peak = watched.peak
    return {"reserved": peak - before.total, "process": peak, "seconds": seconds}


def _run(model: Any, work: Work, task: str, tracker: Any) -> None:
    if work.kind == "generate" and work.new_tokens:
        _generate(model, work, tracker)
        return
    on_gpu = next(model.parameters()).device.type == "cuda"
    program.run(model, work, task, tracker, Era.of(torch.__version__), on_gpu=on_gpu)


def _generate(model: Any, work: Work, tracker: Any) -> None:
    """`model.generate`, as users call it: greedy or beams, exactly so many tokens."""
    model.eval()
    tracker.phase("generate")
    shape = (work.batch_size, work.prompt_tokens)
    if getattr(model.config, "is_encoder_decoder", False):
        given = program._encoder_inputs(model, *shape)
    else:
        mask = torch.ones(shape, dtype=torch.int64)
        mask[0, : int(work.padding * work.prompt_tokens)] = 0  # on the left, as for generation
        given = {"input_ids": torch.zeros(shape, dtype=torch.int64), "attention_mask": mask}
    model.generate(
        **given,
        min_new_tokens=work.new_tokens,
        max_new_tokens=work.new_tokens,
        num_beams=work.num_beams,
        do_sample=False,
        pad_token_id=0,
    )


def _import_what_is_needed(recipe: Recipe) -> None:
    """Libraries count as the process's, not as the model's."""
    from transformers import AutoModelForCausalLM, Trainer  # noqa: F401

    for technique in recipe:
        if technique.extra:
            try:
                importlib.import_module(technique.extra)
            except ImportError:
                raise MissingExtraError(technique.extra, technique.extra, f"'{recipe}'") from None


def _warm_up(device: torch.device) -> None:
    """Threads and contexts are made at the first product, forward and backward."""
    one = torch.ones(64, 64, device=device, requires_grad=True)
    (one @ one).sum().backward()


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _reason(error: Exception) -> str:
    """One line that says what failed."""
    if isinstance(error, FeatherweightError):
        return str(error)
    if isinstance(error, MemoryError):
        return f"out of memory: {_first_line(error) or 'an allocation failed'}"
    return f"{type(error).__name__}: {_first_line(error)}"


def main() -> None:
    """Answer the one request."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    with suppress(OSError):  # if memory runs out, let the system end this process, not another
        Path("/proc/self/oom_score_adj").write_text("1000")
    said: dict[str, Any]
    try:
        said = {"ok": answer(json.load(sys.stdin))}
    except Exception as error:  # every failure becomes an answer
        said = {"error": _reason(error)}
        traceback.print_exc()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
