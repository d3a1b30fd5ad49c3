"""What a dry run found out, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from featherweight.anatomy.trace import Holder


@dataclass(frozen=True)
class Peak:
    """Bytes at most.

    `allocated`: tensors. `reserved`: what the allocator took from the device for them. `process`:
    what nvidia-smi shows, or on a CPU the system monitor.
    """

    allocated: int
    reserved: int
    process: int


@dataclass(frozen=True)
class Moment:
    """Bytes allocated at one time, whole and by category."""

    event: int
    phase: str
    allocated: int
    categories: dict[str, int]


@dataclass
class Memory:
    """The memory of one recipe on one workload and device."""

    model: str
    recipe: str
    workload: str
    device: str
    peak: Peak
    phase: str  # in which the peak is
    categories: dict[str, int]  # bytes at the peak
    phases: dict[str, int]  # peak of allocated bytes in each phase
    holders: list[Holder]  # what holds memory at the peak, largest first
    timeline: list[Moment]
    parameters: int
    base: int  # bytes of the process that are no tensors: CUDA context, or Python and libraries
    attention: list[str] = field(default_factory=list)  # kernels that ran
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain data; sizes are bytes."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Memory:
        """The inverse of `to_json`."""
        return cls(
            **data
            | {
                "peak": Peak(**data["peak"]),
                "holders": [Holder(**holder) for holder in data["holders"]],
                "timeline": [Moment(**moment) for moment in data["timeline"]],
            }
        )

    def __str__(self) -> str:
        from featherweight.report.memory import human

        return human(self)
