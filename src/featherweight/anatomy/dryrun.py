"""Run a program on fake tensors, and read its memory off the trace."""

from __future__ import annotations

import importlib
import itertools
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from featherweight.anatomy import build, malloc, optimizers, program
from featherweight.anatomy.allocator import CachingAllocator
from featherweight.anatomy.attention import Kernels
from featherweight.anatomy.cuda import CudaFunctions, inside
from featherweight.anatomy.eras import Era
from featherweight.anatomy.gpus import Gpu
from featherweight.anatomy.result import Memory, Moment, Peak
from featherweight.anatomy.trace import ROUNDING, Trace, holders
from featherweight.anatomy.tracker import Tracker
from featherweight.anatomy.work import Work
from featherweight.errors import FeatherweightError, ModelError
from featherweight.recipe import Recipe

MOMENTS = 400  # of a timeline
HOLDERS = 60


def dry_run(
    name: str,
    config: dict[str, Any],
    recipe: Recipe,
    work: Work,
    *,
    task: str | None = None,
    gpu: Gpu | None = None,
    base: int = 0,
    era: Era | None = None,
) -> Memory:
    """Predict the memory of a workload; `base` bytes are the process's without any tensor.

    `era` is that of the torch at hand, unless another is asked for.

    Raises ModelError for a model that cannot be built or traced.
    """
    read = build.read_config(config)
    task = task or build.task_of(read)
    built = build.build(read, recipe, task)
    if work.halved:
        built.model.to(build.dtype_of(read, recipe))
    notes = _check_length(name, built.model, read, work)
    era = era or Era.of(torch.__version__)
    late = () if era.prefers_cudnn else ("cudnn",)
    kernels = Kernels(allowed=tuple(name for name in built.kernels if name not in late))
    trace = _traced(name, built.model, work, task, gpu, era, kernels)
    found = _memory(name, recipe, work, gpu, built.parameters, trace, base, kernels)
    return replace(found, notes=notes)


def _check_length(name: str, model: Any, config: Any, work: Work) -> list[str]:
    """Refuse lengths for which a model has no positions; a note for those that it was not made for.

    An encoder-decoder has positions for what it reads and for what it writes; sound is read in
    pieces of 30 seconds, whatever is asked.
    """
    if getattr(config, "is_encoder_decoder", False):
        if work.padding:
            raise FeatherweightError(
                f"'{name}' is an encoder-decoder, which is predicted without padding",
                hint="leave padding out",
            )
        read = 0 if hasattr(config, "num_mel_bins") else work.prompt_tokens
        tokens = max(read, work.new_tokens) if work.kind == "generate" else 0
        if work.kind != "generate" and not hasattr(config, "num_mel_bins"):
            tokens = work.seq_len
    else:
        tokens = work.prompt_tokens + work.new_tokens if work.kind == "generate" else work.seq_len
    most = build.positions(model)
    if most is not None and tokens > most:
        raise ModelError(
            f"'{name}' has {most:,} positions, and {tokens:,} tokens are asked for",
            hint="ask for fewer tokens",
        )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    made_for = getattr(text, "max_position_embeddings", None)
    if isinstance(made_for, int) and tokens > made_for:
        return [f"{tokens:,} tokens are more than the {made_for:,} that the config names"]
    return []


def _traced(
    name: str, model: Any, work: Work, task: str, gpu: Gpu | None, era: Era, kernels: Kernels
) -> Trace:
    tracker = Tracker(inside(gpu) if gpu else None, truth=not work.padding)
    half = program.MIXED.get(work.mixed_precision or "")
    # What this imports must not be made of fake tensors.
    work = replace(work, optimizer=optimizers.resolve(work.optimizer, era))
    importlib.import_module("transformers.optimization")
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(_as_if_real())
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            build.to_fake(model)
            stack.enter_context(tracker)
            if gpu:
                stack.enter_context(CudaFunctions(gpu, era, kernels, half))
            tracker.phase("load")
            tracker.watch(model)
            if gpu and era.holds_workspace:
                threads = 2 if work.kind == "train" else 1  # autograd multiplies in its own
                for _ in range(threads):
                    tracker.hold(gpu.workspace, "workspace", "cuBLAS")
            program.run(model, work, task, tracker, era, on_gpu=gpu is not None)
    except DataDependentOutputException as error:
        raise ModelError(
            f"'{name}' cannot be traced: its code asks for the value of a tensor ({error.func})",
            hint="measure it instead: --measure",
        ) from error
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        if isinstance(error, FeatherweightError):
            raise
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        raise ModelError(
            f"'{name}' cannot run {work.described()}: {type(error).__name__}: {first.strip()}",
            hint="check the task and the lengths; FEATHERWEIGHT_DEBUG=1 shows where",
        ) from error
    return tracker.trace


