"""Originals on disk while their replacements are in use: one safetensors file a storage.

A spilled storage is resized to nothing, so that its memory is free while every tensor that views
it stays the same object; bringing it back restores it bit for bit.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from featherweight.errors import FeatherweightError

IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs"}


class Spill:
    """A private folder under `spill_dir`, removed by `close`, or when nothing can undo any more."""

    def __init__(self, spill_dir: str | Path) -> None:
        parent = Path(spill_dir)
        kind = _file_system(parent)
        if kind in IN_MEMORY:
            raise FeatherweightError(
                f"spill_dir '{parent}' is on a {kind}, which is memory",
                hint="name a folder on a disk",
            )
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="featherweight-spill-", dir=parent))
        except OSError as error:
            raise FeatherweightError(
                f"spill_dir '{parent}' cannot be used: {error.strerror}",
                hint="name an existing folder that can be written to",
            ) from None
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._files: dict[Path, torch.UntypedStorage] = {}

    def put(self, storage: torch.UntypedStorage) -> None:
        """Write the storage to disk, then free its memory; raises if the disk is full."""
        needed, free = storage.nbytes(), shutil.disk_usage(self.folder).free
        path = self.folder / f"{len(self._files)}.safetensors"
        try:
            if needed + (1 << 20) > free:
                raise OSError(f"{needed:,} bytes are needed and {free:,} are free")
            save_file({"storage": _bytes_of(storage)}, path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise FeatherweightError(
                f"the originals cannot be spilled to '{self.folder.parent}': {error}",
                hint="free some space, or leave spill_dir out to keep them in memory",
            ) from None
        self._files[path] = storage
        storage.resize_(0)

    def restore(self) -> None:
        """Bring every spilled storage back, bit for bit, and remove the files."""
        for path, storage in list(self._files.items()):
            with safe_open(path, framework="pt") as file:
                saved = file.get_tensor("storage")
                storage.resize_(saved.nbytes)
                _bytes_of(storage).copy_(saved)
            path.unlink()
            del self._files[path]

    def close(self) -> None:
        """Remove the folder and what is left in it."""
        self._remove()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _file_system(folder: Path) -> str:
    """Type of the file system that holds the folder, such as `ext4`; "" if unknown."""
    resolved = folder.resolve()
    mounts = {Path(p.mountpoint): p.fstype for p in psutil.disk_partitions(all=True)}
    return next((mounts[path] for path in (resolved, *resolved.parents) if path in mounts), "")
