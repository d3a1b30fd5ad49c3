"""A result depends on its own row alone: not on the batch, on threads, or on calls before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from featherweight import native
from featherweight.native import linear

STATUS = native.status()


@pytest.fixture
def threads() -> Iterator[Any]:
    """`threads(n)` sets torch's count, which a call reads; put back at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("m", [2, 3, 8, 9, 25])
def test_a_batch_gives_what_its_rows_give(
    isa: str, m: int, product: Any, numbers: Any, close: Any
) -> None:
    layer, bias = product(numbers(35, 160, seed=1)), numbers(35, seed=2)
    x = numbers(m, 160)
    x[m // 2, 7] = 100.0  # an outlier of one row
    x[0, 99] = 40.0
    if layer.per_batch:  # as in bitsandbytes, then these are float columns for all
        x[:, [7, 99]] = 100.0
        x = x.where(x.abs() > 90, x.clamp(-1.9, 1.9))
    alone = torch.cat([layer(row, bias) for row in x.split(1)])
    together = layer(x, bias)
    if m <= 8:
        assert torch.equal(together, alone)
    close(together, alone, x, layer.weight, bias)


@pytest.mark.parametrize("m", [1, 5, 40])
def test_threads_change_nothing(isa: str, m: int, product: Any, numbers: Any, threads: Any) -> None:
    layer = product(numbers(333, 512, seed=1))  # large enough for several to be used
    x, grad = numbers(m, 512), numbers(m, 333, seed=2)
    x[:, 5] = 30.0
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append((layer(x), layer.backward(grad)))
    for forward, backward in results[1:]:
        assert torch.equal(forward, results[0][0])
        assert torch.equal(backward, results[0][1])


def test_threads_change_no_code(isa: str, numbers: Any, threads: Any) -> None:
    weight, code = numbers(257, 129), numbers(16).clamp(-1, 1)
    results = []
    for count in (1, 2, 3):
        threads(count)
        codes, absmax = torch.ops.featherweight.quantize_4bit(weight, code, 64)
        decoded = torch.ops.featherweight.dequantize_4bit(
            codes, absmax, None, None, 0.0, code, 64, [257, 129], torch.float32
        )
        results.append((codes, absmax, decoded, *torch.ops.featherweight.quantize_int8(weight)))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_calls_before_change_nothing(isa: str, product_of: Any, numbers: Any) -> None:
    """Memory is kept for the next call, which may need less, more, or other pieces."""
    kinds = ["int8", "int8-outliers", "int8-batch", "nf4", "nf4-nested", "nf4-exact", "bf16"]
    shapes = [(3, 40), (300, 64), (17, 1024), (64, 4128)]
    layers = [product_of(kind, numbers(*shape)) for kind in kinds for shape in shapes]
    sizes = random.Random(0)
    cases = []
    for layer in layers * 2:
        m = sizes.choice([1, 2, 8, 9, 40, 150])
        x = numbers(m, layer.weight.shape[1], seed=m)
        x[:, 3] = 9.0
        cases.append((layer, x, numbers(m, layer.weight.shape[0], seed=m)))

    def run(case: Any) -> list[torch.Tensor]:
        layer, x, grad = case
        return [layer(x), layer.backward(grad)]

    expected = []
    for case in cases:
        with ThreadPoolExecutor(1) as fresh:  # a thread that has called nothing before
            expected += fresh.submit(run, case).result()
    sizes.shuffle(order := list(range(len(cases))))
    for i in order:
        for found, right in zip(run(cases[i]), expected[2 * i : 2 * i + 2], strict=True):
            assert torch.equal(found, right)


def test_long_calls_are_cut(
    isa: str, product: Any, numbers: Any, close: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that an interrupt need not wait; outliers of a batch are still those of all its rows."""
    layer, bias = product(numbers(24, 96, seed=1)), numbers(24, seed=2)
    x, grad = numbers(7, 50, 96), numbers(7, 50, 24, seed=3)
    x[6, 49, 11] = 100.0
    whole, gradient = layer(x, bias), layer.backward(grad)
    monkeypatch.setattr(linear, "_PRODUCTS", 1)
    assert torch.equal(layer(x, bias), whole)
    assert torch.equal(layer.backward(grad), gradient)
    close(whole, layer.reference(x, bias), x, layer.weight, bias)


@pytest.mark.skipif(not STATUS.available, reason=STATUS.error or "")
def test_instruction_sets_agree(product: Any, numbers: Any, close: Any) -> None:
    layer, x = product(numbers(70, 224, seed=1)), numbers(11, 224)
    with native.forced_isa("baseline"):
        expected = layer(x)
    for isa in set(STATUS.built) & set(STATUS.detected):
        with native.forced_isa(isa):
            close(layer(x), expected, x, layer.weight)
