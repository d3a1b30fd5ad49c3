"""Files written whole or not at all, and never in the place of what is no file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from featherweight import paths


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "file"
    paths.write_atomic(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        paths.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(path.parent.iterdir()) == [path]


def test_the_target_of_a_link_is_written_and_the_link_kept(tmp_path: Path) -> None:
    target, link = tmp_path / "real" / "file", tmp_path / "link"
    link.symlink_to(target)
    for content in (b"made", b"again"):  # the first time the link leads nowhere
        paths.write_atomic(link, content)
        assert link.is_symlink()
        assert target.read_bytes() == content
    assert not target.is_symlink()
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes in folders here")
@pytest.mark.parametrize("name", ["pipe", "link"])
def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path, name: str) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        paths.write_atomic(tmp_path / name, b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link"}
