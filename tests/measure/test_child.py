"""The parent's side: requests, answers, and children that die."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from featherweight.errors import FeatherweightError
from featherweight.measure.child import Child, ChildError, InputError, scratch_folder


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child(threads=1, seed=0) as child:
        yield child


def test_a_failed_request_is_a_reason_and_the_child_lives(child: Child) -> None:
    for _ in range(2):
        with pytest.raises(ChildError, match=r"AttributeError: .*no_such_method"):
            child.ask("no_such_method")
    with pytest.raises(ChildError, match="TypeError: "):
        child.ask("load", nonsense=1)


def test_a_missing_model_is_the_input_and_a_recipe_is_not(child: Child, tmp_path: Path) -> None:
    common = {"device": None, "trust_remote_code": False}
    with pytest.raises(InputError, match="no file or folder") as caught:
        child.ask("load", model=str(tmp_path / "none"), recipe="fp32", **common)
    assert "\n" not in str(caught.value)
    with pytest.raises(ChildError, match="unknown technique") as other:
        child.ask("load", model=str(tmp_path / "none"), recipe="fp33", **common)
    assert not isinstance(other.value, InputError)


def test_ctrl_c_does_not_reach_the_child(child: Child) -> None:
    with pytest.raises(ChildError):
        child.ask("started")
    assert os.getpgid(child.pid) != os.getpgid(0)
    os.kill(child.pid, signal.SIGINT)
    with pytest.raises(ChildError, match="still_there"):
        child.ask("still_there")


def test_the_child_is_a_fresh_interpreter(child: Child) -> None:
    command = psutil.Process(child.pid).cmdline()
    assert command[1:] == ["-P", "-m", "featherweight.measure.worker", "1", "0"]


@pytest.mark.parametrize(
    ("number", "says"),
    [(signal.SIGKILL, "killed by the system"), (signal.SIGTERM, "ended by SIGTERM")],
)
def test_a_child_that_is_killed_while_asked_is_a_reason(number: signal.Signals, says: str) -> None:
    with Child(threads=1, seed=0) as child, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(child.ask, "anything")
        os.kill(child.pid, number)
        with pytest.raises(ChildError, match=says):
            asked.result()
        with pytest.raises(ChildError, match=says):
            child.ask("again")


def test_the_end_of_the_block_ends_the_child() -> None:
    with Child(threads=1, seed=0) as child:
        pid = child.pid
    assert not psutil.pid_exists(pid)


def test_half_an_answer_and_the_last_words_are_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = tmp_path / "python"
    dying.write_text(
        '#!/bin/sh\necho first >&2\necho "last words" >&2\nprintf "{\\"ok\\": 1"\nexit 3'
    )
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    with (
        Child(threads=1, seed=0) as child,
        pytest.raises(ChildError, match=r"ended by itself \(status 3\): last words$"),
    ):
        child.ask("anything")


def test_files_of_the_working_folder_stand_in_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    (tmp_path / "torch.py").write_text("raise SystemExit('the wrong torch')")
    monkeypatch.chdir(tmp_path)
    with Child(threads=1, seed=0) as child, pytest.raises(ChildError, match="no_such_method"):
        child.ask("no_such_method")


def test_the_scratch_folder_goes_with_its_block(tmp_path: Path) -> None:
    with scratch_folder(tmp_path / "new" / "cache") as folder:
        (Path(folder) / "file").touch()
        assert Path(folder).parent == tmp_path / "new" / "cache"
    assert not Path(folder).exists()


def test_a_cache_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FeatherweightError, match="FEATHERWEIGHT_CACHE"):
        scratch_folder(tmp_path / "file" / "cache")
