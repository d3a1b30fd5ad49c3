"""Blocks as they come and go, on real tensors and on fake ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from featherweight.anatomy.trace import Trace, holders
from featherweight.anatomy.tracker import Tracker

KIB = 1024


def kib(rows: int) -> torch.Tensor:
    """A tensor of so many KiB."""
    return torch.zeros(rows, 256)


@pytest.fixture(params=["real", "fake"])
def mode(request: pytest.FixtureRequest) -> Any:
    if request.param == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    else:
        yield


def sizes(trace: Trace) -> list[int]:
    return [int(size) // KIB for size in trace.sizes()]


def test_blocks_are_born_and_die_in_order(mode: None) -> None:
    with Tracker() as tracker:
        a = kib(4)
        b = a * 2
        del a
        c = b.sum(dim=1)  # 4 floats: 16 bytes
        del b, c
    assert [int(size) for size in tracker.trace.sizes()] == [4096, 4096, -4096, 16, -4096, -16]
    assert int(tracker.trace.allocated().max()) == 8192
    assert [block.operation for block in tracker.trace.blocks] == ["zeros", "mul", "sum"]


def test_views_and_in_place_changes_take_nothing(mode: None) -> None:
    with Tracker() as tracker:
        a = kib(4)
        a.t()[1:].expand(2, 255, 4)
        a.add_(1).mul_(2)
    assert sizes(tracker.trace) == [4]


def test_a_tensor_that_grows_is_a_new_block(mode: None) -> None:
    with Tracker() as tracker:
        a = kib(4)
        a.resize_(8, 256)
    assert sizes(tracker.trace) == [4, -4, 8]


def test_what_lives_on_after_the_end_is_not_followed(mode: None) -> None:
    with Tracker() as tracker:
        a = kib(4)
    del a
    assert sizes(tracker.trace) == [4]
    assert tracker.trace.blocks[0].died == -1


class Two(nn.Module):
    """Two layers in a list, and a head that is not."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.head = nn.Linear(width, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def trained(model: nn.Module, optimizer: Any = None) -> Tracker:
    with Tracker() as tracker:
        tracker.watch(model)
        x = torch.ones(32, 64)
        tracker.label([x], "inputs")
        for _ in range(2):
            tracker.phase("forward")
            loss = model(x).sum()
            tracker.phase("backward")
            loss.backward()
            del loss
            if optimizer:
                with tracker.step():
                    optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None
    return tracker


def test_categories_of_a_training_step(mode: None) -> None:
    model = Two()
    tracker = trained(model, torch.optim.AdamW(model.parameters(), foreach=False))
    series = tracker.trace.by_category()
    weights = (2 * 64 * 64 + 8 * 64) * 4
    assert int(series["weights"].max()) == weights
    assert int(series["gradients"].max()) == weights
    # two moments, and a count of steps of 4 bytes for each tensor
    assert int(series["optimizer state"].max()) == 2 * weights + 3 * 4
    assert int(series["inputs"].max()) == 32 * 64 * 4
    # the outputs of two tanh (the inputs of products are the same tensors)
    assert int(series["saved activations"].max()) >= 2 * 32 * 64 * 4
    total = sum(values for values in series.values())
    assert (total == tracker.trace.allocated()).all()


def test_blocks_know_the_module_that_made_them(mode: None) -> None:
    tracker = trained(Two())
    made = {(b.module, b.operation) for b in tracker.trace.blocks if b.category == "gradients"}
    assert {name for name, _ in made} == {"layers.0", "layers.1", "head"}
    forward = {b.module for b in tracker.trace.blocks if b.operation == "mm"}
    assert {"layers.0", "layers.1", "head"} <= forward
    (first, *_) = holders([b for b in tracker.trace.blocks if b.category == "gradients"])
    assert (first.module, first.nbytes) == ("layers.*", 2 * 2 * 64 * 64 * 4)  # two iterations


def test_phases_say_when_they_begin(mode: None) -> None:
    trace = trained(Two()).trace
    assert [name for _, name in trace.phases] == ["forward", "backward"] * 2
    peak = int(trace.allocated().argmax())
    assert trace.phase_at(peak) == "backward"
    assert trace.phase_at(0) == ""


def test_fake_tensors_leave_the_same_trace_as_real_ones() -> None:
    real = trained(Two()).trace
    with FakeTensorMode():
        fake = trained(Two()).trace
    assert real.events == fake.events
    assert [b.nbytes for b in real.blocks] == [b.nbytes for b in fake.blocks]
    assert [b.category for b in real.blocks] == [b.category for b in fake.blocks]


def test_a_list_of_tensors_is_worked_on_at_once() -> None:
    """A foreach optimizer makes a copy of all that it takes the root of."""
    with FakeTensorMode():
        model = Two()
        tracker = trained(model, torch.optim.AdamW(model.parameters(), foreach=True))
    weights = (2 * 64 * 64 + 8 * 64) * 4
    roots = [b for b in tracker.trace.blocks if b.operation == "_foreach_sqrt"]
    assert sum(b.nbytes for b in roots) == 2 * weights  # in each of two steps
    assert all(b.category == "temporaries" and b.died > 0 for b in roots)


def test_kernels_may_hold_memory_that_nobody_sees() -> None:
    def inside(func: Any, args: tuple, out: Any) -> int:
        return 7 * KIB if func._schema.name == "aten::mul" else 0

    with Tracker(inside) as tracker:
        kib(4) * 2
    assert sizes(tracker.trace)[:4] == [4, 4, 7, -7]
    assert [b.category for b in tracker.trace.blocks][2] == "workspace"


def test_paused_work_is_not_seen_and_what_it_leaves_can_be_taken_up() -> None:
    with Tracker() as tracker:
        with tracker.paused():
            kept = kib(4)
            del kept
            kept = kib(2)
        tracker.label([kept], "KV cache")
    assert sizes(tracker.trace) == [2]
    assert tracker.trace.blocks[0].category == "KV cache"


@pytest.mark.parametrize("truth", [True, False])
def test_a_program_may_ask_whether_a_fake_tensor_is_true(truth: bool) -> None:
    with FakeTensorMode(), Tracker(truth=truth):
        assert bool((torch.ones(3) == 1).all()) is truth
