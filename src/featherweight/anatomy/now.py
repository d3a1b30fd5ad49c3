"""`memory_now`: what this process occupies at this moment."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from featherweight.measure.resident import CPU, resident
from featherweight.tensors import held


@dataclass(frozen=True)
class OnGpu:
    """Bytes of one GPU: tensors, what torch's allocator holds for them, and the whole process."""

    device: str
    allocated: int
    reserved: int
    process: int  # of all processes where the driver does not tell them apart


@dataclass(frozen=True)
class Now:
    """Bytes resident in main memory, and on each GPU that this process uses.

    `anonymous` is the process's own, `file` is of mapped files, such as a checkpoint's, which the
    system can take back; both are None where it does not tell them apart. `model` is what a model
    holds, each storage once, `mapped` the part of it that is a view of a file; None without one.
    """

    resident: int
    anonymous: int | None
    file: int | None
    gpus: list[OnGpu]
    model: int | None = None
    mapped: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def __str__(self) -> str:
        from featherweight.report.words import size

        parts = [f"process {size(self.resident)}"]
        if self.anonymous is not None and self.file is not None:
            parts[0] += f" ({size(self.anonymous)} its own, {size(self.file)} of files)"
        if self.model is not None:
            mapped = f" ({size(self.mapped)} mapped from a file)" if self.mapped else ""
            parts.append(f"model {size(self.model)}{mapped}")
        for gpu in self.gpus:
            parts.append(
                f"{gpu.device}: allocated {size(gpu.allocated)}, reserved {size(gpu.reserved)},"
                f" process {size(gpu.process)}"
            )
        return "; ".join(parts)


def memory_now(model: Any = None, *, quiet: bool = False) -> Now:
    """Print what is occupied right now by this process, and by a model where one is given.

    The same is returned as data; `quiet` prints nothing.

    Only GPUs on which torch has begun to work are asked: asking another would occupy it.
    """
    here = resident(CPU)
    found = held(model) if model is not None else None
    now = Now(
        resident=here.total,
        anonymous=here.anonymous,
        file=here.file,
        gpus=[_on(device) for device in _devices()],
        model=found.total if found else None,
        mapped=found.mapped if found else None,
    )
    if not quiet:
        print(now)
    return now


def _devices() -> list[torch.device]:
    if not torch.cuda.is_initialized():
        return []
    every = (torch.device("cuda", number) for number in range(torch.cuda.device_count()))
    return [device for device in every if torch.cuda.memory_reserved(device)]


def _on(device: torch.device) -> OnGpu:
    return OnGpu(
        device=str(device),
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
        process=used_on_gpu(device),
    )


def used_on_gpu(device: torch.device) -> int:
    """Bytes of this process on a GPU, as nvidia-smi has them; of all processes without NVML."""
    with suppress(Exception):  # no NVML, or in a container, where process ids are others
        import pynvml  # type: ignore[import-not-found, unused-ignore]

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
