"""State dicts of quantised layers: bitsandbytes' names and bytes, both ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from featherweight.errors import ModelError
from featherweight.nn import FourBitLinear, Int8Linear

bnb = pytest.importorskip("bitsandbytes")


def four_bit(weight: torch.Tensor, bias: torch.Tensor | None, **options: Any) -> Any:
    """Their layer, quantised."""
    layer = bnb.nn.Linear4bit(
        weight.shape[1],
        weight.shape[0],
        bias is not None,
        compress_statistics=options.get("double", False),
        quant_type=options.get("quant_type", "nf4"),
        quant_storage=options.get("quant_storage", torch.uint8),
    )
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    if "blocksize" in options:
        layer.weight.blocksize = options["blocksize"]
    layer.weight.data = weight.clone()
    return layer.to("cpu")


def int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """Their layer, quantised."""
    layer = bnb.nn.Linear8bitLt(
        weight.shape[1], weight.shape[0], bias is not None, has_fp16_weights=False
    )
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return layer.to("cpu")


def same(mine: Any, theirs: Any) -> None:
    """Equal names, dtypes, shapes and bits."""
    assert set(mine) == set(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype is tensor.dtype, name
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("double", [True, False], ids=["double", "single"])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("blocksize", [32, 64, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_4_bit_layer_is_theirs(
    numbers: Any, double: bool, quant_type: str, blocksize: int, dtype: torch.dtype
):
    weight, bias = numbers(48, 128).to(dtype), numbers(48, seed=1)
    options: Any = {"double": double, "quant_type": quant_type, "blocksize": blocksize}
    theirs = four_bit(weight, bias, **options).state_dict()
    mine = FourBitLinear.from_weight(weight, bias, **options)
    same(mine.state_dict(), theirs)
    empty = FourBitLinear(128, 48)
    empty.load_state_dict(theirs)
    same(empty.state_dict(), theirs)
    x = numbers(3, 128, seed=2)
    assert torch.equal(empty(x), mine(x))


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32, torch.int8], ids=str)
def test_codes_under_another_dtype_stay_there(numbers: Any, storage: torch.dtype):
    theirs = four_bit(numbers(48, 128), None, quant_storage=storage, double=True).state_dict()
    assert theirs["weight"].dtype is storage
    layer = FourBitLinear(128, 48, bias=False)
    layer.load_state_dict(theirs)
    assert layer.weight.dtype is torch.uint8
    same(layer.state_dict(), theirs)
    mine = FourBitLinear.from_weight(numbers(48, 128), double=True)
    assert torch.equal(layer.dequantize(), mine.dequantize())


@pytest.mark.parametrize("old", [False, True], ids=["new", "without weight_format"])
def test_an_8_bit_layer_is_theirs(numbers: Any, old: bool):
    weight, bias = numbers(48, 128).half().float(), numbers(48, seed=1)
    theirs = int8(weight, bias).state_dict()
    same(Int8Linear.from_weight(weight, bias).state_dict(), theirs)
    layer = Int8Linear(128, 48)
    layer.load_state_dict({k: v for k, v in theirs.items() if not (old and k == "weight_format")})
    same(layer.state_dict(), theirs)


def test_a_layer_without_weights_has_names_alone():
    for make in (FourBitLinear, Int8Linear):
        assert set(make(64, 32, device="meta").state_dict()) == {"weight", "bias"}


def test_loading_takes_over_or_copies(numbers: Any):
    stored = FourBitLinear.from_weight(numbers(32, 64)).state_dict()
    for assign in (False, True):  # torch keeps True in the state dict
        layer = FourBitLinear(64, 32, bias=False)
        layer.load_state_dict(stored, assign=assign)
        shared = layer.absmax.data_ptr() == stored["weight.absmax"].data_ptr()
        assert shared is assign
    kept = layer.weight
    layer.load_state_dict(stored)
    assert layer.weight is kept  # the parameter is the same object


def broken(stored: dict[str, torch.Tensor], name: str, change: Any) -> dict[str, torch.Tensor]:
    """A state dict with one tensor changed, or taken out."""
    changed = dict(stored)
    value = changed.pop(name)
    return changed if change is None else changed | {name: change(value)}


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("weight.absmax", None, "'weight.absmax' is missing"),
        ("weight.absmax", lambda t: t[1:], r"'weight.absmax' is uint8 \[31\], where uint8 \[32\]"),
        ("weight.absmax", lambda t: t.float(), r"'weight.absmax' is float32 \[32\], where uint8"),
        ("weight.nested_absmax", None, "'weight.nested_absmax' is missing"),
        ("weight.nested_absmax", lambda t: t / 0, "'weight.nested_absmax' has NaN or infinity"),
        ("weight.nested_quant_map", lambda t: t[:16], r"is float32 \[16\], where float32 \[256\]"),
        ("weight.quant_map", lambda t: t * torch.nan, "'weight.quant_map' has NaN or infinity"),
        ("weight", lambda t: t[1:], r"'weight' is uint8 \[1023, 1\], 1023 bytes; .* take 1024"),
        ("weight.quant_state.bitsandbytes__nf4", None, "one tensor 'weight.quant_state.*is none"),
        (
            "weight.quant_state.bitsandbytes__nf4",
            lambda t: t[:-1],
            "'weight.quant_state.bitsandbytes__nf4': it is no JSON",
        ),
    ],
)
def test_a_damaged_4_bit_layer(numbers: Any, name: str, change: Any, says: str):
    stored = FourBitLinear.from_weight(numbers(32, 64), double=True).state_dict()
    layer = FourBitLinear(64, 32, bias=False)
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    with pytest.raises(ModelError, match=says):
        layer.take(broken(stored, name, change))
    same(layer.state_dict(), before)  # nothing was taken
    with pytest.raises(RuntimeError, match=says):
        layer.load_state_dict(broken(stored, name, change))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("SCB", None, "'SCB' is missing"),
        ("SCB", lambda t: t * torch.inf, "'SCB' has NaN or infinity"),
        ("weight", lambda t: t.T, r"'weight' is int8 \[64, 32\], where int8 \[32, 64\] belongs"),
        ("weight", lambda t: t.float(), "'weight' is float32"),
        ("weight_format", lambda t: t + 2, "'weight_format' is 2: codes in the order of some GPU"),
    ],
)
def test_a_damaged_8_bit_layer(numbers: Any, name: str, change: Any, says: str):
    stored = Int8Linear.from_weight(numbers(32, 64)).state_dict()
    with pytest.raises(ModelError, match=says):
        Int8Linear(64, 32, bias=False).take(broken(stored, name, change))


def test_a_tensor_too_many_and_a_bias_that_does_not_fit(numbers: Any):
    stored = Int8Linear.from_weight(numbers(32, 64)).state_dict()
    with pytest.raises(RuntimeError, match=r"'weight\.absmax' is no tensor of such a layer"):
        Int8Linear(64, 32, bias=False).load_state_dict(stored | {"weight.absmax": numbers(32)})
    with pytest.raises(RuntimeError, match=r"'bias' is \[31\], and the layer has a bias of \[32\]"):
        Int8Linear(64, 32).load_state_dict(stored | {"bias": numbers(31)})
    with pytest.raises(RuntimeError, match=r"'bias' is \[32\], and the layer has no bias"):
        Int8Linear(64, 32, bias=False).load_state_dict(stored | {"bias": numbers(32)})


@pytest.mark.parametrize("make", [FourBitLinear, Int8Linear])
def test_a_dense_layer_of_what_the_codes_stand_for(numbers: Any, make: Any):
    layer = make.from_weight(numbers(32, 64), numbers(32, seed=1)).eval()
    dense = layer.to_dense(torch.bfloat16)
    assert type(dense) is torch.nn.Linear
    assert not dense.training
    assert torch.equal(dense.weight, layer.dequantize().bfloat16())
    assert torch.equal(dense.bias, numbers(32, seed=1).bfloat16())


def test_quantising_again(numbers: Any):
    for layer in (FourBitLinear(64, 32, double=True), Int8Linear(64, 32)):
        kept = layer.weight
        layer.quantise(numbers(32, 64))
        assert layer.weight is kept
        error = (layer.dequantize() - numbers(32, 64)).abs().max()
        assert error < 0.16 * numbers(32, 64).abs().max()
