"""How fast are the linear kernels, beside what the machine and its other libraries do?

Sides of a table take turns, part by part, in one process with the same threads; a ratio is the
median over rounds with its 95 % interval. Weights are rotated over copies that together exceed the
last-level cache, as the layers of a model do.

    python benchmarks/linear_layers.py [TABLE ...] [--isa avx2] [--threads 2] [--rounds 9]

`--isa` holds our kernels to an instruction set, and with `avx2` torch too. bitsandbytes chooses
its own by looking at the processor; `bnb dequantise` is what it does where it has no fused kernel.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from statistics import median

HELD = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
if "avx2" in sys.argv and any(os.environ.get(name) != value for name, value in HELD.items()):
    os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | HELD)  # torch reads it once

import torch  # noqa: E402
from torch.nn.functional import linear  # noqa: E402

from featherweight import native  # noqa: E402
from featherweight.measure.stats import paired_ratio  # noqa: E402
from featherweight.native import ops  # noqa: E402, F401  registers torch.ops.featherweight
from featherweight.quant.codebooks import DYNAMIC, NF4  # noqa: E402

SHAPES = ((2048, 2048), (5632, 2048), (2048, 5632), (4096, 4096), (11008, 4096), (4096, 11008))
ROTATED = 600_000_000  # bytes of weights that one sample reads
OP = torch.ops.featherweight

Work = Callable[[], object]


def seconds(work: Work) -> float:
    """Of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def take_turns(sides: dict[str, list[Work]], rounds: int) -> dict[str, list[float]]:
    """Seconds a call of each side, a sample a round, after a round that warms up."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, works in sides.items():
            spent = sum(seconds(work) for work in works) / len(works)
            if turn:
                samples[name].append(spent)
    return samples


def times(theirs: list[float], ours: list[float]) -> str:
    """How many times faster ours is."""
    found = paired_ratio(theirs, ours)
    return f"{found.value:.2f} ({found.low:.2f}-{found.high:.2f})"


def one_row(rounds: int) -> Iterator[str]:
    """Bytes of weights a second with one activation row, against a plain read of the same bytes."""
    for n, k in SHAPES:
        yield from one_row_of(n, k, rounds)


def one_row_of(n: int, k: int, rounds: int) -> Iterator[str]:
    """Each format in the same n · k bytes."""
    count = max(2, ROTATED // (n * k))
    blocks = [torch.randint(-127, 128, (n, k), dtype=torch.int8) for _ in range(count)]
    x, scale = torch.randn(1, k), torch.rand(n)
    absmax = torch.rand(2 * n * k // 64)
    inner = torch.randint(0, 256, (absmax.numel(),), dtype=torch.uint8)
    outer = torch.rand(-(-inner.numel() // 256))

    def floats(block: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return OP.linear_half(x, block.view(dtype).view(-1, k), None)

    def four_bit(block: torch.Tensor, scales: tuple, exact: bool) -> torch.Tensor:
        codes = block.view(torch.uint8)
        return OP.linear_4bit(x, codes, *scales, NF4, 64, 2 * n, None, exact)

    plain, nested = (absmax, None, None, 0.0), (inner, outer, DYNAMIC, 0.01)
    sides: dict[str, list[Work]] = {
        "read": [lambda b=b: native.sum_words(b) for b in blocks],
        "int8": [lambda b=b: OP.linear_int8(x, b, scale, None, 6.0, False) for b in blocks],
        "bf16": [lambda b=b: floats(b, torch.bfloat16) for b in blocks],
        "fp32": [lambda b=b: floats(b, torch.float32) for b in blocks],
        "nf4": [lambda b=b: four_bit(b, plain, False) for b in blocks],
        "nf4:double": [lambda b=b: four_bit(b, nested, False) for b in blocks],
        "nf4:exact": [lambda b=b: four_bit(b, plain, True) for b in blocks[:16]],
    }
    samples = take_turns(sides, rounds)
    scales = {"nf4": absmax.nbytes, "nf4:exact": absmax.nbytes, "nf4:double": inner.nbytes}
    rates = {
        name: [(n * k + scales.get(name, 0)) / s / 1e9 for s in spent]
        for name, spent in samples.items()
    }
    read = rates.pop("read")
    yield f"{n} x {k}: read {median(read):.1f} GB/s"
    for name, rate in rates.items():
        yield f"    {name:<11} {median(rate):5.1f} GB/s, of the read {times(rate, read)}"


def many_rows(rounds: int) -> Iterator[str]:
    """512 activation rows, how many times as fast as torch's fp32 `F.linear`."""
    for n, k in ((576, 576), *SHAPES[:4]):
        yield from many_rows_of(n, k, 512, rounds)


