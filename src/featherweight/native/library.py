"""Finding the library, loading it once, and choosing its instruction set."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

from featherweight.errors import NativeError

ISA_VARIABLE = "FEATHERWEIGHT_ISA"
_FILE = "libfeatherweight.so"
_REINSTALL = "with a C++ compiler at hand, install Featherweight again (pip --force-reinstall)"

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
# name: (result, parameters), as in csrc/featherweight.h
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "fw_compiler": (ctypes.c_char_p, []),
    "fw_has_openmp": (_INT, []),
    "fw_isa_count": (_INT, []),
    "fw_isa_name": (ctypes.c_char_p, [_INT]),
    "fw_isa_built": (_INT, [_INT]),
    "fw_isa_detected": (_INT, [_INT]),
    "fw_isa_active": (_INT, []),
    "fw_isa_use": (_INT, [_INT]),
    "fw_sum_words": (ctypes.c_uint64, [_POINTER, _SIZE, _INT]),
    "fw_probe_f32": (_SIZE, [_SIZE, _INT]),
    "fw_probe_i8": (_SIZE, [_SIZE, _INT]),
    "fw_linear": (_INT, [*[_POINTER] * 4, _SIZE, _INT, ctypes.c_float, _INT, _INT]),
    "fw_linear_codes": (_INT, [*[_POINTER] * 5, _SIZE, _POINTER, _POINTER, _SIZE, _INT, _INT]),
    "fw_decoder_bytes": (_SIZE, []),
    "fw_decoder_layers": (_INT, [_POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _INT]),
    "fw_linear_backward": (_INT, [_POINTER, _POINTER, _POINTER, _SIZE, _INT, _INT]),
    "fw_decode": (None, [_POINTER, _POINTER, _INT, _INT]),
    "fw_quantize_4bit": (_INT, [_POINTER, _INT, _SIZE, _SIZE, *[_POINTER] * 4, _INT]),
    "fw_quantize_rows": (
        _INT,
        [_POINTER, _INT, _SIZE, _SIZE, ctypes.c_float, *[_POINTER] * 3, _INT],
    ),
}


class Matrix(ctypes.Structure):
    """`fw_matrix` of csrc/featherweight.h."""

    _fields_ = (
        ("data", _POINTER),
        ("absmax", _POINTER),
        ("code", _POINTER),
        ("absmax_codes", _POINTER),
        ("nested_code", _POINTER),
        ("rows", _SIZE),
        ("columns", _SIZE),
        ("blocksize", _SIZE),
        ("nested_offset", ctypes.c_float),
        ("format", ctypes.c_int32),
    )


@dataclass(frozen=True)
class Status:
    """What the native library is, or why there is none."""

    available: bool
    path: str | None = None
    isa: str | None = None  # in use
    forced: str | None = None  # what FEATHERWEIGHT_ISA asks for
    built: tuple[str, ...] = ()  # instruction sets that the library has kernels for
    detected: tuple[str, ...] = ()  # those that this CPU and system run
    openmp: bool = False  # False: one thread
    compiler: str | None = None  # name, version and flags
    error: str | None = None  # why it is not available, and what to do


class _Missing:
    """Stands in for a library that could not be loaded: any use of it raises the reason."""

    def __init__(self, error: NativeError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise NativeError(self._error.message, hint=self._error.hint)


_library: Any = None
_lock = threading.Lock()


def library() -> Any:
    """The loaded library, its functions typed; or a stand-in that raises `NativeError`."""
    global _library
    if _library is None:
        with _lock:
            if _library is None:
                _library = _load()
    return _library


def available() -> bool:
    """Whether there is a library; loads it if nothing has yet."""
    return not isinstance(library(), _Missing)


def status() -> Status:
    """What was loaded; loads it if nothing has yet. Never raises."""
    loaded = library()
    forced = os.environ.get(ISA_VARIABLE) or None
    if isinstance(loaded, _Missing):
        path = _find()
        return Status(
            available=False,
            path=str(path) if path else None,
            forced=forced,
            error=str(loaded._error),
        )
    names = _isa_names(loaded)
    return Status(
        available=True,
        path=loaded._name,
        isa=names[loaded.fw_isa_active()],
        forced=forced,
        built=_built(loaded),
        detected=_detected(loaded),
        openmp=bool(loaded.fw_has_openmp()),
        compiler=loaded.fw_compiler().decode(),
    )


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Use another instruction set inside a `with` block, in all threads: for tests, benchmarks.

    Raises `NativeError` for one that is unknown, not built, or not run by this CPU.
    """
    loaded = library()
    before = loaded.fw_isa_active()
    _use_isa(loaded, name)
    try:
        yield
    finally:
        loaded.fw_isa_use(before)


def _load() -> Any:
    path = _find()
    if path is None:
        return _Missing(
            NativeError("the native library was not built when Featherweight was", hint=_REINSTALL)
        )
    try:
        # First, so that our libgomp.so.1 resolves to the one torch brings: one pool of threads.
        import torch  # noqa: F401

        loaded = ctypes.CDLL(str(path))
        for name, (result, parameters) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.restype = result
            function.argtypes = parameters
    except (OSError, AttributeError) as error:  # AttributeError: built from older sources
        reason = " ".join(str(error).split())
        return _Missing(
            NativeError(f"the native library cannot be loaded ({reason})", hint=_REINSTALL)
        )
    forced = os.environ.get(ISA_VARIABLE)
    if forced:
        try:
            _use_isa(loaded, forced)
        except NativeError as error:
            return _Missing(error)
    return loaded


def _find() -> Path | None:
    """The library beside this file, or where an editable install puts what it compiles."""
    candidates = [Path(__file__).with_name(_FILE)]
    try:
        installed = metadata.distribution("featherweight")
        candidates.append(Path(str(installed.locate_file(f"featherweight/native/{_FILE}"))))
    except metadata.PackageNotFoundError:
        pass
    return next((path for path in candidates if path.is_file()), None)


def _use_isa(loaded: Any, name: str) -> None:
    names, built, detected = _isa_names(loaded), _built(loaded), _detected(loaded)
    if name in built and not loaded.fw_isa_use(names.index(name)):
        return
    if name not in names:
        reason = f"is unknown; known are {', '.join(names)}"
    elif name not in built:
        reason = f"is not in this library, which was built for {', '.join(built)}"
    else:
        reason = "is not run by this CPU and its system"
    usable = ", ".join(isa for isa in built if isa in detected)
    raise NativeError(
        f"the instruction set '{name}' {reason}", hint=f"set {ISA_VARIABLE} to one of {usable}"
    )


def _isa_names(loaded: Any) -> list[str]:
    return [loaded.fw_isa_name(isa).decode() for isa in range(loaded.fw_isa_count())]


def _built(loaded: Any) -> tuple[str, ...]:
    names = _isa_names(loaded)
    return tuple(name for isa, name in enumerate(names) if loaded.fw_isa_built(isa))


def _detected(loaded: Any) -> tuple[str, ...]:
    names = _isa_names(loaded)
    return tuple(name for isa, name in enumerate(names) if loaded.fw_isa_detected(isa))
