"""How torch sees the ops: schema, fake tensors, export, compile; and without the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from featherweight import native
from featherweight.errors import UnsupportedError
from featherweight.native import library

OPS = torch.ops.featherweight
needs_native = pytest.mark.skipif(not native.status().available, reason="no native library")


@pytest.fixture(scope="session")
def calls(four_bit: Any, arguments: Any, numbers: Any) -> dict[str, list[tuple[Any, ...]]]:
    """Arguments of each op, several of them."""
    x, grad, bias = numbers(2, 3, 96), numbers(2, 3, 20, seed=1), numbers(20, seed=2)
    weight = numbers(20, 96, seed=3)
    codes, absmax = OPS.quantize_int8(weight)
    plain = arguments(four_bit(weight))
    nested = arguments(four_bit(weight, "fp4", 32, double=True))
    half, code = x.bfloat16(), four_bit(weight).code
    return {
        "linear_int8": [
            (x, codes, absmax, bias, 0.0, False),
            (half, codes, absmax, None, 2.0, False),
            (x[0, 0], codes, absmax, bias, 2.0, True),
        ],
        "linear_int8_backward": [(grad, codes, absmax), (grad.half(), codes, absmax)],
        "linear_4bit": [
            (x, *plain, 20, bias, False),
            (half, *nested, 20, None, False),
            (x[:, :0], *plain, 20, bias, True),
        ],
        "linear_4bit_backward": [(grad, *plain, 96), (grad.bfloat16(), *nested, 96)],
        "linear_half": [(x, weight.half(), bias), (half.mT.contiguous().mT, weight, None)],
        "linear_half_backward": [(grad, weight), (grad.half(), weight.bfloat16())],
        "quantize_4bit": [(weight, code, 64), (numbers(7, 9).half(), code, 32)],
        "quantize_int8": [(weight,), (weight.T,), (weight.half(),)],
        "dequantize_4bit": [
            (*plain, [20, 96], torch.float32),
            (*nested, [4, 5, 96], torch.bfloat16),
        ],
    }


NAMES = [
    *("linear_int8", "linear_int8_backward", "linear_4bit", "linear_4bit_backward"),
    *("linear_half", "linear_half_backward"),
    *("quantize_4bit", "quantize_int8", "dequantize_4bit"),
]


def results(op: Any, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    out = op(*args)
    return out if isinstance(out, tuple) else (out,)


@pytest.mark.parametrize("name", NAMES)
def test_schema_and_shape_rule(name: str, calls: Any) -> None:
    for args in calls[name]:
        torch.library.opcheck(
            getattr(OPS, name).default, args, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("name", NAMES)
def test_fake_and_meta_tensors_have_the_shape_alone(name: str, calls: Any) -> None:
    op = getattr(OPS, name)
    for args in calls[name]:
        expected = results(op, args)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
            found = results(op, tuple(fake))
        meta = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
        for others in (found, results(op, tuple(meta))):
            assert [(o.shape, o.dtype) for o in others] == [(e.shape, e.dtype) for e in expected]
        assert {o.device.type for o in found} == {"cpu"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in NAMES if "quantize_int8" not in name])
def test_a_weight_that_is_not_in_memory_is_refused(name: str, calls: Any) -> None:
    for args in calls[name]:
        second = next(n for n, arg in enumerate(args) if n and isinstance(arg, torch.Tensor))
        for away in (0, second):
            mixed = [a.to("meta") if n == away else a for n, a in enumerate(args)]
            with pytest.raises(UnsupportedError, match=f"{name} got tensors on cpu and meta"):
                getattr(OPS, name)(*mixed)


def test_export_and_compile_give_what_eager_gives(calls: Any) -> None:
    _, codes, absmax, bias, *_ = calls["linear_int8"][0]
    *four_bit, _, _, _ = calls["linear_4bit"][0][1:]
    weight = calls["linear_half"][0][1]

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        out = OPS.linear_int8(x, codes, absmax, bias, 2.0, False)
        out = out + OPS.linear_4bit(x, *four_bit, 20, bias, False)
        return OPS.linear_half_backward(out, weight).relu()

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (2, 11):
        x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows))
        assert torch.equal(compiled(x), function(x))
    shapes = {"x": {0: torch.export.Dim("rows", min=2)}}
    program = torch.export.export(Module(), (x,), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [t.split(".")[1] for t in targets if t.startswith("featherweight")] == [
        "linear_int8",
        "linear_4bit",
        "linear_half_backward",
    ]
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(5))
    assert torch.equal(program.module()(x), function(x))


@needs_native
@pytest.mark.parametrize("name", NAMES)
def test_without_the_library_the_reference_runs(
    name: str, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = getattr(OPS, name)
    with_library = [results(op, args) for args in calls[name]]
    monkeypatch.setattr(library, "_find", lambda: None)
    monkeypatch.setattr(library, "_library", None)
    assert not native.status().available
    for args, expected in zip(calls[name], with_library, strict=True):
        for out, right in zip(results(op, args), expected, strict=True):
            torch.testing.assert_close(out, right)
