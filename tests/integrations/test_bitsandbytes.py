"""bitsandbytes' layers and models on our kernels, and switching them on and off."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from featherweight.integrations import bitsandbytes as backend
from featherweight.measure.child import Child

bnb = pytest.importorskip("bitsandbytes")
OPS = ["gemm_4bit", "gemv_4bit", "dequantize_4bit"]
OPS += ["int8_vectorwise_quant", "int8_scaled_mm", "int8_mixed_scaled_mm"]
LEADING = [(1,), (2, 3), (0,), (2, 0)]  # of what bitsandbytes' int8 layer takes, too
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    backend.disable()


def both(work: Callable[[], Any]) -> tuple[Any, Any]:
    """What bitsandbytes' own kernels answer, and ours."""
    backend.disable()
    stock = work()
    backend.enable()
    ours = work()
    backend.disable()
    return stock, ours


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative difference."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def layer(kind: str, weight: torch.Tensor, bias: bool = False, **options: Any) -> nn.Module:
    """A bitsandbytes layer with this weight, in eval mode."""
    rows, columns = weight.shape
    if kind == "int8":
        threshold = options.get("threshold", 6.0)
        made = bnb.nn.Linear8bitLt(
            columns, rows, bias=bias, has_fp16_weights=False, threshold=threshold
        )
        made.weight = bnb.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
    else:
        made = bnb.nn.Linear4bit(columns, rows, bias=bias, quant_type=kind, **options)
        made.weight = bnb.nn.Params4bit(
            weight.clone(), requires_grad=False, quant_type=kind, module=made
        )
    if bias:
        made.bias = nn.Parameter(numbers(rows, seed=9))
    return made.to("cpu").eval()


# layers


@pytest.mark.parametrize(
    ("kind", "leading"),
    [
        *((kind, leading) for kind in ("nf4", "fp4") for leading in ((), (2, 2, 3))),
        *((kind, leading) for kind in ("nf4", "fp4", "int8") for leading in LEADING),
    ],
)
def test_layers_of_every_batch_shape(kind: str, leading: tuple[int, ...]) -> None:
    weight, x = numbers(64, 128, seed=1), numbers(*leading, 128, seed=2)
    made = layer(kind, weight, bias=True)
    backend.enable()
    found = made(x)
    assert found.shape == (*leading, 64)
    if found.numel():
        assert rms(found, linear(x, weight, made.bias)) < 0.25


def held(layer: Any) -> list[tuple[int, torch.Size, torch.dtype, bytes]]:
    """Codes and scales: where they lie, and what they are."""
    state = layer.weight.quant_state
    tensors = [layer.weight.data, state.absmax, state.code, state.state2.absmax, state.state2.code]
    return [
        (t.data_ptr(), t.shape, t.dtype, t.view(torch.uint8).numpy().tobytes()) for t in tensors
    ]


def test_nothing_is_repacked_or_kept_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)
    before = layer("nf4", numbers(64, 128, seed=1))
    backend.enable()
    meanwhile = layer("nf4", numbers(64, 128, seed=1))
    for made in (before, meanwhile):
        stored = held(made)
        for m in (1, 20):
            made(numbers(m, 128, seed=2))
        assert held(made) == stored
        assert not getattr(made.weight.quant_state, "packing_format_for_cpu", False)
    backend.disable()
    for made in (before, meanwhile):
        assert made.support_avx512bf16_for_cpu is True


@pytest.mark.skipif(
    not bnb.functional.has_avx512bf16(), reason="bitsandbytes repacks only with AVX512-BF16"
)
def test_layers_that_were_repacked_before_stay_on_stock() -> None:
    made, x = layer("nf4", numbers(64, 128, seed=1), bias=True), numbers(3, 128, seed=2)
    expected = made(x)
    assert made.weight.quant_state.packing_format_for_cpu
    backend.enable()
    assert torch.equal(made(x), expected)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_are_stocks(kind: str, dtype: torch.dtype) -> None:
    made = layer(kind, numbers(64, 128, seed=1), bias=True).train()
    x, grad = numbers(2, 5, 128, seed=2, dtype=dtype), numbers(2, 5, 64, seed=3, dtype=dtype)

    def work() -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        out = made(leaf)
        out.backward(grad)
        return out.detach(), leaf.grad

    stock, ours = both(work)
    assert rms(ours[0], stock[0]) < 0.02
    assert torch.equal(ours[1], stock[1])


def test_int8_layers_say_once_that_they_cast(caplog: pytest.LogCaptureFixture) -> None:
    made, x = layer("int8", numbers(64, 128, seed=1)), numbers(1, 128)
    for switch, times in ((backend.disable, 3), (backend.enable, 1), (backend.disable, 3)):
        switch()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                made(x)
        assert sum("inputs will be cast" in line for line in caplog.messages) == times


# switching


