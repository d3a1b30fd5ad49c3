"""`checkpointing` changes memory while training, and no number."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import featherweight as fw
from featherweight.errors import UnsupportedError
from featherweight.techniques.checkpointing import checkpoints


@pytest.fixture
def llama(tiny_llama: Path):
    return fw.load(tiny_llama).model


def gradients(model) -> dict[str, torch.Tensor]:
    model.train()
    ids = torch.arange(24).reshape(2, 12)
    model(input_ids=ids, labels=ids).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def test_gradients_are_the_same_to_the_last_bit(llama) -> None:
    before = gradients(llama)
    with fw.apply(llama, "checkpointing"):
        assert checkpoints(llama)
        checkpointed = gradients(llama)
    assert not checkpoints(llama)
    assert before.keys() == checkpointed.keys()
    assert all(torch.equal(before[name], checkpointed[name]) for name in before)


def test_generation_is_as_it_was(llama) -> None:
    llama.eval()
    ids = torch.arange(8)[None]
    before = llama.generate(ids, max_new_tokens=8, do_sample=False)
    with fw.apply(llama, "checkpointing", verify=True):
        assert torch.equal(llama.generate(ids, max_new_tokens=8, do_sample=False), before)


def test_a_model_that_has_it_keeps_it(llama) -> None:
    with fw.apply(llama, "checkpointing"):
        again = fw.apply(llama, "checkpointing")
        assert again.receipt.changed() == 0
        again.undo()
        assert checkpoints(llama)
    assert not checkpoints(llama)


def test_it_goes_with_adapters(llama) -> None:
    pytest.importorskip("peft")
    llama.train()
    ids = torch.arange(24).reshape(2, 12)
    with fw.apply(llama, "lora:r=2+checkpointing"):
        llama.enable_input_require_grads()
        llama(input_ids=ids, labels=ids).loss.backward()
        grown = [p for p in llama.parameters() if p.grad is not None]
        assert len(grown) == len([p for p in llama.parameters() if p.requires_grad]) > 0


def test_a_plain_module_cannot_be_checkpointed() -> None:
    with pytest.raises(UnsupportedError, match="layers of a Linear cannot be checkpointed"):
        fw.apply(nn.Linear(2, 2), "checkpointing")
