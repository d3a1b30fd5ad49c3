"""What every linear layer of light weights does, whatever its format."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear

from featherweight.errors import UnsupportedError


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of what is right."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def same_tensors(one: nn.Module, other: nn.Module) -> bool:
    """Whether two layers hold the same bits."""
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert value.dtype is theirs[name].dtype, name
        assert torch.equal(value, theirs[name]), name
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_it_multiplies_as_the_dequantised_weight_does(
    make: Any, tolerance: float, dtype: torch.dtype, numbers: Any
):
    weight, bias, x = numbers(48, 96), numbers(48, seed=1), numbers(5, 96, seed=2).to(dtype)
    layer = make(weight, bias)
    expected = linear(x.float(), layer.dequantize(), bias)
    found = layer(x)
    assert found.dtype is dtype
    rounding = {torch.float32: 0, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    assert relative(found, expected) < tolerance + rounding
    assert torch.equal(layer(x[None, :, None]), found[None, :, None])


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 100)),
    leading=st.lists(st.integers(0, 4), max_size=3),
    has_bias=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_any_shape(
    make: Any, numbers: Any, shape: tuple[int, int], leading: list[int], has_bias: bool
):
    weight, bias = numbers(*shape), numbers(shape[0], seed=1) if has_bias else None
    layer = make(weight, bias)
    x = numbers(*leading, shape[1], seed=2)
    found = layer(x)
    assert found.shape == (*leading, shape[0])
    expected = linear(x, layer.dequantize(), bias)
    # Half a step of 8 bits for each activation, at worst all to one side.
    largest = x.abs().max() if x.numel() else torch.tensor(0.0)
    bound = largest / 254 * layer.dequantize().abs().sum(1).max() * 1.05 + 1e-4
    assert ((found - expected).abs() <= bound).all()


def test_the_weight_is_near_the_original(make: Any, kind: str, numbers: Any):
    weight = numbers(32, 64)
    largest = {"int8": 0.008, "nf4": 0.1, "fp4": 0.14, "bf16": 0.0021, "fp16": 0.0003}
    found = relative(make(weight).dequantize(), weight)
    assert largest[kind.split("-")[0]] / 4 < found < largest[kind.split("-")[0]]


@torch.no_grad()
def test_a_row_does_not_depend_on_its_neighbours(make: Any, kind: str, numbers: Any):
    layer, x = make(numbers(32, 64), None), numbers(9, 64, seed=2)
    x[3, 7] = 100.0
    alone = torch.cat([layer(row) for row in x.split(1)])
    difference = (layer(x) - alone).abs().amax(1) / alone.abs().amax(1)
    if kind == "int8-per-batch":  # as in bitsandbytes: row 3 makes column 7 float in every row
        assert (difference > 1e-3).sum() > 4
    else:
        assert (difference < 1e-5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_inputs_gradient_is_that_of_the_dequantised_layer(
    make: Any, dtype: torch.dtype, numbers: Any
):
    layer = make(numbers(48, 96), numbers(48, seed=1))
    x = numbers(2, 5, 96, seed=2).to(dtype)
    toward = numbers(2, 5, 48, seed=3).to(dtype)
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(mine).backward(toward)
    linear(theirs.float(), layer.dequantize()).backward(toward.float())
    assert mine.grad is not None
    assert theirs.grad is not None
    assert mine.grad.dtype is dtype
    assert relative(mine.grad, theirs.grad) < (1e-6 if dtype is torch.float32 else 5e-3)
    assert all(p.grad is None for p in layer.parameters())


def test_gradients_of_sums_and_of_no_rows(make: Any, numbers: Any):
    layer = make(numbers(48, 96), None)
    x = numbers(5, 96, seed=2).requires_grad_()
    layer(x).sum().backward()  # the gradient comes expanded: strides of 0
    expected = layer.dequantize().sum(0).expand(5, 96)
    torch.testing.assert_close(x.grad, expected, rtol=1e-4, atol=1e-4)
    none = torch.zeros(0, 96, requires_grad=True)
    layer(none).sum().backward()
    assert none.grad is not None
    assert none.grad.shape == (0, 96)


@pytest.mark.parametrize("x_needs_it", [True, False], ids=["input-too", "bias-alone"])
def test_a_bias_can_be_trained(make: Any, x_needs_it: bool, numbers: Any):
    bias = nn.Parameter(numbers(48, seed=1))
    layer, x = make(numbers(48, 96), bias), numbers(5, 96, seed=2)
    assert layer.bias is bias
    with torch.no_grad():
        expected = layer(x)
    found = layer(x.requires_grad_(x_needs_it))
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert torch.equal(bias.grad, torch.full((48,), 5.0))
    assert (x.grad is not None) is x_needs_it


def test_weights_are_frozen(make: Any, numbers: Any):
    layer = make(numbers(48, 96), numbers(48, seed=1))
    assert not layer.weight.requires_grad
    assert not layer.bias.requires_grad  # it came as a plain tensor
    assert not layer(numbers(2, 96)).requires_grad


def test_state_dict_deepcopy_and_pickle_keep_every_bit(make: Any, numbers: Any, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    layer, x = make(numbers(48, 96), numbers(48, seed=1)), numbers(3, 96, seed=2)
    other = make(numbers(48, 96, seed=3), numbers(48, seed=4))
    assert not torch.equal(other(x), layer(x))
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    for again in (other, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same_tensors(again, layer)
        assert torch.equal(again(x), layer(x))
        assert repr(again) == repr(layer)


def test_a_copy_shares_nothing(make: Any, numbers: Any):
    layer = make(numbers(48, 96), numbers(48, seed=1))
    mine, theirs = ([*m.parameters(), *m.buffers()] for m in (layer, copy.deepcopy(layer)))
    assert not {t.data_ptr() for t in mine} & {t.data_ptr() for t in theirs}


@pytest.mark.parametrize("name", ["half", "bfloat16", "double"])
def test_casting_a_model_leaves_codes_and_scales(make: Any, kind: str, name: str, numbers: Any):
    model = nn.Sequential(make(numbers(48, 96), numbers(48, seed=1)), nn.LayerNorm(48))
    before = dict(model.named_buffers())
    codes = model[0].weight.clone()
    getattr(model, name)()
    dtype = {"half": torch.float16, "bfloat16": torch.bfloat16, "double": torch.float64}[name]
    assert model[1].weight.dtype is model[0].bias.dtype is dtype
    for buffer_name, buffer in model.named_buffers():
        assert buffer.dtype is before[buffer_name].dtype
        assert torch.equal(buffer, before[buffer_name])
    if kind not in ("bf16", "fp16"):
        assert torch.equal(model[0].weight, codes)
    if name != "double":
        assert model(numbers(3, 96, seed=2).to(dtype)).isfinite().all()


def test_a_device_is_followed(make: Any, numbers: Any):
    layer = make(numbers(48, 96), numbers(48, seed=1)).to("meta", torch.float16)
    tensors = [*layer.parameters(), *layer.buffers()]
    assert {t.device.type for t in tensors} == {"meta"}
    assert all(b.dtype in (torch.float32, torch.uint8) for b in layer.buffers())
    assert layer(torch.empty(2, 3, 96, device="meta")).shape == (2, 3, 48)
    assert {t.device.type for t in layer.to_empty(device="cpu").parameters()} == {"cpu"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(make: Any, value: float, numbers: Any):
    weight = numbers(48, 96)
    weight[47, 95] = value
    with pytest.raises(UnsupportedError):
        make(weight, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@torch.no_grad()
def test_an_activation_that_is_not_finite_gives_no_number(make: Any, value: float, numbers: Any):
    layer, x = make(numbers(48, 96), None), numbers(3, 96, seed=2)
    x[1, 40] = value
    found = layer(x)
    assert not found[1].isfinite().any()
    if not getattr(layer, "per_batch", False):
        assert found[[0, 2]].isfinite().all()


def test_a_weight_that_is_transposed_is_taken_in_order(make: Any, numbers: Any):
    weight = numbers(96, 48)
    assert same_tensors(make(weight.T, None), make(weight.T.clone(), None))


@pytest.mark.timeout(300)
def test_compile_and_export_see_one_op(make: Any, numbers: Any):
    layer, x = make(numbers(48, 96), numbers(48, seed=1)), numbers(3, 96, seed=2)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), layer(x))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(mine).square().sum().backward()
    layer(theirs).square().sum().backward()
    assert torch.equal(mine.grad, theirs.grad)
    program = torch.export.export(layer, (x,))
    ops = [str(node.target) for node in program.graph.nodes if "featherweight" in str(node.target)]
    assert len(ops) == 1
    assert torch.equal(program.module()(x), layer(x))
