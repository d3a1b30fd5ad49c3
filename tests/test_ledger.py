"""Apply and undo: what comes back, in which order, and what is refused."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw
from featherweight.errors import FeatherweightError, RecipeError, UnsupportedError
from featherweight.ledger import Ledger
from featherweight.receipt import Receipt
from featherweight.recipe import registry

COMBINED = ["fp16+eager", "bf16+bnb-nf4:double+flash", "eager+bnb-int8:threshold=0"]
RECIPES = [*registry(), *COMBINED]


@pytest.mark.parametrize("recipe", RECIPES)
def test_undo_brings_everything_back(tiny: Path, recipe: str, read: Any, answer: Any, state: Any):
    if recipe == "fastpath" and "bert" in str(tiny):
        pytest.skip("it knows decoders alone")
    model = read(tiny)
    next(model.children()).training = True  # flags of both kinds
    before = state(model)
    applied = fw.apply(model, recipe)
    changed = applied.receipt.changed()
    assert changed or recipe in ("fp32", "sdpa")  # what the checkpoint is anyway
    answer(model)  # some kernels change their weights at the first call
    applied.undo()
    assert state(model) == before


@pytest.mark.parametrize("recipe", ["bf16", "bnb-nf4:double"])
def test_undo_brings_the_real_model_back(smollm2: str, recipe: str, answer: Any, state: Any):
    model = fw.load(smollm2).model
    before = state(model)
    with fw.apply(model, recipe) as applied:
        assert not torch.equal(answer(model), before.answer)
        assert applied.receipt.bytes_after < 0.6 * applied.receipt.bytes_before
    assert state(model) == before


def test_the_context_manager_undoes_also_after_an_error(tiny_llama: Path, read: Any, state: Any):
    model = read(tiny_llama)
    before = state(model)
    with pytest.raises(KeyError), fw.apply(model, "bf16"):
        raise KeyError
    assert state(model) == before


def test_undo_inside_the_block_is_enough(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    with fw.apply(model, "bf16") as applied:
        applied.undo()
    assert model.dtype is torch.float32


def test_undo_twice_is_an_error(tiny_llama: Path, read: Any):
    applied = fw.apply(read(tiny_llama), "bf16")
    applied.undo()
    with pytest.raises(FeatherweightError, match="'bf16' was undone already"):
        applied.undo()


def test_undo_is_last_in_first_out(tiny_llama: Path, read: Any, state: Any):
    model = read(tiny_llama)
    before = state(model)
    first = fw.apply(model, "bf16")
    middle = state(model)
    second = fw.apply(model, "bnb-nf4+flash")
    with pytest.raises(FeatherweightError, match="'bf16' cannot be undone before what was applied"):
        first.undo()
    second.undo()
    assert state(model) == middle
    first.undo()
    assert state(model) == before


def test_two_models_are_undone_in_any_order(tiny_llama: Path, read: Any):
    first, second = read(tiny_llama), read(tiny_llama)
    one, two = fw.apply(first, "bf16"), fw.apply(second, "bf16")
    one.undo()
    two.undo()
    assert first.dtype is second.dtype is torch.float32


def test_irreversible_frees_the_originals_and_refuses_undo(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    original = weakref.ref(model.model.layers[0].mlp.up_proj)
    with fw.apply(model, "bnb-nf4", reversible=False) as applied:
        pass  # leaving the block is no error, and undoes nothing
    gc.collect()
    assert original() is None
    assert model.is_quantized
    with pytest.raises(FeatherweightError, match=r"reversible=False.*load the model again"):
        applied.undo()


def break_third(monkeypatch: pytest.MonkeyPatch, name: str, method: str, error: Exception) -> None:
    """The technique raises at the third module it converts."""
    kind = registry()[name]
    whole, calls = getattr(kind, method), []

    def failing(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise error
        return whole(self, *args)

    monkeypatch.setattr(kind, method, failing)


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-fp4", "bnb-int8"])
def test_an_error_in_the_middle_leaves_the_model_as_it_was(
    tiny: Path, name: str, read: Any, state: Any, monkeypatch: pytest.MonkeyPatch
):
    model = read(tiny)
    before = state(model)
    break_third(monkeypatch, name, "convert", MemoryError("no more"))
    with pytest.raises(MemoryError, match="no more"):
        fw.apply(model, f"bf16+{name}+flash")
    assert state(model) == before
    monkeypatch.undo()
    fw.apply(model, name).undo()  # nothing was left on the stack
    assert state(model) == before


def test_an_error_in_the_middle_of_a_cast_leaves_the_model_as_it_was(
    tiny_llama: Path, read: Any, state: Any, monkeypatch: pytest.MonkeyPatch
):
    model = read(tiny_llama)
    before = state(model)
    replace, calls = Ledger.replace_data, []

    def failing(self: Ledger, *args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        replace(self, *args)

    monkeypatch.setattr(Ledger, "replace_data", failing)
    with pytest.raises(KeyboardInterrupt):
        fw.apply(model, "bf16")
    assert state(model) == before


def test_warn_leaves_out_what_the_model_cannot_have_and_says_so(read: Any, tiny_llama: Path):
    model = read(tiny_llama, attn_implementation="eager")
    with fw.apply(model, "fp32+bnb-nf4", reversible=False):
        pass
    applied = fw.apply(model, "bf16+flash", on_fallback="warn")
    (note,) = applied.receipt.notes
    assert note.startswith("bf16 left out: ")
    assert "uint8" in note
    assert "note: bf16 left out" in str(applied.receipt)
    assert "dtype" not in applied.receipt.actual
    assert "flash" in applied.receipt.actual["attention"]


def test_warn_takes_back_the_half_that_was_done(
    tiny_llama: Path, read: Any, answer: Any, monkeypatch: pytest.MonkeyPatch
):
    model = read(tiny_llama)
    expected = answer(model)
    break_third(monkeypatch, "bnb-nf4", "convert", UnsupportedError("not this layer"))
    applied = fw.apply(model, "bnb-nf4", on_fallback="warn")
    assert applied.receipt.notes == ["bnb-nf4 left out: not this layer"]
    assert torch.equal(answer(model), expected)
    assert not any(type(module).__name__ == "Linear4bit" for module in model.modules())
    assert applied.receipt.changed() == 0


def test_warn_is_an_error_where_half_was_done_for_good(
    tiny_llama: Path, read: Any, monkeypatch: pytest.MonkeyPatch
):
    break_third(monkeypatch, "bnb-nf4", "convert", UnsupportedError("not this layer"))
    with pytest.raises(UnsupportedError, match="not this layer"):
        fw.apply(read(tiny_llama), "bnb-nf4", on_fallback="warn", reversible=False)


def test_every_technique_is_checked_before_the_first_change(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    with pytest.raises(RecipeError, match="skip=nothing_here fits no module"):
        fw.apply(model, "bf16+bnb-nf4:skip=nothing_here", reversible=False)
    assert model.dtype is torch.float32


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_fallback": "ignore"}, "on_fallback is 'ignore'; allowed: error, warn"),
        ({"spill_dir": ".", "reversible": False}, "spill_dir keeps originals for undo"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str):
    with pytest.raises(FeatherweightError, match=says):
        fw.apply(nn.Linear(2, 2), "bf16", **options)


def test_a_plain_module_can_be_cast_but_has_no_attention():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with fw.apply(model, "bf16"):
        assert model(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert model[1].running_mean.dtype is torch.float32
    with pytest.raises(UnsupportedError, match="attention of a Sequential cannot be set"):
        fw.apply(model, "eager")


class Settings:
    """A config with a default on the class."""

    inherited = 1

    def __init__(self) -> None:
        self.own = 1


@pytest.mark.parametrize("name", ["inherited", "own", "absent"])
def test_settings_come_back_where_they_were(name: str):
    ledger = Ledger(nn.Identity(), Receipt(""), reversible=True, spill=None)
    settings = Settings()
    before = dict(vars(settings))
    ledger.set(settings, name, 2)
    ledger.set(settings, name, 3)
    assert getattr(settings, name) == 3
    ledger.undo()
    assert vars(settings) == before


def test_undo_after_dequantize(tiny_llama: Path, read: Any, state: Any):
    model = read(tiny_llama)
    before = state(model)
    applied = fw.apply(model, "nf4")
    model.dequantize()
    applied.undo()
    assert all(one is other for one, other in zip(
        before.modules.values(), dict(model.named_modules(remove_duplicate=False)).values(),
        strict=True,
    ))  # fmt: skip
    assert torch.equal(state(model).answer, before.answer)


def test_the_receipt_adds_up(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    with fw.apply(model, "bf16") as applied:
        receipt = applied.receipt
        assert receipt.bytes_before - receipt.bytes_after == sum(
            c.bytes_before - c.bytes_after for c in receipt.changes
        )
        lines = receipt.to_json()["changes"]
        assert {line["what"] for line in lines} == {"float32 → bfloat16"}
        assert {line["module"] for line in lines} == {n for n, _ in model.named_parameters()}
        assert f"changed {len(lines)} modules: float32 → bfloat16" in str(receipt)
        assert repr(applied) == f"Applied('bf16', {len(lines)} changes)"
