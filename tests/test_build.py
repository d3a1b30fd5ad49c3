"""The wheel: with kernels where there is a compiler, pure Python where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARY = "featherweight/native/libfeatherweight.so"
NO_COMPILER = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="needs the source tree"
)


def build(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`pip wheel` of this source tree, offline, into `folder`."""
    pytest.importorskip("scikit_build_core")
    arguments = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir"]
    environment = {k: v for k, v in os.environ.items() if k != "FEATHERWEIGHT_REQUIRE_NATIVE"}
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments, str(folder), str(ROOT)],
        env=environment | variables,
        capture_output=True,
        text=True,
    )


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler here"
)
def test_with_a_compiler(tmp_path: Path) -> None:
    done = build(tmp_path, FEATHERWEIGHT_REQUIRE_NATIVE="1", CXXFLAGS="-Werror")
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    name, version, python, abi, platform = wheel.stem.split("-")
    assert (name, version, python, abi) == ("featherweight", "0.1.0", "py3", "none")
    assert platform != "any"
    assert LIBRARY in zipfile.ZipFile(wheel).namelist()


def test_without_a_compiler(tmp_path: Path) -> None:
    done = build(tmp_path, **NO_COMPILER)
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "featherweight/native/library.py" in names
    assert LIBRARY not in names


def test_without_a_compiler_where_kernels_are_required(tmp_path: Path) -> None:
    done = build(tmp_path, FEATHERWEIGHT_REQUIRE_NATIVE="1", **NO_COMPILER)
    assert done.returncode != 0
    assert not list(tmp_path.glob("*.whl"))
