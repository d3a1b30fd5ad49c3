"""A real run beside its prediction, and runs that cannot be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from featherweight.anatomy import measured_child
from featherweight.anatomy.measured import Measured, measure
from featherweight.anatomy.memory import memory
from featherweight.anatomy.work import Work
from featherweight.errors import FeatherweightError, ModelError
from featherweight.measure.child import ChildError

MIB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="peaks are the kernel's own there")


@pytest.fixture(scope="module")
def config(tiny_config: Callable[..., Any]) -> Any:
    """Large enough that its tensors stand out of what the interpreter does."""
    return tiny_config(hidden_size=256, intermediate_size=512, architectures=["LlamaForCausalLM"])


TRAINED = {"train": True, "batch_size": 8, "seq_len": 128}


@pytest.fixture(scope="module")
def trained(config: Any) -> Measured:
    return measure(config, "fp32+sdpa", **TRAINED)


def test_tensors_of_training_are_those_predicted(config: Any, trained: Measured) -> None:
    predicted = memory(config, "fp32+sdpa", **TRAINED).peak.allocated
    # The same blocks, but for a few constants of a word or so that fake tensors keep longer.
    assert predicted - 1024 < trained.allocated <= predicted


@linux
def test_the_process_takes_its_tensors_and_its_libraries(trained: Measured) -> None:
    assert trained.resident is not None
    # Above the tensors: modules that are imported with the model, autograd's nodes, buffers of MKL.
    assert 0.98 * trained.allocated < trained.resident < trained.allocated + 48 * MIB
    assert trained.reserved > 0.98 * trained.resident - 16 * MIB
    assert trained.process > trained.reserved + 200 * MIB
    assert trained.seconds > 0
    assert "random weights" in trained.note
    assert trained.to_json()["allocated"] == trained.allocated


def test_generation_runs_all_of_its_steps(config: Any) -> None:
    work = Work("generate", batch_size=4, prompt_tokens=200, new_tokens=9)
    request = {"config": config.to_dict(), "recipe": "fp32+sdpa", "work": asdict(work)}
    found = measured_child.answer({**request, "task": None, "device": "cpu", "in_use": True})
    asked = {"batch_size": 4, "prompt_tokens": 200, "new_tokens": 9}
    predicted = memory(config, "fp32+sdpa", **asked).peak.allocated
    # generate() also keeps a mask, and positions of each row: their cosines and sines are wider.
    assert predicted <= found["allocated"] < 1.03 * predicted


def test_a_wrong_request_is_said_before_anything_runs(config: Any) -> None:
    with pytest.raises(FeatherweightError, match=r"nothing can be measured on 'tpu'; here: cpu"):
        measure(config, device="tpu")
    with pytest.raises(FeatherweightError, match="batch_size is 0"):
        measure(config, batch_size=0)
    with pytest.raises(ModelError, match="no file or folder"):
        measure("./none")


def test_what_fails_in_the_run_is_one_line(tiny_bert: Any) -> None:
    with pytest.raises(ChildError, match="BertModel cannot run forward pass") as caught:
        measure(tiny_bert, "fp32", forward=True, seq_len=1024)  # 256 positions are learned
    assert "\n" not in str(caught.value)


def test_what_is_predicted_for_elsewhere_cannot_be_measured() -> None:
    with pytest.raises(FeatherweightError, match="gpu, torch_version: a measurement runs here"):
        measure("smollm2-135m", "fp32", gpu="t4", torch_version="2.3")
