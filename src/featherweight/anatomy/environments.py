"""Other versions of transformers in folders of their own, for figures that belong to old code."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

from featherweight.errors import FeatherweightError
from featherweight.paths import cache_dir


def run_in(version: str, request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request of `worker` in a process that has this version of transformers.

    Raises FeatherweightError where the version cannot be had, or the process's own error.
    """
    folder = install(version)
    done = subprocess.run(
        # -P: a file of the working folder must not stand in for a library
        [sys.executable, "-P", "-m", "featherweight.anatomy.worker"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(folder), "FEATHERWEIGHT_BNB": "0"},
    )
    lines = done.stdout.splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        said = done.stderr.strip().splitlines()
        raise FeatherweightError(
            f"the dry run under transformers {version} ended with status {done.returncode}"
            f"{': ' + said[-1] if said else ''}",
            hint="choose another version",
        ) from None
    if "error" in answer:
        raise FeatherweightError(f"under transformers {version}: {answer['error']}")
    return answer["ok"]


def is_installed_here(version: str) -> bool:
    """Whether this process has that version itself."""
    try:
        return importlib.metadata.version("transformers") == version
    except importlib.metadata.PackageNotFoundError:
        return False


def install(version: str) -> Path:
    """The folder of a version of transformers and what it needs; made the first time.

    torch is not in it: the process has its own. Raises FeatherweightError.
    """
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
        raise FeatherweightError(
            f"'{version}' is no version of transformers", hint="write it as 4.43.3"
        )
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    folder = cache_dir() / "environments" / f"transformers-{version}-{python}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            FileLock(folder.parent / f"{folder.name}.lock"),
            tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as temporary,
        ):
            if not folder.is_dir():  # another process was faster
                fresh = Path(temporary) / folder.name
                _pip_install(version, fresh)
                os.replace(fresh, folder)
    except OSError as error:
        raise FeatherweightError(
            f"transformers {version} cannot be stored in '{folder.parent}':"
            f" {error.strerror or error}",
            hint="free some space, or set FEATHERWEIGHT_CACHE to a folder that can be written to",
        ) from None
    return folder


def _pip_install(version: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--target", str(folder)]
    done = subprocess.run(
        [*command, f"transformers=={version}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise FeatherweightError(
            f"pip cannot install transformers {version} for this Python"
            f" ({errors[-1].removeprefix('ERROR: ') if errors else 'no answer'})",
            hint="choose a version that has wheels for it (4.23.1 and newer for Python 3.11), and"
            " connect to the network once",
        )
