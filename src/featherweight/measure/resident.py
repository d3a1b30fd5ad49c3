"""Peak resident memory of this process while something runs.

Anonymous memory (the process's own) and file-backed memory (pages of a mapped checkpoint, which
the system can take back) are given apart: a mapped model otherwise looks free, or double.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, replace
from types import TracebackType

import psutil
import torch

from featherweight.measure.result import PeakMemory
from featherweight.native import libc

INTERVAL = 0.005  # seconds between samples
CPU = torch.device("cpu")
# Of malloc, in bytes: glibc's first value, and the one it settles at in programs like these.
MEASURED_THRESHOLD, USUAL_THRESHOLD = 128 << 10, 32 << 20


@dataclass(frozen=True)
class Resident:
    """Bytes resident now; `anonymous` and `file` are None where the system does not tell."""

    total: int
    anonymous: int | None = None
    file: int | None = None
    cuda: int | None = None  # in use on the device, by all processes


def floor(device: torch.device) -> Resident:
    """What is resident before something is watched, without what the heap merely keeps."""
    libc.malloc_trim()
    return resident(device)


def resident(device: torch.device) -> Resident:
    """Resident memory of this process, and use of its GPU."""
    cuda = _cuda_used(device) if device.type == "cuda" else None
    if sys.platform != "linux":
        return Resident(psutil.Process().memory_info().rss, cuda=cuda)
    status = _status()
    anonymous = status["RssAnon"]
    file = status["RssFile"] + status["RssShmem"]
    return Resident(anonymous + file, anonymous, file, cuda)


def _status() -> dict[str, int]:
    with open("/proc/self/status") as lines:
        pairs = (line.split(":", 1) for line in lines if line.startswith(("Rss", "VmHWM")))
        return {key: int(value.split()[0]) * 1024 for key, value in pairs}


def _cuda_used(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


class Watch:
    """A block of code whose peak memory is wanted, above the `floor()` given.

    A thread samples both kinds of memory; on Linux the total is the kernel's own high-water mark,
    which misses nothing. Meanwhile freed blocks go back to the system at once, so that peaks are of
    memory in use and not of what the heap happens to keep.
    """

    def __init__(self, floor: Resident, device: torch.device) -> None:
        self.floor = floor
        self._device = device
        self._peak = floor
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        libc.malloc_trim()
        libc.set_mmap_threshold(MEASURED_THRESHOLD)
        self._exact = _reset_high_water()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()
        self._take()
        if self._exact:
            total = max(_status()["VmHWM"], self._peak.total)
            self._peak = replace(self._peak, total=total)
        libc.set_mmap_threshold(USUAL_THRESHOLD)

    def _sample(self) -> None:
        while not self._done.wait(INTERVAL):
            self._take()

    def _take(self) -> None:
        now, peak = resident(CPU), self._peak
        self._peak = replace(
            peak,
            total=max(now.total, peak.total),
            anonymous=_larger(now.anonymous, peak.anonymous),
            file=_larger(now.file, peak.file),
        )

    @property
    def peak(self) -> PeakMemory:
        """Peaks above the floor, in bytes; torch's own on a GPU are from zero."""
        on_gpu = self._device.type == "cuda"
        return PeakMemory(
            total=max(0, self._peak.total - self.floor.total),
            anonymous=_above(self._peak.anonymous, self.floor.anonymous),
            file=_above(self._peak.file, self.floor.file),
            cuda_allocated=torch.cuda.max_memory_allocated(self._device) if on_gpu else None,
            cuda_reserved=torch.cuda.max_memory_reserved(self._device) if on_gpu else None,
            cuda_process=_above(resident(self._device).cuda, self.floor.cuda),
        )


def _reset_high_water() -> bool:
    """Let VmHWM start anew from here; False where that is not possible."""
    if sys.platform != "linux":
        return False
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _larger(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


def _above(peak: int | None, floor: int | None) -> int | None:
    return None if peak is None or floor is None else max(0, peak - floor)
