"""The most that this process had in main memory since a moment, with nothing else changed.

`measure.resident.Watch` makes malloc give memory back at once, which shows what is in use but is no
process that a user has, and slows it down.
"""

from __future__ import annotations

import sys
import threading
import weakref

from featherweight.measure import resident
from featherweight.measure.resident import CPU, INTERVAL


class HighWater:
    """Begins when it is made. On Linux the kernel's own mark, begun anew; else sampled."""

    def __init__(self) -> None:
        self.before = resident.resident(CPU).total
        self._exact = sys.platform == "linux" and resident._reset_high_water()
        self._sampled = [self.before]
        if not self._exact:
            done = threading.Event()
            weakref.finalize(self, done.set)  # the thread knows nothing of this object
            threading.Thread(target=_sample, args=(self._sampled, done), daemon=True).start()

    @property
    def peak(self) -> int:
        """Resident bytes at most until now."""
        _take(self._sampled)
        return max(self._sampled[0], resident._status()["VmHWM"] if self._exact else 0)


def _sample(peak: list[int], done: threading.Event) -> None:
    while not done.wait(INTERVAL):
        _take(peak)


def _take(peak: list[int]) -> None:
    peak[0] = max(peak[0], resident.resident(CPU).total)
