"""The baseline's next-token distributions on disk: 16 bits a value, memory-mapped when read.

A row of log-probabilities is stored as evenly spaced steps between its own least and greatest
value: for a span of 40 nats a step is 0.0006, and the error it makes in a KL divergence about
2e-8. Some models mask tokens by −inf: what is `FLOOR` below the greatest is stored as just that.
A vocabulary of 152,000 and 4,096 tokens take 1.2 GB of disk and no memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from featherweight.errors import FeatherweightError

STEPS = 65535
FLOOR = 80.0  # nats


class Writer:
    """Writes distributions row by row; `tops` and `logp` (of the true token) are kept exactly."""

    def __init__(self, folder: Path, tokens: int, vocabulary: int) -> None:
        self.folder = folder
        self._meta: dict[str, list[np.ndarray[Any, Any]]] = {
            name: [] for name in ("low", "step", "top", "logp")
        }
        needed, free = tokens * vocabulary * 2, shutil.disk_usage(folder).free
        if needed > free:
            raise _full(folder, needed, free)
        self._file = open(folder / "codes.u16", "wb")  # noqa: SIM115  # closed by __exit__

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # every write was flushed: what fails here was said before
            self._file.close()
        if error is None:
            arrays = {name: np.concatenate(parts) for name, parts in self._meta.items()}
            with _explained(self.folder, sum(array.nbytes for array in arrays.values())):
                np.savez(self.folder / "meta.npz", **arrays)  # type: ignore[arg-type]

    def write(self, logp: torch.Tensor, targets: torch.Tensor) -> None:
        """Add log-probabilities [T, V] float32 and the true next tokens [T]."""
        low, high = logp.aminmax(dim=-1, keepdim=True)
        low = low.maximum(high - FLOOR)
        step = ((high - low) / STEPS).clamp_min(torch.finfo(torch.float32).tiny)
        codes = ((logp - low) / step).round_().clamp_(0, STEPS).to(torch.uint16)
        with _explained(self.folder, codes.nbytes):
            self._file.write(codes.numpy().tobytes())
            self._file.flush()
        exact = logp.gather(-1, targets[:, None])[:, 0]
        for name, values in (("low", low[:, 0]), ("step", step[:, 0]), ("logp", exact)):
            self._meta[name].append(values.numpy().copy())
        self._meta["top"].append(logp.argmax(-1).numpy())


class Reader:
    """Reads what `Writer` wrote."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "meta.npz") as meta:
            self._low, self._step = meta["low"], meta["step"]
            self.tops = torch.from_numpy(meta["top"])  # [T]
            self.logp = torch.from_numpy(meta["logp"])  # [T]
        self._codes = np.memmap(folder / "codes.u16", dtype=np.uint16, mode="r").reshape(
            len(self.tops), -1
        )

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Log-probabilities [end − start, V], float64, normalised."""
        codes = torch.from_numpy(self._codes[start:end].astype(np.float64))
        low = torch.from_numpy(self._low[start:end].astype(np.float64))[:, None]
        step = torch.from_numpy(self._step[start:end].astype(np.float64))[:, None]
        return torch.log_softmax(codes * step + low, dim=-1)


@contextmanager
def _explained(folder: Path, needed: int) -> Iterator[None]:
    """Say what a disk that is full, or fails, means here."""
    try:
        yield
    except OSError:
        raise _full(folder, needed, shutil.disk_usage(folder).free) from None


def _full(folder: Path, needed: int, free: int) -> FeatherweightError:
    return FeatherweightError(
        f"the baseline's distributions need {needed / 1e6:,.0f} MB in '{folder.parent}',"
        f" where {free / 1e6:,.0f} MB are free",
        hint="free some space, lower --quality-tokens, or set FEATHERWEIGHT_CACHE to another disk",
    )
