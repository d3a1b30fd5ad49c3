"""Reports built by hand: a decoder with everything that can go wrong, and an encoder."""

from __future__ import annotations

import math

import pytest

from featherweight.measure.result import (
    Estimate,
    Figure,
    Interval,
    PeakMemory,
    Report,
    Row,
)

MIB = 2**20


def rate(value, sd, ratio=None, tokens=64, asked=64, unit="t/s"):
    interval = Interval(*ratio) if ratio else None
    return Figure(value, unit, sd, [value - sd, value, value + sd], tokens, asked, interval, 3)


def decoder_report() -> Report:
    fp32 = Row(
        "fp32",
        baseline=True,
        weights=513 * MIB,
        run_memory=PeakMemory(1126 * MIB, 612 * MIB, 514 * MIB),
        bandwidth_share=0.624,
        figures={
            "pp512": rate(143.21, 2.13),
            "tg64": rate(11.04, 0.21),
            "gen": rate(9.51, 0.12),
            "ttft": rate(3.581, 0.05, unit="s"),
        },
        quality={"ppl": Estimate(17.834, 0.41)},
        outputs=[
            {"text": "Paris.\nIt lies on the [Seine].", "tokens": 9, "first_difference": None}
        ],
    )
    bf16 = Row(
        "bf16",
        weights=257 * MIB,
        weights_mapped=257 * MIB,
        run_memory=PeakMemory(700 * MIB, 443 * MIB, 257 * MIB),
        bandwidth_share=0.403,
        notes=["no bf16 instructions on this CPU: matrix products run in a slow emulation"],
        figures={
            "pp512": rate(22.9, 0.31, (0.16, 0.153, 0.171)),
            "tg64": rate(14.24, 2.6, (1.29, 1.22, 1.36)),
            "gen": rate(8.02, math.nan, (0.843, 0.0, math.inf)),
            "ttft": rate(22.35, 0.4, (0.16, 0.15, 0.17), unit="s"),
            "tg64@b8": rate(1234.5, 20.2, (1.02, 0.97, 1.08)),
        },
        quality={
            "ppl": Estimate(17.861, 0.41),
            "ppl_ratio": Estimate(1.00151, 0.0004),
            "kld": Estimate(0.00043, 0.00002),
            "kld_p99": Estimate(0.0039),
            "same_top": Estimate(0.9913, 0.002),
            "rms_dp": Estimate(0.0071, 0.0003),
        },
        outputs=[{"text": "Paris.\nIt is big.", "tokens": 9, "first_difference": 4}],
    )
    partial = Row(
        "nf4:double+flash+fastpath",
        status="partial",
        reason="out of time after 1 of 3 rounds",
        weights=3 * 1024 * MIB,
        run_memory=PeakMemory(96 * MIB),
        figures={"tg64": rate(27.3, 0.4, tokens=16)},
        quality={"kld": Estimate(0.00001), "same_top": Estimate(1.0, 0.0)},
    )
    failed = Row("int8:skip=a|b,[red]c", status="failed", reason="no kernel for [bold]\n|x|")
    return Report(
        model={"name": "smollm2-135m", "kind": "decoder", "parameters": 134_515_008},
        machine={"cpu": "Example CPU", "cores": 2},
        versions={"featherweight": "0.1.0", "torch": "2.13.0"},
        settings={"threads": 2},
        rows=[fp32, bf16, partial, failed],
        prompts=["The capital of France is"],
        complete=False,
        gates=["bf16: KLD 0.0004 is above --max-kld 0.0001"],
    )


def encoder_report() -> Report:
    base = Row("fp32", baseline=True, weights=87 * MIB, figures={"encode": rate(5210.0, 40.0)})
    fast = Row(
        "fp32+fastpath",
        weights=87 * MIB,
        figures={"encode": rate(9876.0, 99.0, (1.8956, 1.8, 2.0))},
        quality={"cosine": Estimate(0.9999987), "neighbours": Estimate(0.996)},
    )
    return Report(
        model={"name": "minilm", "kind": "encoder"},
        machine={},
        versions={},
        settings={},
        rows=[base, fast],
    )


@pytest.fixture
def decoder() -> Report:
    return decoder_report()


@pytest.fixture
def encoder() -> Report:
    return encoder_report()
