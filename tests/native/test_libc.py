"""Giving memory back: file pages come again unchanged."""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from pathlib import Path

import pytest

from featherweight.native import libc


def resident(address: int) -> int:
    """Resident KiB of the mapping that starts at `address`."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
    raise AssertionError("no such mapping")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_file_pages_go_and_come_again(tmp_path: Path) -> None:
    content = bytes(range(256)) * 4096  # 1 MiB
    path = tmp_path / "weights"
    path.write_bytes(content)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    assert mapped[:] == content
    assert resident(address) == 1024
    libc.madvise_dontneed(address, len(content))
    assert resident(address) == 0
    assert mapped[:] == content


def test_a_refusal_is_an_os_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        libc.madvise_dontneed(1, 4096)  # not the start of a page


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has renameat2")
def test_two_paths_change_places(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder ü", tmp_path / "file"
    folder.mkdir()
    (folder / "inside").write_text("x")
    file.write_text("y")
    inode = file.stat().st_ino
    libc.exchange(folder, str(file))
    assert (file / "inside").read_text() == "x"
    assert (folder.read_text(), folder.stat().st_ino) == ("y", inode)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has renameat2")
def test_an_exchange_that_cannot_be_names_both_paths(tmp_path: Path) -> None:
    there, none = tmp_path / "there", tmp_path / "none"
    there.mkdir()
    for a, b in ((there, none), (none, there)):
        with pytest.raises(FileNotFoundError) as caught:
            libc.exchange(a, b)
        assert (caught.value.filename, caught.value.filename2) == (str(a), str(b))
    assert there.is_dir()
    with pytest.raises(OSError, match="Invalid argument"):
        libc.exchange(tmp_path, there)  # a folder and one inside it


def test_malloc_trim_answers() -> None:
    assert libc.malloc_trim() in (True, False)


def test_the_threshold_of_mmap_can_be_set_on_glibc() -> None:
    try:
        assert libc.set_mmap_threshold(128 << 10) is (platform.libc_ver()[0] == "glibc")
    finally:
        libc.set_mmap_threshold(32 << 20)