def many_rows_of(n: int, k: int, rows: int, rounds: int) -> Iterator[str]:
    """Each format of one weight."""
    x, weight, grad = torch.randn(rows, k), torch.randn(n, k), torch.randn(rows, n)
    codes, scale = OP.quantize_int8(weight)
    nf4, absmax = OP.quantize_4bit(weight, NF4, 64)
    half, half_x = weight.bfloat16(), x.bfloat16()
    four_bit = (nf4, absmax, None, None, 0.0, NF4, 64)
    sides: dict[str, list[Work]] = {
        "torch fp32": [lambda: linear(x, weight)],
        "torch bf16": [lambda: linear(half_x, half)],
        "int8": [lambda: OP.linear_int8(x, codes, scale, None, 6.0, False)],
        "nf4": [lambda: OP.linear_4bit(x, *four_bit, n, None, False)],
        "nf4:exact": [lambda: OP.linear_4bit(x, *four_bit, n, None, True)],
        "bf16": [lambda: OP.linear_half(x, half, None)],
        "fp32": [lambda: OP.linear_half(x, weight, None)],
        "nf4 backward": [lambda: OP.linear_4bit_backward(grad, *four_bit, k)],
    }
    samples = take_turns(sides, rounds)
    base = samples.pop("torch fp32")
    yield f"{n} x {k}: torch fp32 {2 * rows * n * k / median(base) / 1e9:.0f} GFLOP/s"
    for name, spent in samples.items():
        yield f"    {name:<12} {times(base, spent)}"


def against_bitsandbytes(rounds: int) -> Iterator[str]:
    """NF4 with fp32 activations: how many times as fast as bitsandbytes."""
    for rows in (1, 512):
        for n, k in SHAPES[:4]:
            yield from against_bitsandbytes_of(n, k, rows, rounds)


@torch.no_grad()
def against_bitsandbytes_of(n: int, k: int, rows: int, rounds: int) -> Iterator[str]:
    """Its layer, and what its layer does where it has no fused kernel."""
    import bitsandbytes as bnb

    count = max(2, ROTATED // (n * k // 2)) if rows == 1 else 1
    x, weight = torch.randn(rows, k), torch.randn(n, k)
    codes, state = bnb.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    held = [codes.clone().view(-1) for _ in range(count)]

    def layer() -> torch.nn.Module:
        made = bnb.nn.Linear4bit(k, n, bias=False, compute_dtype=torch.float32, quant_type="nf4")
        made.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4").to("cpu")
        return made.eval()

    layers = [layer() for _ in range(min(count, 8))]  # slow enough that fewer make a sample
    samples = take_turns(
        {
            "layer": [lambda m=m: m(x) for m in layers],
            "dequantise": [lambda: linear(x, bnb.functional.dequantize_4bit(codes, state))] * 4,
            "ours": [
                lambda b=b: OP.linear_4bit(
                    x, b, state.absmax, None, None, 0.0, NF4, 64, n, None, False
                )
                for b in held
            ],
        },
        rounds,
    )
    ours = samples.pop("ours")
    yield f"{rows} rows, {n} x {k}: nf4 {median(ours) * 1e3:.3f} ms"
    for name, spent in samples.items():
        yield f"    bnb {name:<11} {times(spent, ours)}"


def quantising(rounds: int) -> Iterator[str]:
    """fp32 source bytes a second."""
    weights = [torch.randn(4096, 4096) for _ in range(4)]
    samples = take_turns(
        {
            "nf4": [lambda w=w: OP.quantize_4bit(w, NF4, 64) for w in weights],
            "int8": [lambda w=w: OP.quantize_int8(w) for w in weights],
        },
        rounds,
    )
    for name, spent in samples.items():
        yield f"    {name:<5} {weights[0].nbytes / median(spent) / 1e9:.2f} GB/s"


TABLES = {"rows": one_row, "gemm": many_rows, "bnb": against_bitsandbytes, "quantise": quantising}


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; default: all")
    parser.add_argument("--isa", help="hold the kernels to one instruction set")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with native.forced_isa(arguments.isa) if arguments.isa else nullcontext():
        isa = native.status().isa
        print(f"{isa}, {arguments.threads} threads, load average {os.getloadavg()[0]:.2f}")
        for name in arguments.tables or TABLES:
            print(f"\n{name}: {TABLES[name].__doc__}")
            for line in TABLES[name](arguments.rounds):
                print(line, flush=True)


if __name__ == "__main__":
    main()
