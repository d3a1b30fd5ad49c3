"""What a GPU is to the memory of a program: generation, size, and what CUDA itself takes."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from featherweight.errors import FeatherweightError

MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory: int  # bytes on the board
    capability: tuple[int, int]  # CUDA compute capability

    @property
    def workspace(self) -> int:
        """Bytes of cuBLAS's workspace, one for each thread that multiplies.

        `:4096:2:16:8`, two of 4 MiB and eight of 16 KiB; one of 32 MiB from Hopper on
        (PyTorch's getChosenWorkspaceSize).
        """
        return 32 * MIB if self.capability >= (9, 0) else 8_519_680

    @property
    def lazy_context(self) -> int:
        """Bytes of a CUDA context whose kernels are loaded when first used (CUDA 11.7 and newer).

        About 300 MiB until Volta and Turing, 400 from Ampere on, 500 from Hopper on: by
        measurements of users of PyTorch (pytorch#107667, #109888), not by NVIDIA's word.
        """
        if self.capability >= (9, 0):
            return 500 * MIB
        return (400 if self.capability >= (8, 0) else 300) * MIB


_TABLE = {
    gpu.name: gpu
    for gpu in (
        Gpu("gtx1080ti", 11_264 * MIB, (6, 1)),
        Gpu("p100-16gb", 16_280 * MIB, (6, 0)),
        Gpu("v100-16gb", 16_160 * MIB, (7, 0)),
        Gpu("v100-32gb", 32 * GIB, (7, 0)),
        Gpu("t4", 15_360 * MIB, (7, 5)),
        Gpu("rtx2060", 6 * GIB, (7, 5)),
        Gpu("rtx2070", 8 * GIB, (7, 5)),
        Gpu("rtx2080", 8 * GIB, (7, 5)),
        Gpu("rtx2080ti", 11 * GIB, (7, 5)),
        Gpu("rtx3050", 8 * GIB, (8, 6)),
        Gpu("rtx3060", 12 * GIB, (8, 6)),
        Gpu("rtx3060ti", 8 * GIB, (8, 6)),
        Gpu("rtx3070", 8 * GIB, (8, 6)),
        Gpu("rtx3080", 10 * GIB, (8, 6)),
        Gpu("rtx3080ti", 12 * GIB, (8, 6)),
        Gpu("rtx3080ti-laptop", 16 * GIB, (8, 6)),
        Gpu("rtx3090", 24 * GIB, (8, 6)),
        Gpu("rtx4060", 8_188 * MIB, (8, 9)),
        Gpu("rtx4060ti-16gb", 16_380 * MIB, (8, 9)),
        Gpu("rtx4070", 12_282 * MIB, (8, 9)),
        Gpu("rtx4070ti", 12_282 * MIB, (8, 9)),
        Gpu("rtx4080", 16_376 * MIB, (8, 9)),
        Gpu("rtx4090", 24_564 * MIB, (8, 9)),
        Gpu("rtx5060ti-16gb", 16_311 * MIB, (12, 0)),
        Gpu("rtx5070", 12_227 * MIB, (12, 0)),
        Gpu("rtx5070ti", 16_303 * MIB, (12, 0)),
        Gpu("rtx5080", 16_303 * MIB, (12, 0)),
        Gpu("rtx5090", 32_607 * MIB, (12, 0)),
        Gpu("a10", 23_028 * MIB, (8, 6)),
        Gpu("a10g", 23_028 * MIB, (8, 6)),
        Gpu("a40", 46_068 * MIB, (8, 6)),
        Gpu("a4000", 16_376 * MIB, (8, 6)),
        Gpu("a5000", 24_564 * MIB, (8, 6)),
        Gpu("a6000", 49_140 * MIB, (8, 6)),
        Gpu("6000ada", 49_140 * MIB, (8, 9)),
        Gpu("a30", 24 * GIB, (8, 0)),
        Gpu("a100-40gb", 40 * GIB, (8, 0)),
        Gpu("a100-80gb", 80 * GIB, (8, 0)),
        Gpu("l4", 23_034 * MIB, (8, 9)),
        Gpu("l40s", 46_068 * MIB, (8, 9)),
        Gpu("h100-80gb", 81_559 * MIB, (9, 0)),
        Gpu("h200", 143_771 * MIB, (9, 0)),
        Gpu("b200", 183_359 * MIB, (10, 0)),
    )
}


def names() -> list[str]:
    """Names that `find` knows."""
    return list(_TABLE)


def find(name: str) -> Gpu:
    """The GPU of a name such as `a100-40gb`, `RTX 3090` or `NVIDIA L40S-48GB`.

    Raises FeatherweightError for a name that fits none, or more than one size.
    """
    wanted = _plain(name)
    exact = [gpu for gpu in _TABLE.values() if _plain(gpu.name) == wanted]
    # "l40s48gb" says more than "l40s"; "h100" says less than "h100-80gb"
    longer = [gpu for gpu in _TABLE.values() if re.fullmatch(_plain(gpu.name) + r"\d+gb", wanted)]
    shorter = [gpu for gpu in _TABLE.values() if re.fullmatch(wanted + r"\d+gb", _plain(gpu.name))]
    for found in (exact, longer, shorter):
        if len(found) == 1:
            return found[0]
    near = [gpu.name for gpu in shorter] or difflib.get_close_matches(wanted, _TABLE, 3, 0.4)
    raise FeatherweightError(
        f"no GPU is known as '{name}'",
        hint=f"{'nearest: ' + ', '.join(near) + '; ' if near else ''}known: {', '.join(_TABLE)}",
    )


def _plain(name: str) -> str:
    """`rtx3080tilaptop16gb` of `NVIDIA RTX 3080Ti laptop 16GB`."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for maker in ("nvidia", "geforce", "tesla", "quadro", "sxm4", "sxm5", "pcie", "hbm3"):
        plain = plain.replace(maker, "")
    return re.sub(r"^rtx(?=a\d|6000ada)", "", plain)  # NVIDIA writes RTX A6000
