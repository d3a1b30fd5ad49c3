"""The roofline: arithmetic on given rates, and the rates of this machine."""

from __future__ import annotations

import pytest
import torch

from featherweight import machine
from featherweight.profiling.roofline import Roofline, measure

ROOF = Roofline("cpu", 50.0, {"float32": 200.0, "int8": 800.0}, {})


def test_the_longer_of_moving_and_computing_binds() -> None:
    assert ROOF.seconds(0, 50 * 10**9) == (1.0, "memory")
    assert ROOF.seconds(200 * 10**9, 10**9) == (1.0, "compute")
    assert ROOF.seconds(200 * 10**9, 100 * 10**9) == (2.0, "memory")
    assert ROOF.seconds(800 * 10**9, 0, "int8") == (1.0, "compute")
    assert ROOF.seconds(0, 0) == (0.0, "memory")


def test_the_ridge_is_where_both_take_as_long() -> None:
    assert ROOF.ridge() == 4.0
    assert ROOF.ridge("int8") == 16.0
    moving, computing = 10**9, int(ROOF.ridge() * 10**9)
    assert ROOF.seconds(computing, moving)[0] == pytest.approx(moving / 50e9)
    assert ROOF.seconds(computing + 10**6, moving)[1] == "compute"
    assert ROOF.seconds(computing - 10**6, moving)[1] == "memory"


def test_a_dtype_that_was_not_measured_has_the_rate_of_float32() -> None:
    assert ROOF.rate("bfloat16") == 200.0


def test_this_machine_is_probed_and_other_dtypes_are_multiplied() -> None:
    roof = measure(torch.device("cpu"), {"bfloat16", "int8", "float32"})
    rates = machine.probe()
    assert roof.device == "cpu"
    if rates.steady:  # otherwise each probe measures anew
        assert roof.bandwidth == rates.peak_bandwidth.value
        assert roof.products["float32"] == rates.fp32.value
    assert roof.products["bfloat16"] > 0
    assert roof.sources["bfloat16"] == "matmul by torch"
    assert set(roof.products) <= {"float32", "int8", "bfloat16"}
    assert roof.to_json()["bandwidth"] == roof.bandwidth
