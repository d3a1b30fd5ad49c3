"""What a profile found: operations, their work and their time, and what was outside of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from featherweight.profiling.counting import BACKWARD, FORWARD
from featherweight.profiling.operations import GROUPS
from featherweight.profiling.roofline import COMPUTE, MEMORY, Roofline
from featherweight.profiling.scores import Scores

SCHEMA = 1


@dataclass(frozen=True)
class Work:
    """What some calls had to do, and the least and the measured time. Bytes, seconds."""

    calls: int
    flops: int
    read: int
    written: int
    attainable_s: float  # under the roofline, call by call
    bound: str  # "memory" or "compute": what most of `attainable_s` is spent on
    seconds: float  # median of the runs; of several ops, the sum of their medians
    samples: tuple[float, ...]  # seconds, one a run

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    @property
    def intensity(self) -> float | None:
        """FLOP/byte; None where nothing is moved."""
        return self.flops / self.moved if self.moved else None

    def to_json(self) -> dict[str, Any]:
        """The fields and what follows from them, as JSON types."""
        more = {"moved": self.moved, "intensity": self.intensity}
        return asdict(self) | {"samples": list(self.samples)} | more


def total(works: Sequence[Work]) -> Work:
    """All of them together; times add up run by run."""
    least = {
        bound: sum(work.attainable_s for work in works if work.bound == bound)
        for bound in (MEMORY, COMPUTE)
    }
    return Work(
        calls=sum(work.calls for work in works),
        flops=sum(work.flops for work in works),
        read=sum(work.read for work in works),
        written=sum(work.written for work in works),
        attainable_s=sum(least.values()),
        bound=COMPUTE if least[COMPUTE] > least[MEMORY] else MEMORY,
        seconds=sum(work.seconds for work in works),
        samples=tuple(map(sum, zip(*(work.samples for work in works), strict=True))),
    )


@dataclass(frozen=True)
class Operation:
    """All calls of one op in one phase."""

    phase: str  # "forward" or "backward"
    group: str  # one of `operations.GROUPS`
    name: str  # torch's own, such as "addmm"
    work: Work


@dataclass(frozen=True)
class Profile:
    """The operations of one pass through a model on one machine."""

    model: dict[str, Any]  # name, architecture, dtype, parameters, attention
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]  # recipe, pass, batch_size, seq_len, runs, threads, seed
    roofline: Roofline
    operations: list[Operation]  # the longest first
    wall: tuple[float, ...]  # seconds of the pass when nothing watches, one a run
    attention: list[Scores] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def total(self, phase: str | None = None, group: str | None = None) -> Work | None:
        """The work of a phase, of a group, of both or of all; None where there is none."""
        found = [
            operation.work
            for operation in self.operations
            if phase in (None, operation.phase) and group in (None, operation.group)
        ]
        return total(found) if found else None

    @property
    def seconds(self) -> float:
        """What shares are of: the pass when nothing watches; at least the sum of its operations."""
        return max(statistics.median(self.wall), self.operations_s)

    @property
    def operations_s(self) -> float:
        """Sum of the operations' median times."""
        return sum(operation.work.seconds for operation in self.operations)

    @property
    def outside_s(self) -> float:
        """Seconds outside of operations: Python, dispatch, views, autograd."""
        return self.seconds - self.operations_s

    def to_json(self) -> dict[str, Any]:
        """One document with every sample; shares are of `seconds`."""
        own = {name: getattr(self, name) for name in ("model", "machine", "versions", "settings")}
        groups = []
        for phase in (FORWARD, BACKWARD):
            for group in GROUPS:
                work = self.total(phase, group)
                if work:
                    names = {"phase": phase, "group": group}
                    groups.append(names | self._shared(work))
        rows = [
            {"phase": o.phase, "group": o.group, "name": o.name} | self._shared(o.work)
            for o in self.operations
        ]
        outside = {"seconds": self.outside_s, "share": self.outside_s / self.seconds}
        return {
            "schema": SCHEMA,
            **own,
            "roofline": self.roofline.to_json(),
            "seconds": self.seconds,
            "wall": list(self.wall),
            "groups": groups,
            "operations": rows,
            "outside": outside,
            "attention": [row.to_json() for row in self.attention],
            "notes": list(self.notes),
        }

    def _shared(self, work: Work) -> dict[str, Any]:
        return work.to_json() | {"share": work.seconds / self.seconds}

    def __str__(self) -> str:
        from featherweight.report.profile import render

        return render(self, "human")
