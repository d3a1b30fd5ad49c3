"""What a dry run saw: every block of memory, when it came and went, and what it was for.

Times are numbers of events, in order; sizes are bytes as the program asked for them, before any
allocator rounds them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

# In the order in which they are drawn and listed; what nothing else claims is temporary.
CATEGORIES = (
    "weights",
    "gradients",
    "optimizer state",
    "saved activations",
    "logits and loss",
    "KV cache",
    "workspace",
    "inputs",
    "temporaries",
    "rounding",
)
TEMPORARY = "temporaries"
ROUNDING = "rounding"  # what an allocator hands out beyond what was asked for


@dataclass(slots=True)
class Block:
    """One storage. `category` is the most lasting use it was put to."""

    nbytes: int
    category: str
    module: str  # dotted name of the module whose forward or backward made it
    operation: str
    born: int
    died: int = -1  # -1: alive at the end


@dataclass
class Trace:
    """Blocks, and the order of their births and deaths."""

    blocks: list[Block] = field(default_factory=list)
    # +1 + index of a block that is born, -1 - index of one that dies
    events: list[int] = field(default_factory=list)
    phases: list[tuple[int, str]] = field(default_factory=list)  # event where it begins, name

    def phase_at(self, event: int) -> str:
        """Name of the phase that an event belongs to."""
        at = bisect_right(self.phases, event, key=lambda phase: phase[0]) - 1
        return self.phases[at][1] if at >= 0 else ""

    def sizes(self) -> np.ndarray:
        """Bytes that each event adds (takes away: negative), int64 [events]."""
        sizes = np.array([block.nbytes for block in self.blocks], dtype=np.int64)
        events = np.array(self.events, dtype=np.int64)
        return np.sign(events) * sizes[np.abs(events) - 1] if len(events) else events

    def allocated(self) -> np.ndarray:
        """Bytes allocated after each event, int64 [events]."""
        return np.cumsum(self.sizes())

    def by_category(self) -> dict[str, np.ndarray]:
        """Bytes of each category after each event, int64 [events]."""
        sizes = self.sizes()
        kinds = [block.category for block in self.blocks]
        of = np.array([kinds[abs(event) - 1] for event in self.events])
        return {
            name: np.cumsum(np.where(of == name, sizes, 0))
            for name in CATEGORIES
            if name in set(kinds)
        }

    def alive(self, event: int) -> list[Block]:
        """Blocks that are allocated after an event."""
        return [b for b in self.blocks if b.born <= event and (b.died < 0 or b.died > event)]


@dataclass(frozen=True)
class Holder:
    """What holds memory: blocks of one category that one kind of operation made in one module."""

    category: str
    module: str
    operation: str
    nbytes: int
    count: int


def holders(blocks: list[Block]) -> list[Holder]:
    """Blocks grouped by where they were made, the largest first; layers of a stack together."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for block in blocks:
        groups[block.category, _without_numbers(block.module), block.operation].append(block.nbytes)
    found = [Holder(*key, nbytes=sum(sizes), count=len(sizes)) for key, sizes in groups.items()]
    return sorted(found, key=lambda holder: -holder.nbytes)


def _without_numbers(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
