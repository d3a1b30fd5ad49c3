"""What every technique declares."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from featherweight.recipe import registry
from featherweight.techniques.base import Technique

SLOTS = ("dtype", "attention", "weights", "adapter", "forward", "activations")


@pytest.mark.parametrize("kind", registry().values(), ids=registry())
def test_a_technique_is_frozen_and_says_what_it_decides(kind: Any):
    technique = kind()
    assert isinstance(technique, Technique)
    assert technique.slot in SLOTS
    assert 0 <= technique.tolerance < 1
    assert technique.extra in (None, "bitsandbytes", "peft")
    assert kind.__doc__
    for field in fields(kind):
        assert field.metadata["help"], field.name
        with pytest.raises(FrozenInstanceError):
            setattr(technique, field.name, None)
