"""Writing a folder of files, such as a checkpoint, whole or not at all.

The files are written into a hidden folder beside the target, and the two change places in one step
of the file system. A reader finds the old checkpoint or the new one, whole, whenever it looks; so
does whoever comes after a crash. The old folder may be mapped into this process while it is
replaced: its files go away when the last mapping of them does.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path

import psutil
from safetensors import SafetensorError

from featherweight.errors import FeatherweightError
from featherweight.native import libc
from featherweight.scratch import beside, clear_up, held

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EXDEV)


def stale(variant: str | None = None) -> tuple[str, ...]:
    """Patterns of the weights that transformers would read as this variant: of an earlier save.

    Beside those of a new one, under other names, they would be read instead.
    """
    dot = f".{escape(variant)}" if variant else ""
    return tuple(
        pattern
        for stem, end in (("model", "safetensors"), ("pytorch_model", "bin"))
        for pattern in (
            f"{stem}{dot}.{end}",
            f"{stem}{dot}-?????-of-?????.{end}",
            f"{stem}.{end}.index{dot}.json",
        )
    )


@contextmanager
def replacing(target: str | os.PathLike[str], without: tuple[str, ...] = stale()) -> Iterator[Path]:
    """A fresh folder to write into, which becomes `target` at the end of the block.

    Leaving the block normally writes everything through to the disk and puts the folder in place
    of the target in one atomic step. What only the old target has is kept, as hard links where the
    file system has them, except files that match `without`; mode, owner and group stay,
    as far as this user may set them. An exception removes the folder and leaves the target
    untouched. Through a symbolic link, the folder that it points to is replaced. Missing parents
    are made.

    Where the file system cannot exchange two folders, a warning says so, and two renames do it: the
    target is missing between them, for some microseconds. After a crash just then the next
    `replacing` of this target brings the old folder back. It also removes what killed runs left.

    Raises:
        FeatherweightError: the target is a file, write-protected, the current directory or one
            above it, or has a mount point in it; its parent cannot be written to; the disk is full,
            also while the block writes. What else the block raises comes out as it is.
    """
    folder = Path(os.path.realpath(target))
    _refuse(folder)
    made = [parent for parent in folder.parents if not os.path.exists(parent)]
    try:
        with ExitStack() as stack:
            with _explained(folder):
                folder.parent.mkdir(parents=True, exist_ok=True)
                for parent in made:
                    _sync(parent.parent)
                clear_up(folder)
                temporary = stack.enter_context(beside(folder))
            with _explained(folder, only=_FULL):
                yield temporary
            with _explained(folder):
                _put(temporary, folder, without)
    finally:
        for parent in made:
            with suppress(OSError):  # not empty
                parent.rmdir()


def _refuse(folder: Path) -> None:
    """Raise FeatherweightError for a target that could not be replaced in the end."""
    lowest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not os.path.isdir(lowest):
        raise FeatherweightError(f"'{lowest}' is a file, not a folder", hint="name a folder")
    mounts = (Path(partition.mountpoint) for partition in psutil.disk_partitions(all=True))
    mount = next((path for path in mounts if path.is_relative_to(folder)), None)
    if mount:
        raise FeatherweightError(
            f"'{folder}' cannot be replaced: '{mount}' is a mount point",
            hint="name a folder that is none and holds none, such as a new one inside it",
        )
    with suppress(FileNotFoundError):  # the current directory was removed
        if Path.cwd().is_relative_to(folder):
            raise FeatherweightError(
                f"'{folder}' cannot be replaced: it is or holds the current directory",
                hint="name a new folder inside it, or run this from elsewhere",
            )
    if os.path.exists(folder) and not os.access(folder, os.W_OK):
        raise FeatherweightError(
            f"'{folder}' is write-protected", hint="make it writable, or name another folder"
        )


@contextmanager
def _explained(folder: Path, only: tuple[int, ...] | None = None) -> Iterator[None]:
    """Turn errors of the system, or `only` these, into one line that says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _number(error)
        if number is None or (only and number not in only):
            raise
        raise FeatherweightError(
            f"'{folder}' cannot be written: {os.strerror(number)}",
            hint="free some space, or name a folder on another disk"
            if number in _FULL
            else "name a new folder whose parent can be written to",
        ) from error


def _number(error: Exception) -> int | None:
    """The system's number of an error; safetensors has it in its text alone."""
    if isinstance(error, OSError):
        return error.errno
    told = re.search(r"\(os error (\d+)\)", str(error))
    return int(told[1]) if told else None


def _put(new: Path, folder: Path, without: tuple[str, ...]) -> None:
    """Write `new` through to the disk and put it where `folder` is, or will be."""
    for place, _, names in os.walk(new):
        for path in (Path(place, name) for name in names):
            if stat.S_ISREG(path.lstat().st_mode):
                _sync(path)
        _sync(Path(place))
    if folder.is_dir():
        _keep(folder, new, without)
        _copy_access(folder, new)
        _exchange(new, folder)
    else:
        new.rename(folder)
    _sync(folder.parent)


def _keep(old: Path, new: Path, without: tuple[str, ...] = ()) -> None:
    """Link into `new` what only `old` has, folder by folder, except files `without` fits."""
    with os.scandir(old) as entries:
        for entry in entries:
            into = new / entry.name
            taken = os.path.lexists(into)
            if entry.is_dir(follow_symlinks=False):
                if not taken:
                    into.mkdir()
                    _keep(Path(entry), into)
                    _copy_access(Path(entry), into)
                elif into.is_dir() and not into.is_symlink():
                    _keep(Path(entry), into)
            elif not taken and not any(fnmatchcase(entry.name, pattern) for pattern in without):
                _link(Path(entry), into)
    _sync(new)


def _link(old: Path, new: Path) -> None:
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # no hard links here, or not of this file
        shutil.copy2(old, new, follow_symlinks=False)
        if not new.is_symlink():
            _sync(new)


def _copy_access(old: Path, new: Path) -> None:
    """Group, owner and mode; the first two as far as this user may set them."""
    was = old.stat()
    with suppress(PermissionError):
        os.chown(new, -1, was.st_gid)
        os.chown(new, was.st_uid, -1)
    new.chmod(stat.S_IMODE(was.st_mode))  # last: a change of owner clears bits of it


def _exchange(new: Path, folder: Path) -> None:
    """Let two folders change places: in one step, or in two where there is no other way."""
    try:
        libc.exchange(new, folder)
    except OSError as error:
        if error.errno not in _NO_EXCHANGE:
            raise
        hidden = new.with_suffix(".old")
        warnings.warn(  # before anything is changed, since a warning may be made an exception
            f"this file system cannot exchange folders: '{folder}' is replaced by two renames, and"
            f" a crash between them leaves '{hidden.name}', which the next save brings back",
            stacklevel=5,  # the end of the caller's block
        )
        _rename_both(new, folder, hidden)


def _rename_both(new: Path, folder: Path, hidden: Path) -> None:
    """Exchange by renaming `folder` to `hidden` and `new` to `folder`; undone if it fails."""
    with held(folder):
        try:
            folder.rename(hidden)
            new.rename(folder)
        except BaseException:
            if hidden.exists() and not folder.exists():
                hidden.rename(folder)
            raise
        _sync(folder.parent)
        hidden.rename(new)


def _sync(path: Path) -> None:
    """Write a file, or the names in a folder, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # network folders, that have none
            raise
    finally:
        os.close(descriptor)
