"""Importing the package costs nothing and changes nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import featherweight

HEAVY = ["torch", "transformers", "numpy", "bitsandbytes", "rich", "click"]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_import_brings_in_nothing_heavy():
    code = f"import featherweight, sys; print(*[m for m in {HEAVY} if m in sys.modules])"
    assert run(code).split() == []


def test_dir_lists_the_public_names_without_importing_them():
    code = "import featherweight as fw, sys; print(*dir(fw)); print('torch' in sys.modules)"
    names, torch_is_there = run(code).splitlines()
    assert set(featherweight.__all__) <= set(names.split())
    assert torch_is_there == "False"


def test_recipes_can_be_named_without_torch():
    code = "from featherweight import FeatherweightError, Recipe; import sys; print(*sys.modules)"
    assert "torch" not in run(code).split()


@pytest.mark.parametrize("name", featherweight.__all__)
def test_every_public_name_is_there_and_stays(name: str):
    value = getattr(featherweight, name)
    assert value.__name__ == name
    assert vars(featherweight)[name] is value


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'featherweight' has no attribute 'aply'"):
        _ = featherweight.aply


def test_apply_is_the_ledgers_and_load_the_models():
    assert featherweight.apply is importlib.import_module("featherweight.ledger").apply
    assert featherweight.load is importlib.import_module("featherweight.models").load
