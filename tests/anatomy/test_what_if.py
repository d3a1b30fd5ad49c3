"""Changes that would lower a peak, each predicted by itself."""

from __future__ import annotations

import inspect

import featherweight as fw
from featherweight.anatomy.asked import ask
from featherweight.anatomy.what_if import what_if


def test_changes_come_largest_first_and_are_predictions_of_their_own() -> None:
    settings = {"train": True, "batch_size": 8, "seq_len": 128, "task": "sequence-classification"}
    before = fw.memory("minilm-l6", "fp32+eager", **settings)
    found = what_if("minilm-l6", "fp32+eager", **settings)
    assert [c.saved for c in found] == sorted((c.saved for c in found), reverse=True)
    assert len(found) == 5
    for change in found:
        saved = before.peak.process - change.memory.peak.process
        assert change.saved == saved > 0
    checkpointed = next(c for c in found if c.label == "checkpointing")
    again = fw.memory("minilm-l6", checkpointed.recipe, **settings)
    assert again.peak.process == checkpointed.memory.peak.process
    assert checkpointed.command == (
        "featherweight memory minilm-l6 --recipe fp32+eager+checkpointing --train"
        " --task sequence-classification --batch-size 8 --seq-len 128"
    )


def test_a_generation_is_offered_lighter_weights() -> None:
    found = what_if("smollm2-135m", "fp32", prompt_tokens=64, new_tokens=4, count=3)
    assert {"4-bit weights", "8-bit weights"} <= {c.label for c in found}
    assert all(c.cost for c in found)


def test_what_can_be_asked_is_what_memory_takes() -> None:
    def taken(function: object) -> dict:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
        return {name: parameter.default for name, parameter in parameters.items()}

    assert taken(ask) == taken(fw.memory)
