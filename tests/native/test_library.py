"""Loading: lazily, once, with torch's OpenMP; the choice of instruction set; the stand-in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from featherweight import native
from featherweight.errors import NativeError
from featherweight.native import library

STATUS = native.status()
needs_native = pytest.mark.skipif(not STATUS.available, reason=STATUS.error or "")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")


def python(code: str, **variables: str) -> str:
    """What a fresh interpreter prints."""
    environment = {k: v for k, v in os.environ.items() if k != library.ISA_VARIABLE} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_loads_nothing() -> None:
    code = (
        "import sys, featherweight.native as n, featherweight.native.library as l;"
        "print(l._library, 'torch' in sys.modules)"
    )
    assert python(code) == "None False"


@needs_native
def test_status_tells_what_is_there() -> None:
    assert STATUS.error is None
    assert STATUS.path is not None
    assert Path(STATUS.path).is_file()
    assert "baseline" in STATUS.built
    assert "baseline" in STATUS.detected
    assert STATUS.isa in STATUS.built
    assert STATUS.compiler


@needs_native
@linux_only
@pytest.mark.skipif(not STATUS.openmp, reason="built without OpenMP")
def test_one_openmp_and_it_is_torchs() -> None:
    code = (
        "from featherweight import native; native.probe_i8(1, 2);"
        "print(*sorted({l.split()[-1] for l in open('/proc/self/maps') if 'gomp' in l}))"
    )
    [path] = python(code).split()
    assert "/torch/lib/" in path


@needs_native
def test_the_variable_forces_each_usable_isa() -> None:
    code = "from featherweight import native; s = native.status(); print(s.isa, s.forced)"
    for isa in set(STATUS.built) & set(STATUS.detected):
        assert python(code, FEATHERWEIGHT_ISA=isa) == f"{isa} {isa}"


@needs_native
def test_an_unknown_isa_is_an_error_from_the_variable_too() -> None:
    code = (
        "from featherweight import native, errors\n"
        "print(native.status().available)\n"
        "try: native.probe_i8(1, 1)\n"
        "except errors.NativeError as error: print(error)"
    )
    available, message = python(code, FEATHERWEIGHT_ISA="sse9").splitlines()
    assert available == "False"
    assert "'sse9' is unknown; known are baseline, avx2" in message
    assert "set FEATHERWEIGHT_ISA to one of baseline" in message


class FakeLibrary:
    """A library with one ISA missing from the build and one missing from the CPU."""

    names = (b"baseline", b"unbuilt", b"unsupported")

    def fw_isa_count(self) -> int:
        return 3

    def fw_isa_name(self, isa: int) -> bytes:
        return self.names[isa]

    def fw_isa_built(self, isa: int) -> int:
        return self.names[isa] != b"unbuilt"

    def fw_isa_detected(self, isa: int) -> int:
        return self.names[isa] != b"unsupported"

    def fw_isa_active(self) -> int:
        return 0

    def fw_isa_use(self, isa: int) -> int:
        return 0 if self.fw_isa_built(isa) and self.fw_isa_detected(isa) else -1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("never", "is unknown; known are baseline, unbuilt, unsupported; set .* of baseline$"),
        (
            "unbuilt",
            "was built for baseline, unsupported; set FEATHERWEIGHT_ISA to one of baseline$",
        ),
        ("unsupported", "is not run by this CPU and its system; set .* one of baseline$"),
    ],
)
def test_each_reason_has_its_own_error(
    monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.setattr(library, "_library", FakeLibrary())
    with pytest.raises(NativeError, match=reason), native.forced_isa(name):
        pass


@needs_native
def test_a_forced_isa_is_put_back() -> None:
    with native.forced_isa("baseline"):
        assert native.status().isa == "baseline"
    assert native.status().isa == STATUS.isa


@pytest.mark.parametrize("content", [None, b"not a library"], ids=["missing", "broken"])
def test_the_stand_in_keeps_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    path: Path | None = None
    if content is not None:
        path = tmp_path / "libfeatherweight.so"
        path.write_bytes(content)
    monkeypatch.setattr(library, "_find", lambda: path)
    monkeypatch.setattr(library, "_library", None)
    status = native.status()
    assert not status.available
    assert status.isa is None
    assert status.error is not None
    assert "install Featherweight again" in status.error
    for _ in range(2):  # the same error each time, not one that grows
        with pytest.raises(NativeError) as caught:
            native.probe_f32(1, 1)
        assert str(caught.value) == status.error


@needs_native
def test_a_library_from_older_sources_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setitem(library._FUNCTIONS, "fw_of_tomorrow", (None, []))
    assert "fw_of_tomorrow" in (native.status().error or "")
