"""How fast a machine reads memory and multiplies: measured, with spread, and kept in a cache.

Bandwidth is in GB/s (1e9 bytes) of a streaming read far beyond the last-level cache; arithmetic in
GFLOP/s or GOP/s, a multiply and an add counted as two.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from featherweight import __version__, native
from featherweight.machine import Machine
from featherweight.paths import cache_dir, write_atomic

_SCHEMA = 4
_MIN_SET, _MAX_SET = 256 << 20, 2 << 30  # bytes read in one sample
_BANDWIDTH_SECONDS = 2.4  # for all thread counts together
_ARITHMETIC_SECONDS = 0.5  # for each rate
_STEADY_CV = 0.15
_SAMPLES = 3, 9  # at least, at most
_CALL_SECONDS = 0.04  # of one sample of arithmetic


@dataclass(frozen=True)
class Rate:
    """A repeated measurement."""

    value: float  # median of `samples`
    unit: str
    sd: float  # sample standard deviation
    low: float
    high: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: list[float], unit: str) -> Rate:
        """At least two samples, summed up."""
        value, sd = statistics.median(samples), statistics.stdev(samples)
        return cls(value, unit, sd, min(samples), max(samples), tuple(samples))

    @property
    def cv(self) -> float:
        """Coefficient of variation: standard deviation over mean."""
        return self.sd / statistics.fmean(self.samples)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Rate:
        """What `dataclasses.asdict` made of one."""
        return cls(**data | {"samples": tuple(data["samples"])})


@dataclass(frozen=True)
class Rates:
    """What one machine can do, and how that was measured."""

    source: str  # "native", or "torch" where the native library is missing
    isa: str | None  # of the native library
    threads: int  # behind `fp32` and `int8`, and the most in `bandwidth`
    bandwidth: dict[int, Rate]  # by threads
    fp32: Rate
    int8: Rate | None  # None: torch has no int8 product worth the name
    working_set: int  # bytes
    notes: tuple[str, ...] = field(default=())
    from_cache: bool = False

    @property
    def peak_bandwidth(self) -> Rate:
        """The best of all thread counts."""
        return max(self.bandwidth.values(), key=lambda rate: rate.value)

    @property
    def steady(self) -> bool:
        """Whether the machine seems to have been idle: little spread, and threads that help."""
        rates = [self.bandwidth[count] for count in sorted(self.bandwidth)]
        slower = any(b.value < 0.95 * a.value for a, b in pairwise(rates))
        return not slower and all(rate.cv <= _STEADY_CV for rate in (*rates, self.fp32))

    def to_json(self) -> dict[str, Any]:
        """As JSON types; thread counts become strings, as JSON has it."""
        return asdict(self) | {
            "bandwidth": {str(count): asdict(rate) for count, rate in self.bandwidth.items()},
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Rates:
        """What `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""
        parsed = {
            "bandwidth": {int(n): Rate.from_json(rate) for n, rate in data["bandwidth"].items()},
            "fp32": Rate.from_json(data["fp32"]),
            "int8": Rate.from_json(data["int8"]) if data["int8"] else None,
            "notes": tuple(data["notes"]),
        }
        return cls(**data | parsed)


def cached(machine: Machine, refresh: bool = False) -> Rates:
    """The rates of `machine` from the cache, else measured and put there.

    A cache that cannot be read is measured anew; one that cannot be written leaves a note, and so
    do rates of a busy machine, which are not kept.
    """
    status = native.status()
    key = {
        "schema": _SCHEMA,
        "version": __version__,
        "cpu": machine.cpu,
        "cores": machine.usable_cores,
        "threads": machine.torch_threads,
        "isa": status.isa,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir() / f"rates-{digest}.json"
    if not refresh:
        try:
            document = json.loads(path.read_bytes())
            return replace(Rates.from_json(document["rates"]), from_cache=True)
        except (OSError, KeyError, TypeError, ValueError, AttributeError):
            pass  # absent, cut short, or of another make: measure
    rates = measure(machine)
    if not rates.steady:
        note = "the machine was busy: not kept, and measured again next time"
        return replace(rates, notes=(*rates.notes, note))
    document = {"key": key, "rates": rates.to_json()}
    try:
        write_atomic(path, json.dumps(document, indent=1).encode())
    except OSError as error:
        note = f"not cached, so measured again next time: {error.strerror} ({path.parent})"
        rates = replace(rates, notes=(*rates.notes, note))
    return rates


def measure(machine: Machine) -> Rates:
    """Measure now, in about four seconds, with up to `machine.torch_threads` threads."""
    import torch

    status = native.status()
    threads = machine.torch_threads
    if status.available and not status.openmp:
        threads = 1
    nbytes, notes = _working_set(machine)
    buffer = torch.empty(nbytes, dtype=torch.uint8).fill_(1)  # touched: else all is one zero page
    counts = _thread_counts(threads)
    seconds = _BANDWIDTH_SECONDS / len(counts)
    read = native.sum_words if status.available else _torch_read
    bandwidth = {
        count: _repeat(partial(_bytes_read, read, buffer, count), "GB/s", seconds)
        for count in counts
    }
    del buffer
    if status.available:
        fp32 = _arithmetic(lambda rounds: native.probe_f32(rounds, threads), "GFLOP/s")
        int8 = _arithmetic(lambda rounds: native.probe_i8(rounds, threads), "GOP/s")
    else:
        fp32, int8 = _arithmetic(_torch_matmul(), "GFLOP/s"), None
    source = "native" if status.available else "torch"
    return Rates(source, status.isa, threads, bandwidth, fp32, int8, nbytes, tuple(notes))


def _working_set(machine: Machine) -> tuple[int, list[str]]:
    """Bytes to read, four times the last-level cache where memory allows; and what to warn of."""
    cache = machine.last_level_cache or 64 << 20
    wanted = min(max(4 * cache, _MIN_SET), _MAX_SET)
    nbytes = min(wanted, machine.memory_available // 4)
    if nbytes >= 2 * cache:
        return nbytes, []
    size = f"{nbytes >> 20} MiB read against {cache >> 20} MiB of last-level cache"
    return nbytes, [f"bandwidth may include cache hits: {size}"]


def _thread_counts(threads: int) -> list[int]:
    """All of 1 … threads up to 8; beyond, powers of two and `threads` itself."""
    if threads <= 8:
        return list(range(1, threads + 1))
    return [1 << power for power in range(threads.bit_length()) if 1 << power < threads] + [threads]


def _bytes_read(read: Callable[[Any, int], Any], buffer: Any, threads: int) -> int:
    read(buffer, threads)
    return buffer.numel()


def _repeat(work: Callable[[], int], unit: str, seconds: float) -> Rate:
    """Billions of what `work` counts, per second; one warm-up that does not count."""
    least, most = _SAMPLES
    work()
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < most:
        start = time.perf_counter()
        done = work()
        end = time.perf_counter()
        samples.append(done / (end - start) / 1e9)
        if len(samples) >= least and end - begin > seconds:
            break
    return Rate.of(samples, unit)


def _arithmetic(work: Callable[[int], int], unit: str) -> Rate:
    """Repeat `work(rounds)`, first finding how many rounds fill one sample."""
    work(1)
    rounds = 1
    while True:
        start = time.perf_counter()
        work(rounds)
        seconds = time.perf_counter() - start
        if seconds > _CALL_SECONDS / 4:
            break
        rounds *= 2
    rounds = max(1, round(rounds * _CALL_SECONDS / seconds))
    return _repeat(lambda: work(rounds), unit, _ARITHMETIC_SECONDS)


def _torch_read(buffer: Any, threads: int) -> None:
    """A streaming read by torch, which has no lighter one than a reduction."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        buffer[: buffer.numel() // 8 * 8].view(torch.int64).sum()
    finally:
        torch.set_num_threads(before)


def _torch_matmul() -> Callable[[int], int]:
    import torch

    size = 512
    left, right = torch.ones(size, size), torch.ones(size, size)

    def work(rounds: int) -> int:
        for _ in range(rounds):
            left @ right
        return rounds * 2 * size**3

    return work
