"""Memory that is given back, and what must not be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import featherweight as fw
from featherweight.residency import Mappings, give_back
from featherweight.tensors import held

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MB = 1_000_000


@pytest.fixture
def mapped(tmp_path: Path) -> dict[str, torch.Tensor]:
    """4 MB of a file as transformers has them: views of its mapping."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.arange(1 << 20, dtype=torch.int32)}, path)
    return load_file(path)


def test_a_tensor_of_a_mapped_file_is_known_by_its_file(
    mapped: dict[str, torch.Tensor], tmp_path: Path
):
    mappings = Mappings()
    assert mappings.file_of(mapped["weight"]) == str(tmp_path / "model.safetensors")
    assert mappings.file_of(mapped["weight"][5:]) == str(tmp_path / "model.safetensors")
    assert mappings.file_of(mapped["weight"].clone()) is None
    assert mappings.file_of(torch.zeros(1 << 20)) is None
    assert mappings.file_of(torch.zeros(0)) is None
    assert mappings.file_of(torch.zeros(4, device="meta")) is None


def test_pages_come_again_unchanged(mapped: dict[str, torch.Tensor], resident: Any):
    weight = mapped["weight"]
    weight.sum()
    before = resident("RssFile")
    returned = give_back(weight)
    assert returned > 4 * MB
    assert before - resident("RssFile") > 3.9 * MB
    assert torch.equal(weight, torch.arange(1 << 20, dtype=torch.int32))
    assert give_back(weight[:0]) >= returned - (1 << 20)  # a view speaks for its whole storage


def test_pages_never_read_count_as_nothing_given_back(mapped: dict[str, torch.Tensor]):
    weight = mapped["weight"]
    give_back(weight)
    assert give_back(weight) == 0


def test_pages_that_were_written_to_stay(mapped: dict[str, torch.Tensor]):
    weight = mapped["weight"]
    expected = weight.clone()
    for at in (0, 5_000, 700_000, (1 << 20) - 1):
        weight[at] = expected[at] = -at - 1
    weight.sum()  # all pages present again, whatever their size was
    assert give_back(weight) > 3 * MB
    assert torch.equal(weight, expected)


def test_less_than_a_page_is_left_alone(tmp_path: Path):
    save_file({"weight": torch.arange(8)}, tmp_path / "small.safetensors")
    assert give_back(load_file(tmp_path / "small.safetensors")["weight"]) == 0


@pytest.fixture
def real(smollm2: str, answer: Any) -> Any:
    """The real model, its 538 MB of mapped float32 weights touched by a forward."""
    model = fw.load(smollm2).model
    sizes = held(model)
    assert sizes.mapped > 0.99 * sizes.total
    answer(model)
    return model


def test_a_cast_gives_the_checkpoint_back_and_undo_has_it_again(real: Any, resident: Any):
    weights = {name: tensor.clone() for name, tensor in real.named_parameters()}
    before = resident("RssFile")
    with fw.apply(real, "bf16") as applied:
        assert before - resident("RssFile") > 400 * MB
        assert applied.receipt.bytes_given_back > 400 * MB
    assert all(torch.equal(tensor, weights[name]) for name, tensor in real.named_parameters())


def test_a_quantiser_gives_back_only_what_it_converts(real: Any, resident: Any):
    linear = sum(m.weight.nbytes for n, m in real.named_modules() if n.endswith("_proj"))
    before = resident("RssFile")
    with fw.apply(real, "bnb-nf4") as applied:
        assert before - resident("RssFile") > 0.9 * linear
        assert 0.9 * linear < applied.receipt.bytes_given_back <= linear


def test_what_was_written_to_a_mapped_weight_survives(real: Any):
    weights = [real.model.embed_tokens.weight, real.model.layers[3].mlp.up_proj.weight]
    expected = []
    with torch.no_grad():
        for weight in weights:
            weight[0].add_(1)
            weight[-1].mul_(2)
            expected.append(weight.clone())
    for recipe in ("bf16", "bf16+bnb-nf4"):
        with fw.apply(real, recipe):
            assert weights[0][0, 0] == expected[0][0, 0].bfloat16()
        for weight, was in zip(weights, expected, strict=True):
            assert torch.equal(weight, was)


def test_pages_that_cannot_be_given_back_are_noted_once(
    tiny_llama: Path, read: Any, state: Any, monkeypatch: pytest.MonkeyPatch
):
    def fail(tensor: torch.Tensor) -> int:
        raise OSError(2, "no page map")

    monkeypatch.setattr("featherweight.ledger.give_back", fail)
    model = read(tiny_llama)
    before = state(model)
    with fw.apply(model, "bf16") as applied:
        assert model.dtype is torch.bfloat16
        assert applied.receipt.notes == [
            "pages of the mapped checkpoint stay resident: no page map"
        ]
        assert applied.receipt.bytes_given_back == 0
    assert state(model) == before


def test_anonymous_originals_are_kept(tiny_llama: Path, read: Any):
    model = read(tiny_llama).double().float()  # no longer views of the file
    assert held(model).mapped == 0
    with fw.apply(model, "bf16") as applied:
        assert applied.receipt.bytes_given_back == 0
