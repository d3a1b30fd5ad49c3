"""What this machine is: processor, memory, GPUs; and how fast it reads and multiplies."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featherweight import cgroup

if TYPE_CHECKING:
    from featherweight.rates import Rates

_CPUS = Path("/sys/devices/system/cpu")

# Our name for what matters to numbers: the kernel's flag, on x86 or ARM.
_FEATURES = {
    "avx": "avx",
    "avx2": "avx2",
    "fma": "fma",
    "f16c": "f16c",
    "avx_vnni": "avx_vnni",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512_vnni": "avx512_vnni",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_int8": "amx_int8",
    "amx_bf16": "amx_bf16",
    "amx_fp16": "amx_fp16",
    "neon": "asimd",
    "neon_fp16": "asimdhp",
    "dotprod": "asimddp",
    "i8mm": "i8mm",
    "bf16": "bf16",
    "sve": "sve",
}


_ONEDNN_WITHOUT_BF16 = {
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
}


@dataclass(frozen=True)
class Gpu:
    """One CUDA (or ROCm) device."""

    name: str
    memory: int  # bytes
    capability: str  # such as "9.0"


@dataclass(frozen=True)
class Machine:
    """What the machine has, and what of it this process may use. Sizes in bytes."""

    cpu: str
    architecture: str  # "x86_64", "aarch64", …
    features: tuple[str, ...]  # of the instruction set; empty where the system does not tell
    physical_cores: int | None
    logical_cores: int
    usable_cores: float  # by affinity and container quota
    torch_threads: int
    memory_total: int  # of the machine or of the container, whichever is less
    memory_available: int  # without swapping, when asked
    last_level_cache: int | None  # all of them together, where the process may run
    gpus: tuple[Gpu, ...]
    system: str
    onednn_limit: str | None = None  # ONEDNN_MAX_CPU_ISA: what torch's products are held to

    @property
    def has_fast_bf16(self) -> bool:
        """Whether torch's bfloat16 products run in hardware, not by way of float32."""
        if self.onednn_limit in _ONEDNN_WITHOUT_BF16:
            return False
        return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(self.features)

    @property
    def has_fast_fp16(self) -> bool:
        """Whether torch's float16 products run in hardware, not by way of float32."""
        if self.onednn_limit in _ONEDNN_WITHOUT_BF16 | {"AVX512_CORE_BF16"}:
            return False
        return not {"avx512_fp16", "amx_fp16", "neon_fp16"}.isdisjoint(self.features)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON types, with the two properties."""
        properties = {"has_fast_bf16": self.has_fast_bf16, "has_fast_fp16": self.has_fast_fp16}
        lists = {"features": list(self.features), "gpus": [asdict(gpu) for gpu in self.gpus]}
        return asdict(self) | lists | properties

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Machine:
        """What `to_json` wrote."""
        fields = {name: data[name] for name in cls.__dataclass_fields__}
        fields["features"] = tuple(data["features"])
        fields["gpus"] = tuple(Gpu(**gpu) for gpu in data["gpus"])
        return cls(**fields)


def describe() -> Machine:
    """This machine now. Imports torch; takes milliseconds after that."""
    import psutil
    import torch

    memory = psutil.virtual_memory()
    total, available = memory.total, memory.available
    limit = cgroup.memory()
    if limit is not None:
        total, available = min(total, limit[0]), min(available, limit[1])
    affinity = _affinity()
    return Machine(
        cpu=_cpu_name(),
        architecture=platform.machine(),
        features=_features(),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=os.cpu_count() or 1,
        usable_cores=min(len(affinity), cgroup.cpu_quota() or math.inf),
        torch_threads=torch.get_num_threads(),
        memory_total=total,
        memory_available=available,
        last_level_cache=_last_level_cache(affinity),
        gpus=tuple(_gpus()),
        system=f"{platform.system()} {platform.release()}",
        onednn_limit=os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() or None,
    )


def probe(refresh: bool = False) -> Rates:
    """Measured rates of this machine at torch's number of threads; see `featherweight.rates`.

    Takes a few seconds the first time, and comes from the cache afterwards unless `refresh`.
    """
    from featherweight import rates

    return rates.cached(describe(), refresh=refresh)


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty off Linux."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _cpu_name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def _features() -> tuple[str, ...]:
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return tuple(name for name, flag in _FEATURES.items() if flag in flags)


def _last_level_cache(cpus: set[int]) -> int | None:
    """Bytes of the last-level caches that these CPUs reach, each counted once."""
    caches: dict[tuple[int, str], int] = {}  # level, CPUs that share it: bytes
    for cpu in cpus:
        for index in (_CPUS / f"cpu{cpu}" / "cache").glob("index*"):
            try:
                level = int((index / "level").read_text())
                shared = (index / "shared_cpu_list").read_text().strip()
                size = (index / "size").read_text().strip()
                caches[level, shared] = int(size.removesuffix("K")) * 1024
            except (OSError, ValueError):
                continue
    last = max((level for level, _ in caches), default=None)
    return sum(size for (level, _), size in caches.items() if level == last) or None


def _gpus() -> Iterator[Gpu]:
    import torch

    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield Gpu(device.name, device.total_memory, f"{device.major}.{device.minor}")
