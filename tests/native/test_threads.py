"""Threads: forked children, several Python threads at once."""

from __future__ import annotations

import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from featherweight import native

STATUS = native.status()
pytestmark = pytest.mark.skipif(not STATUS.available, reason=STATUS.error or "")


DATA = torch.arange(1 << 20)


def work(threads: int) -> int:
    return native.sum_words(DATA, threads)


def report_from_child(connection: Connection) -> None:
    connection.send((work(2), len(list(Path("/proc/self/task").iterdir()))))


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_runs_serially_and_does_not_hang() -> None:
    expected = work(2)  # the parent's pool exists before the fork
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=report_from_child, args=(sender,))
    child.start()
    answered = receiver.poll(30)
    if not answered:
        child.kill()
    child.join()
    assert answered, "the forked child hung"
    assert receiver.recv() == (expected, 1)


def test_several_python_threads_at_once() -> None:
    expected = work(1)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(work, [1, 2, 3, 2] * 8)) == {expected}
