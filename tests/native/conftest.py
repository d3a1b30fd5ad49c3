"""Every instruction set that runs here; weights as the ops take them; how close is right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from featherweight import native
from featherweight.native import ops  # noqa: F401, it registers torch.ops.featherweight
from featherweight.quant.blockdot import linear_4bit
from featherweight.quant.blockwise import FourBit, dequantize_4bit, quantize_4bit
from featherweight.quant.codebooks import codebook
from featherweight.quant.int8 import linear_int8, quantize_rows
from featherweight.quant.nested import Nested

STATUS = native.status()
ISAS = [isa for isa in STATUS.built if isa in STATUS.detected]
OPS = torch.ops.featherweight
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = [
    *("int8", "int8-outliers", "int8-batch"),
    *("nf4", "nf4-nested", "nf4-exact", "fp4-32", "random"),
    *FLOATS,
]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn; in use while the test runs."""
    with native.forced_isa(request.param):
        yield request.param


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """N(0, 1), always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(name="numbers", scope="session")
def numbers_fixture() -> Callable[..., torch.Tensor]:
    """`numbers(*shape, seed=0, dtype=torch.float32)`."""
    return numbers


def rows(
    m: int, columns: int, layout: str, seed: int = 0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Activations, m rows of them, in other shapes and strides than [M, K]."""
    match layout:
        case "single":  # the rest is left out
            return numbers(columns, seed=seed, dtype=dtype)
        case "halves":
            return numbers(2, m // 2, columns, seed=seed, dtype=dtype)
        case "ones":
            return numbers(1, m, 1, columns, seed=seed, dtype=dtype)
        case "transposed":
            return numbers(columns, m, seed=seed, dtype=dtype).T
        case "sliced":
            return numbers(m, 2 * columns + 1, seed=seed, dtype=dtype)[:, 1::2]
        case "expanded":
            return numbers(1, columns, seed=seed, dtype=dtype).expand(m, columns)
        case "shifted":  # contiguous, but no multiple of a vector from where memory begins
            return numbers(m * columns + 1, seed=seed, dtype=dtype)[1:].view(m, columns)
    return numbers(m, columns, seed=seed, dtype=dtype)


@pytest.fixture(name="rows", scope="session")
def rows_fixture() -> Callable[..., torch.Tensor]:
    """`rows(m, columns, layout, seed=0, dtype=torch.float32)`."""
    return rows


def random_code(seed: int) -> torch.Tensor:
    """Sixteen values in any order, the largest of magnitude 1."""
    code = torch.rand(16, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return code / code.abs().max()


def four_bit(
    weight: torch.Tensor, name: str = "nf4", blocksize: int = 64, double: bool = False
) -> FourBit:
    """A weight quantised with a codebook of that name, or one drawn by lot."""
    code = random_code(weight.numel()) if name == "random" else codebook(name)
    return quantize_4bit(weight, code, blocksize, double)


@pytest.fixture(name="four_bit", scope="session")
def four_bit_fixture() -> Callable[..., FourBit]:
    """`four_bit(weight, name="nf4", blocksize=64, double=False)`; name may be "random"."""
    return four_bit


def arguments(q: FourBit) -> tuple[Any, ...]:
    """A 4-bit weight as the ops take it, `codes` to `blocksize`."""
    if isinstance(q.absmax, Nested):
        n = q.absmax
        return q.codes, n.codes, n.absmax, n.code, n.offset, q.code, q.blocksize
    return q.codes, q.absmax, None, None, 0.0, q.code, q.blocksize


@pytest.fixture(name="arguments", scope="session")
def arguments_fixture() -> Callable[[FourBit], tuple[Any, ...]]:
    """`arguments(q)`."""
    return arguments


class Close:
    """Compares sums of float32 products that were added in different orders.

    A rounding changes a partial sum by 2⁻²⁴ of it, and n of them, as good as random, by √n times
    that (Higham and Mary, doi 10.1137/18M1226312). No partial sum is larger than Σ|terms|, and
    most are far smaller: a bound of 2 · √n · 2⁻²⁴ · Σ|terms| for both sides together leaves room,
    yet the loss of one term in thousands exceeds it. 8 more roundings: scales, bias. The last one,
    to the dtype, may go to different sides.
    """

    def __call__(
        self,
        found: torch.Tensor,
        expected: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """x [..., K] and weight [N, K]: what was multiplied, before it was quantised or after."""
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        terms = x.double().abs() @ weight.double().abs().T
        if bias is not None:
            terms = terms + bias.double().abs()
        info = torch.finfo(found.dtype)
        allowed = (2 * math.sqrt(x.shape[-1]) + 8) * 2**-24 * terms
        allowed += info.eps * (expected.double().abs() + info.smallest_normal)
        off = ~((found.double() - expected.double()).abs() <= allowed)  # true for NaN
        if off.any():
            at = tuple(off.nonzero()[0].tolist())
            raise AssertionError(
                f"{int(off.sum())} of {off.numel()} are off; at {at}: {found[at]}, not"
                f" {expected[at]}, allowed ± {allowed[at]:.3g}"
            )


@pytest.fixture(scope="session")
def close() -> Close:
    """`close(found, expected, x, weight, bias=None)`."""
    return Close()


class Product:
    """A weight [N, K] of one kind. Called with x and bias it is the op's result."""

    def __init__(self, kind: str, weight: torch.Tensor) -> None:
        self.kind = kind
        name, _, option = kind.partition("-")
        self.exact = option == "exact" or name in FLOATS
        self.threshold = 2.0 if option in ("outliers", "batch") else 0.0
        self.per_batch = option == "batch"
        if name == "int8":
            self.codes, self.absmax = quantize_rows(weight)
            self.weight = self.codes * (self.absmax / 127)[:, None]
        elif name in FLOATS:
            self.codes = weight.to(FLOATS[name])
            self.weight = self.codes.float()
        else:
            self.q = four_bit(weight, name, 32 if option == "32" else 64, option == "nested")
            self.weight = dequantize_4bit(self.q, torch.float32)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.kind.startswith("int8"):
            return OPS.linear_int8(x, self.codes, self.absmax, bias, self.threshold, self.per_batch)
        if self.kind in FLOATS:
            return OPS.linear_half(x, self.codes, bias)
        return OPS.linear_4bit(x, *arguments(self.q), self.weight.shape[0], bias, self.exact)

    def reference(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The same in plain torch."""
        if self.kind.startswith("int8"):
            return linear_int8(x, self.codes, self.absmax, bias, self.threshold, self.per_batch)
        if self.kind in FLOATS:
            bias = None if bias is None else bias.float()
            return linear(x.float(), self.weight, bias).to(x.dtype)
        return linear_4bit(x, self.q, bias, self.exact)

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of x."""
        if self.kind.startswith("int8"):
            return OPS.linear_int8_backward(grad, self.codes, self.absmax)
        if self.kind in FLOATS:
            return OPS.linear_half_backward(grad, self.codes)
        return OPS.linear_4bit_backward(grad, *arguments(self.q), self.weight.shape[1])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of weight in turn."""
    return request.param


@pytest.fixture
def product(kind: str) -> Callable[[torch.Tensor], Product]:
    """`product(weight)` of each kind in turn."""
    return lambda weight: Product(kind, weight)


@pytest.fixture(scope="session")
def product_of() -> Callable[[str, torch.Tensor], Product]:
    """`product_of(kind, weight)`."""
    return Product
