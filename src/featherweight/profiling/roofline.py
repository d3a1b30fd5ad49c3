"""The roofline of a device: how fast operations can be at most, given what they move and compute.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (CACM 2009): an
operation takes at least its bytes over the bandwidth, and at least its FLOPs over the rate of
products; the longer of the two binds it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from featherweight import machine
from featherweight.measure.clock import wait
from featherweight.rates import Rate

MEMORY, COMPUTE = "memory", "compute"
_SAMPLES = 5
_LONG = 0.005  # seconds: a product that takes so long is large enough
_COPIED = 1 << 30  # bytes read and written in one sample on a GPU, where it has room for them


@dataclass(frozen=True)
class Roofline:
    """Bandwidth in GB/s; products in GFLOP/s, a multiply and an add counted as two, by dtype."""

    device: str  # such as "cpu", "cuda:0"
    bandwidth: float
    products: dict[str, float]  # "float32" is always there
    sources: dict[str, str]  # "bandwidth" and each dtype: how it was measured

    def rate(self, dtype: str) -> float:
        """GFLOP/s of products in this dtype; that of float32 where it was not measured."""
        return self.products.get(dtype, self.products["float32"])

    def ridge(self, dtype: str = "float32") -> float:
        """FLOP/byte from which on an operation is bound by arithmetic."""
        return self.rate(dtype) / self.bandwidth

    def seconds(self, flops: int, nbytes: int, dtype: str = "float32") -> tuple[float, str]:
        """The least time that the work can take here, and whether memory or compute binds it."""
        moving, computing = nbytes / self.bandwidth / 1e9, flops / self.rate(dtype) / 1e9
        return (computing, COMPUTE) if computing > moving else (moving, MEMORY)

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


def measure(device: torch.device, dtypes: Iterable[str] = ()) -> Roofline:
    """The roofline of a device, for products in float32 and in `dtypes`.

    On a CPU, bandwidth and the rates of float32 and int8 are those of `machine.probe`; other float
    dtypes, and everything on a GPU, are measured with torch's own matmul and copy, in a second.
    """
    products: dict[str, float] = {}
    sources: dict[str, str] = {}
    if device.type == "cpu":
        rates = machine.probe()
        bandwidth = rates.peak_bandwidth.value
        sources["bandwidth"] = f"streaming read by {rates.source}"
        for dtype, rate in (("float32", rates.fp32), ("int8", rates.int8)):
            if rate is not None:
                products[dtype], sources[dtype] = rate.value, f"products by {rates.source}"
    else:
        bandwidth = _copy_rate(device).value
        sources["bandwidth"] = "copy by torch"
    for dtype in dict.fromkeys(("float32", *dtypes)):
        found = getattr(torch, dtype, None)
        if dtype not in products and isinstance(found, torch.dtype) and found.is_floating_point:
            products[dtype] = _matmul_rate(device, found).value
            sources[dtype] = "matmul by torch"
    return Roofline(str(device), bandwidth, products, sources)


@torch.no_grad()
def _matmul_rate(device: torch.device, dtype: torch.dtype) -> Rate:
    """GFLOP/s of the square product that does best, its right side as a Linear has its weight."""
    best: Rate | None = None
    for size in (512, 1024, 2048, 8192):
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        rate = _rate(partial(torch.matmul, left, right.T), 2 * size**3, "GFLOP/s", device)
        best = rate if best is None or rate.value > best.value else best
        if 2 * size**3 / rate.value / 1e9 > _LONG:
            break
    assert best is not None
    return best


@torch.no_grad()
def _copy_rate(device: torch.device) -> Rate:
    """GB/s of a copy, bytes read and written counted."""
    room = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _COPIED
    source = torch.zeros(min(_COPIED, room // 4), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), 2 * source.numel(), "GB/s", device)


def _rate(work: Callable[[], Any], amount: int, unit: str, device: torch.device) -> Rate:
    """Billions of `amount` a second; one call before that does not count."""
    work()
    samples = []
    for _ in range(_SAMPLES):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        samples.append(amount / (time.perf_counter() - start) / 1e9)
    return Rate.of(samples, unit)
