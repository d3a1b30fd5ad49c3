"""Threads: forked children, several Python threads at once."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from featherweight import native

STATUS = native.status()
pytestmark = pytest.mark.skipif(not STATUS.available, reason=STATUS.error or "")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")

DATA = torch.arange(1 << 20)


def work(threads: int) -> int:
    return native.sum_words(DATA, threads)


def report_from_child(connection: Connection) -> None:
    connection.send((work(2), len(list(Path("/proc/self/task").iterdir()))))


@linux_only
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


FORK = """
import os, signal, sys
import torch
from featherweight.native import ops
from featherweight.quant.codebooks import NF4

torch.set_num_threads(2)
ops = torch.ops.featherweight
weight, x, grad = torch.randn(300, 512), torch.randn(40, 512), torch.randn(40, 300)
codes, absmax = ops.quantize_int8(weight)
four_bit = (*ops.quantize_4bit(weight, NF4, 64), None, None, 0.0, NF4, 64)

def everything():
    outs = []
    for m in (1, 40):
        outs.append(ops.linear_int8(x[:m], codes, absmax, None, 2.0, False))
        outs.append(ops.linear_4bit(x[:m], *four_bit, 300, None, False))
        outs.append(ops.linear_half(x[:m], weight, None))
    outs.append(ops.linear_4bit_backward(grad, *four_bit, 512))
    outs.append(ops.dequantize_4bit(*four_bit, [300, 512], torch.float32))
    outs.extend(ops.quantize_int8(weight))
    return [bytes(out.numpy().data) for out in outs]

before = everything()
child = os.fork()
if not child:
    signal.alarm(30)  # ends a child that waits for threads it does not have
    same = everything() == before
    os._exit(0 if same and len(os.listdir("/proc/self/task")) == 1 else 1)
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status), "parent", everything() == before)
"""


@linux_only
def test_every_op_works_in_a_forked_child() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "child 0 parent True", done.stdout + done.stderr


@pytest.mark.parametrize("kind", ["int8-outliers", "nf4", "nf4-nested", "nf4-exact", "bf16"])
def test_several_python_threads_share_weights(
    isa: str, kind: str, product_of: Any, numbers: Any
) -> None:
    layer = product_of(kind, numbers(200, 448, seed=1))
    inputs = [numbers(m, 448, seed=m) for m in (1, 2, 7, 8, 9, 31)] * 6
    gradients = [numbers(x.shape[0], 200, seed=2) for x in inputs]

    def both(x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer(x), layer.backward(grad)

    expected = list(map(both, inputs, gradients))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(both, inputs, gradients))
    finally:
        torch.set_num_threads(before)
    for mine, right in zip(found, expected, strict=True):
        assert torch.equal(mine[0], right[0])
        assert torch.equal(mine[1], right[1])


def test_other_codebooks_at_once(isa: str, product_of: Any, numbers: Any) -> None:
    """Each thread keeps the last codebook it met in integers."""
    layers = [product_of(kind, numbers(40, 64)) for kind in ("nf4", "fp4-32", "random", "int4")]
    x = numbers(3, 64, seed=1)
    expected = [layer(x) for layer in layers]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            found = list(pool.map(lambda layer: layer(x), layers * 4))
            assert all(map(torch.equal, found, expected * 4))
