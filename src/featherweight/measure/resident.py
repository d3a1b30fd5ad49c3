"""Peak resident memory of this process while something runs.

Anonymous memory (the process's own) and file-backed memory (pages of a mapped checkpoint, which
the system can take back) are given apart: a mapped model otherwise looks free, or double.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from types import TracebackType

import psutil
import torch

from featherweight.measure.result import PeakMemory

INTERVAL = 0.005  # seconds between samples


@dataclass(frozen=True)
class Resident:
    """Bytes resident now; `anonymous` and `file` are None where the system does not tell."""

    total: int
    anonymous: int | None = None
    file: int | None = None


def resident() -> Resident:
    """Resident memory of this process."""
    if sys.platform != "linux":
        return Resident(psutil.Process().memory_info().rss)
    status = _status()
    anonymous = status["RssAnon"]
    file = status["RssFile"] + status["RssShmem"]
    return Resident(anonymous + file, anonymous, file)


def _status() -> dict[str, int]:
    with open("/proc/self/status") as lines:
        pairs = (line.split(":", 1) for line in lines if line.startswith(("Rss", "VmHWM")))
        return {key: int(value.split()[0]) * 1024 for key, value in pairs}


class Watch:
    """A block of code whose peak memory is wanted, above the floor `Resident` given.

    A thread samples both kinds of memory; on Linux the total is the kernel's own high-water mark,
    which misses nothing.
    """

    def __init__(self, floor: Resident) -> None:
        self.floor = floor
        self._peak = floor
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watch:
        self._exact = _reset_high_water()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
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
            self._peak = Resident(
                max(_status()["VmHWM"], self._peak.total), self._peak.anonymous, self._peak.file
            )

    def _sample(self) -> None:
        while not self._done.wait(INTERVAL):
            self._take()

    def _take(self) -> None:
        now = resident()
        self._peak = Resident(
            max(now.total, self._peak.total),
            _larger(now.anonymous, self._peak.anonymous),
            _larger(now.file, self._peak.file),
        )

    @property
    def peak(self) -> PeakMemory:
        """Peaks above the floor, in bytes; CUDA's are of the device, from zero."""
        cuda = torch.cuda.is_available()
        return PeakMemory(
            total=max(0, self._peak.total - self.floor.total),
            anonymous=_above(self._peak.anonymous, self.floor.anonymous),
            file=_above(self._peak.file, self.floor.file),
            cuda_allocated=torch.cuda.max_memory_allocated() if cuda else None,
            cuda_reserved=torch.cuda.max_memory_reserved() if cuda else None,
            cuda_process=_cuda_process() if cuda else None,
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


def _cuda_process() -> int:
    """Bytes of GPU memory in use as nvidia-smi counts: contexts and other processes included."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def _larger(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)


def _above(peak: int | None, floor: int | None) -> int | None:
    return None if peak is None or floor is None else max(0, peak - floor)