@contextmanager
def _as_if_real() -> Iterator[None]:
    """Keep transformers from taking fake tensors for `torch.export`'s.

    It would then make masks that it never makes while it runs, which choose another attention
    kernel. What it asks instead the tracker answers.
    """
    utils = importlib.import_module("transformers.utils.import_utils")
    before = getattr(utils, "is_fake_tensor", None)  # since transformers 5
    if before is None:
        yield
        return
    utils.is_fake_tensor = lambda tensor: False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.is_fake_tensor = before  # type: ignore[attr-defined]


def _replay(trace: Trace) -> tuple[np.ndarray, int]:
    """The same blocks in the same order through the CUDA caching allocator.

    Bytes allocated after each event, as `torch.cuda.memory_allocated` counts them: with what blocks
    have beyond what was asked for. And bytes reserved at most.
    """
    allocator = CachingAllocator()
    handles: dict[int, int] = {}
    allocated = []
    for event in trace.events:
        index = abs(event) - 1
        if event > 0:
            handles[index] = allocator.malloc(trace.blocks[index].nbytes)
        else:
            allocator.free(handles.pop(index))
        allocated.append(allocator.allocated)
    return np.array(allocated, dtype=np.int64), allocator.peak_reserved


def _memory(
    name: str,
    recipe: Recipe,
    work: Work,
    gpu: Gpu | None,
    parameters: int,
    trace: Trace,
    base: int,
    kernels: Kernels,
) -> Memory:
    series = trace.by_category()
    if gpu:
        allocated, reserved = _replay(trace)
        series[ROUNDING] = allocated - trace.allocated()
    else:
        allocated = trace.allocated()
        peak = int(allocated.max())
        reserved = max(peak, malloc.taken(trace, trains=work.kind == "train") or peak)
    at = int(allocated.argmax())
    return Memory(
        model=name,
        recipe=str(recipe),
        workload=work.described(),
        device=gpu.name if gpu else "cpu",
        peak=Peak(int(allocated[at]), reserved, reserved + base),
        phase=trace.phase_at(at),
        categories={key: int(values[at]) for key, values in series.items() if values[at]},
        phases=_phases(trace, allocated),
        holders=holders(trace.alive(at))[:HOLDERS],
        timeline=_timeline(trace, allocated, series, at),
        parameters=parameters,
        base=base,
        attention=kernels.used,
        versions=_versions(),
    )


def _phases(trace: Trace, allocated: np.ndarray) -> dict[str, int]:
    peaks: dict[str, int] = {}
    ends = [start for start, _ in trace.phases[1:]] + [len(allocated)]
    for (start, name), end in zip(trace.phases, ends, strict=True):
        if end > start:
            peaks[name] = max(peaks.get(name, 0), int(allocated[start:end].max()))
    return peaks


def _timeline(
    trace: Trace, allocated: np.ndarray, series: dict[str, np.ndarray], peak: int
) -> list[Moment]:
    """The highest point of each of `MOMENTS` stretches of time, so that no peak is lost."""
    edges = np.unique(np.linspace(0, len(allocated), MOMENTS + 1).astype(int))
    points = [
        int(start + allocated[start:end].argmax()) for start, end in itertools.pairwise(edges)
    ]
    return [
        Moment(
            event,
            trace.phase_at(event),
            int(allocated[event]),
            {name: int(values[event]) for name, values in series.items()},
        )
        for event in points
    ]


def _versions() -> dict[str, str]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}
