"""The compiled kernels, and the only place that knows ctypes.

Importing this package loads neither the library nor torch; the first call does. Where the library
cannot be loaded, `status()` says why and every other call raises `NativeError` with advice.
"""

from __future__ import annotations

from featherweight.native.kernels import probe_f32, probe_i8, sum_words
from featherweight.native.library import Status, forced_isa, status

__all__ = [
    "Status",
    "forced_isa",
    "probe_f32",
    "probe_i8",
    "status",
    "sum_words",
]
