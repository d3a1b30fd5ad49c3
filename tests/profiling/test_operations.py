"""Group, FLOPs and bytes of ops, against counts made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import featherweight.nn.functional as products
from featherweight.profiling.counting import BACKWARD, Call, Counter, watching
from featherweight.profiling.operations import (
    CONTRACTION,
    ELEMENTWISE,
    NORMALISATION,
    UNKNOWN,
    attention_backward_flops,
    attention_flops,
    nbytes,
)


def calls(work: Any, *args: Any, **kwargs: Any) -> list[Call]:
    """What `work(*args, **kwargs)` does."""
    counter = Counter()
    with watching(counter), torch.no_grad():
        work(*args, **kwargs)
    return counter.calls


def only(work: Any, *args: Any, **kwargs: Any) -> Call:
    found = calls(work, *args, **kwargs)
    assert len(found) == 1, found
    return found[0]


def test_a_product_is_2mnk_and_moves_three_matrices() -> None:
    call = only(torch.mm, torch.ones(3, 5), torch.ones(5, 7))
    assert (call.name, call.cost.group) == ("mm", CONTRACTION)
    assert call.cost.flops == 2 * 3 * 5 * 7
    assert call.cost.read == 4 * (3 * 5 + 5 * 7)
    assert call.cost.written == 4 * 3 * 7
    assert call.cost.arithmetic == "float32"


def test_a_bias_is_read_once_not_once_a_row() -> None:
    call = only(torch.addmm, torch.ones(7), torch.ones(3, 5), torch.ones(5, 7))
    assert (call.name, call.cost.flops) == ("addmm", 2 * 3 * 5 * 7)
    assert call.cost.read == 4 * (7 + 3 * 5 + 5 * 7)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_composite_ops_are_taken_apart_in_every_mode(mode: Any) -> None:
    counter = Counter()
    with watching(counter), mode():
        F.linear(torch.ones(2, 3, 5), torch.ones(7, 5))
    assert [call.name for call in counter.calls] == ["ones", "ones", "mm"]
    assert counter.calls[-1].cost.flops == 2 * 6 * 5 * 7


def test_a_batched_product_and_a_convolution() -> None:
    assert only(torch.bmm, torch.ones(2, 3, 5), torch.ones(2, 5, 7)).cost.flops == 2 * 2 * 3 * 5 * 7
    call = only(torch.conv1d, torch.ones(1, 4, 10), torch.ones(6, 4, 3))
    assert (call.cost.group, call.cost.flops) == (CONTRACTION, 2 * 8 * 6 * 4 * 3)


def test_flash_attention_on_a_cpu_counts_both_products() -> None:
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 16, 8)
    call = only(F.scaled_dot_product_attention, q, k, k, is_causal=True)
    assert call.name == "_scaled_dot_product_flash_attention_for_cpu"
    assert call.cost.flops == 4 * 2 * 4 * 16**2 * 8
    assert call.cost.read == 4 * (q.numel() + k.numel())  # k and v are one tensor here
    assert call.cost.written == 4 * (q.numel() + 2 * 4 * 16)  # result and logsumexp


def test_grouped_attention_counts_all_query_heads() -> None:
    assert attention_flops((1, 9, 32, 64), (1, 3, 48, 64), (1, 3, 48, 64)) == 4 * 9 * 32 * 48 * 64


def test_flash_backward_is_two_and_a_half_times_forward() -> None:
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    counter = Counter()
    with watching(counter):
        out = F.scaled_dot_product_attention(q, k, v)
        counter.phase = BACKWARD
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    flops = {call.phase: call.cost.flops for call in counter.calls if call.cost.flops}
    assert flops["backward"] == 2.5 * flops["forward"] == 10 * 2 * 4 * 16**2 * 8
    shape = (2, 4, 16, 8)
    assert attention_backward_flops(shape, shape, shape) == flops["backward"]


def test_a_linear_layer_costs_twice_as_much_backward() -> None:
    layer = torch.nn.Linear(32, 48)
    x = torch.randn(5, 32, requires_grad=True)
    counter = Counter()
    with watching(counter):
        out = layer(x)
        counter.phase = BACKWARD
        torch.autograd.grad(out, (x, *layer.parameters()), torch.ones_like(out))
    flops = {"forward": 0, "backward": 0}
    for call in counter.calls:
        if call.cost.group == CONTRACTION:
            flops[call.phase] += call.cost.flops
    assert flops == {"forward": 2 * 5 * 32 * 48, "backward": 2 * 2 * 5 * 32 * 48}


def test_our_linear_ops_and_the_dtype_of_their_products() -> None:
    x = torch.randn(3, 64)
    codes, absmax = torch.ones(32, 64, dtype=torch.int8), torch.ones(32)
    call = only(products.linear_int8, x, codes, absmax)
    assert (call.name, call.cost.group) == ("featherweight::linear_int8", CONTRACTION)
    assert (call.cost.flops, call.cost.arithmetic) == (2 * 3 * 64 * 32, "int8")
    assert call.cost.read == 4 * 3 * 64 + 32 * 64 + 4 * 32
    half = only(products.linear_half, x, torch.ones(32, 64, dtype=torch.bfloat16))
    assert (half.cost.flops, half.cost.arithmetic) == (2 * 3 * 64 * 32, "float32")
    four = (torch.zeros(32 * 64 // 2, dtype=torch.uint8), torch.ones(32), None, None, 0.0)
    call = only(products.linear_4bit, x, *four, torch.ones(16), 64, 32)
    assert (call.cost.flops, call.cost.arithmetic) == (2 * 3 * 64 * 32, "int8")
    exact = only(products.linear_4bit, x, *four, torch.ones(16), 64, 32, None, True)
    assert exact.cost.arithmetic == "float32"


def test_gradients_through_our_linear_ops_cost_one_more_product() -> None:
    x = torch.randn(3, 64, requires_grad=True)
    counter = Counter()
    with watching(counter):
        out = products.linear_int8(x, torch.ones(32, 64, dtype=torch.int8), torch.ones(32))
        counter.phase = BACKWARD
        torch.autograd.grad(out, x, torch.ones_like(out))
    found = [(c.phase, c.cost.flops) for c in counter.calls if c.cost.group == CONTRACTION]
    assert found == [("forward", 2 * 3 * 64 * 32), ("backward", 2 * 3 * 64 * 32)]


X = torch.randn(4, 6)
ROWS = torch.tensor([0, 2])


@pytest.mark.parametrize(
    ("work", "group", "flops", "read", "written"),
    [
        (lambda: X + X.T.contiguous().T, ELEMENTWISE, 24, 192, 96),
        (lambda: X * 2, ELEMENTWISE, 24, 96, 96),
        (lambda: F.silu(X), ELEMENTWISE, 24, 96, 96),
        (lambda: X.clone(), ELEMENTWISE, 0, 96, 96),
        (lambda: X.to(torch.bfloat16), ELEMENTWISE, 0, 96, 48),
        (lambda: torch.cat([X, X[:2]]), ELEMENTWISE, 0, 144, 144),
        (lambda: F.embedding(ROWS, X), ELEMENTWISE, 0, 16 + 48, 48),
        (lambda: X[ROWS], ELEMENTWISE, 0, 16 + 48, 48),
        (lambda: torch.zeros(4, 6), ELEMENTWISE, 0, 0, 96),
        (lambda: torch.ones_like(X), ELEMENTWISE, 0, 0, 96),
        (lambda: X.mean(-1), NORMALISATION, 24, 96, 16),
        (lambda: torch.rsqrt(X), NORMALISATION, 24, 96, 96),
        (lambda: X.softmax(-1), NORMALISATION, 5 * 24, 96, 96),
        (lambda: torch.arange(4) + 1, ELEMENTWISE, 0, 32, 32),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_groups_flops_and_bytes(work: Any, group: str, flops: int, read: int, written: int) -> None:
    cost = calls(work)[-1].cost
    assert (cost.group, cost.flops, cost.read, cost.written) == (group, flops, read, written)


def test_layer_norm_counts_its_formula() -> None:
    call = only(F.layer_norm, X, (6,), torch.ones(6), torch.zeros(6))
    assert (call.name, call.cost.group) == ("native_layer_norm", NORMALISATION)
    assert call.cost.flops == 7 * 24
    assert call.cost.read == 4 * (24 + 6 + 6)


def test_in_place_ops_write_what_they_are_given() -> None:
    target = torch.zeros(4, 6)
    added = only(target.add_, X).cost
    assert (added.read, added.written) == (192, 96)
    copied = only(target.copy_, X).cost
    assert (copied.read, copied.written) == (96, 96)
    placed = only(target.index_copy_, 0, ROWS, X[:2]).cost
    assert (placed.read, placed.written) == (16 + 48, 48)


def test_views_and_empty_tensors_are_no_work() -> None:
    assert calls(lambda: X.view(24)[2:].unsqueeze(0).expand(3, -1)) == []
    assert calls(lambda: torch.empty(5)) == []


def test_repeated_elements_are_bytes_once() -> None:
    assert nbytes(torch.ones(1, 6).expand(4, 6)) == 24
    assert nbytes(torch.ones(4, 6)) == 96
    assert nbytes(torch.ones(0, 6)) == 0


def test_an_op_without_a_rule_is_listed_as_such() -> None:
    call = calls(torch.linalg.cholesky_ex, torch.eye(3))[-1]
    assert (call.name, call.cost.group, call.cost.flops) == ("linalg_cholesky_ex", UNKNOWN, 0)
    assert call.cost.read == 36