def test_off_is_stock_again_to_the_last_kernel() -> None:
    dumps = [torch._C._dispatch_dump(f"bitsandbytes::{name}") for name in OPS]
    attributes = dict(vars(bnb.nn.Linear4bit))
    made, x = layer("int8", numbers(64, 128, seed=1)), numbers(3, 128)
    expected = made(x)
    for _ in range(2):
        backend.enable()
        backend.enable()
        assert backend.enabled()
        assert not torch.equal(made(x), expected)
        backend.disable()
        backend.disable()
        assert not backend.enabled()
        assert torch.equal(made(x), expected)
    assert [torch._C._dispatch_dump(f"bitsandbytes::{name}") for name in OPS] == dumps
    assert dict(vars(bnb.nn.Linear4bit)) == attributes


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter; variables that are "" are unset."""
    merged = {k: v for k, v in (os.environ | environment).items() if environment.get(k) != ""}
    return subprocess.run(
        [sys.executable, "-c", code], env=merged, capture_output=True, text=True, timeout=110
    )


AUTOLOAD = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import bitsandbytes
from featherweight.integrations import bitsandbytes as backend
print(backend.enabled())
for warning in caught:
    if "FEATHERWEIGHT" in str(warning.message):
        print(warning.category.__name__, warning.message)
"""


def test_the_variable_switches_it_on_when_bitsandbytes_is_imported() -> None:
    assert run(AUTOLOAD, FEATHERWEIGHT_BNB="1").stdout.split() == ["True"]
    explicit = "import bitsandbytes, featherweight.bitsandbytes as b; print(b.enabled())"
    for value in ("1", "0", ""):
        assert run(explicit, FEATHERWEIGHT_BNB=value).stdout.split() == ["True"]


@pytest.mark.parametrize("value", ["", "0", "yes"])
def test_otherwise_it_stays_off_and_imports_next_to_nothing(value: str) -> None:
    code = """
import sys, bitsandbytes
print(*sorted(name for name in sys.modules if name.startswith("featherweight")))
"""
    done = run(code, FEATHERWEIGHT_BNB=value)
    names = ["", ".integrations", ".integrations.bitsandbytes"]
    assert done.stdout.split() == [f"featherweight{name}" for name in names]


def test_without_kernels_stock_stays_and_a_warning_says_why() -> None:
    done = run(AUTOLOAD, FEATHERWEIGHT_BNB="1", FEATHERWEIGHT_ISA="nonsense")
    on, *said = done.stdout.splitlines()
    assert on == "False"
    [line] = said
    assert line.startswith("RuntimeWarning FEATHERWEIGHT_BNB=1 has no effect: ")
    assert "'nonsense' is unknown" in line
    done = run("import featherweight.bitsandbytes", FEATHERWEIGHT_ISA="nonsense")
    assert done.returncode == 1
    assert "NativeError: bitsandbytes cannot run on Featherweight's kernels" in done.stderr


def test_what_compare_measures_is_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEATHERWEIGHT_BNB", "1")
    with Child(threads=1, seed=0) as child:
        assert psutil.Process(child.pid).environ()["FEATHERWEIGHT_BNB"] == "0"


def test_env_says_which_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from featherweight.cli.env import _backend

    monkeypatch.delenv("FEATHERWEIGHT_BNB", raising=False)
    assert _backend().startswith("its own kernels; these with FEATHERWEIGHT_BNB=1")
    monkeypatch.setenv("FEATHERWEIGHT_BNB", "1")
    assert _backend() == "these kernels, by FEATHERWEIGHT_BNB=1"


@pytest.mark.parametrize("recipe", ["bnb-nf4", "bnb-int8"])
def test_a_receipt_names_the_kernels(tiny_llama: Path, recipe: str, read: Any) -> None:
    import featherweight as fw

    said = "bitsandbytes' products"
    with fw.apply(read(tiny_llama), recipe) as applied:
        assert said not in applied.receipt.actual
    backend.enable()
    with fw.apply(read(tiny_llama), recipe) as applied:
        assert "Featherweight's backend" in applied.receipt.actual[said]


# the real model


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_8bit": True},
        {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    ],
    ids=["nf4", "nf4-double", "int8", "int8-0"],
)
@torch.no_grad()
def test_the_real_model_says_the_same(
    smollm2: str, options: dict[str, Any], read: Any, tmp_path: Path
) -> None:
    from pydoc_data.topics import topics

    from transformers import BitsAndBytesConfig

    from featherweight.models import load

    loaded = load(smollm2)
    loaded.model.save_pretrained(tmp_path)
    ids = loaded.tokenizer(topics["assignment"], return_tensors="pt").input_ids[:, :96]
    exact = loaded.model(ids).logits.log_softmax(-1)
    del loaded
    backend.enable()  # first: stock may repack what it has seen
    model = read(tmp_path, quantization_config=BitsAndBytesConfig(**options))
    bytes_before = sum(t.nbytes for t in model.state_dict().values())
    ours = model(ids).logits.log_softmax(-1)
    again = model(ids).logits.log_softmax(-1)
    assert torch.equal(again, ours)
    assert sum(t.nbytes for t in model.state_dict().values()) == bytes_before
    backend.disable()
    stock = model(ids).logits.log_softmax(-1)

    def divergence(found: torch.Tensor) -> float:
        return float((exact.exp() * (exact - found)).sum(-1).mean())

    def same(found: torch.Tensor) -> float:
        return float((found.argmax(-1) == exact.argmax(-1)).float().mean())

    assert divergence(ours) < 1.1 * divergence(stock) + 0.01
    assert same(ours) > same(stock) - 0.05
