"""The limits that a container puts on this process (Linux control groups, version 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def cpu_quota() -> float | None:
    """Cores' worth of time that this process may use; None without a limit."""
    quotas = []
    for folder in _folders("cpu"):
        # "max 100000" or "200000 100000": microseconds in a period
        words = _read(folder / "cpu.max").split() or [
            _read(folder / "cpu.cfs_quota_us"),
            _read(folder / "cpu.cfs_period_us"),
        ]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory() -> tuple[int, int] | None:
    """Bytes allowed and bytes still free, at the tightest limit; None without a limit."""
    limits = []
    for folder in _folders("memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        used = _read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")
        if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:  # version 1's “no limit”
            # Cached file pages are given back when asked for. Version 1 counts the tree as total_.
            lines = [line.split() for line in _read(folder / "memory.stat").splitlines()]
            counts = {words[0]: int(words[1]) for words in lines if len(words) == 2}
            cached = counts.get("total_inactive_file", counts.get("inactive_file", 0))
            limits.append((int(limit), max(0, int(limit) - int(used) + cached)))
    return min(limits, key=lambda pair: pair[1], default=None)


def _folders(controller: str) -> Iterator[Path]:
    """This process' group and those above it, each of which may hold a limit."""
    for line in _read(_OWN).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = _ROOT / controllers if controllers else _ROOT
        group = base / path.lstrip("/")
        while group != base:
            yield group
            group = group.parent
        yield base


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
