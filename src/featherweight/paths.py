"""Where files go, and how they get there whole."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def cache_dir() -> Path:
    """The folder of what can be made again; `FEATHERWEIGHT_CACHE` moves it. It may not exist."""
    chosen = os.environ.get("FEATHERWEIGHT_CACHE")
    if chosen:
        return Path(chosen).expanduser()

    from platformdirs import user_cache_path

    return user_cache_path("featherweight")


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all, making its folder. Raises OSError, and leaves no litter.

    Through a link the target is written; what is no file (`/dev/null`, a pipe) is never replaced.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
