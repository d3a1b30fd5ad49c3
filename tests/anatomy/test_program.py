"""What programs do around a pass: hold its outputs, read without a cache, leave no layer out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import featherweight as fw
from featherweight.anatomy import eras
from featherweight.anatomy.asked import ask
from featherweight.known import config_dict

BATCH, LENGTH = 2, 96
WORDS = 4000  # enough for logits to be the peak
LOGITS = BATCH * LENGTH * WORDS * 4
CACHE = 2 * 2 * BATCH * LENGTH * 32 * 4  # keys and values of two layers, of two heads of 16


@pytest.fixture(name="tiny")
def tiny_of_many_words(tiny: dict[str, Any]) -> dict[str, Any]:
    return tiny | {"vocab_size": WORDS}


def test_a_pass_makes_the_cache_that_the_model_makes_unasked(tiny: dict) -> None:
    options: dict[str, Any] = {"forward": True, "batch_size": BATCH, "seq_len": LENGTH}
    with_cache = fw.memory(tiny, "fp32+eager", **options)
    without = fw.memory(tiny | {"use_cache": False}, "fp32+eager", **options)
    assert with_cache.categories["KV cache"] == CACHE
    assert "KV cache" not in without.categories
    assert with_cache.peak.allocated - without.peak.allocated == CACHE


def test_held_outputs_are_there_during_the_next_pass(tiny: dict) -> None:
    options: dict[str, Any] = {"forward": True, "batch_size": BATCH, "seq_len": LENGTH}
    once = fw.memory(tiny, "fp32+eager", **options)
    held = fw.memory(tiny, "fp32+eager", outputs="held", **options)
    assert held.peak.allocated - once.peak.allocated == LOGITS + CACHE
    assert held.workload == "forward pass, batch 2 × 96 tokens, outputs held"


def test_a_training_loop_that_holds_outputs_holds_the_logits(tiny: dict) -> None:
    options: dict[str, Any] = {"train": True, "batch_size": BATCH, "seq_len": LENGTH}
    trainer = fw.memory(tiny, "fp32+eager", **options)
    loop = fw.memory(tiny, "fp32+eager", outputs="held", **options)
    assert loop.categories["logits and loss"] - trainer.categories["logits and loss"] == LOGITS


def test_a_model_without_a_cache_reads_everything_again() -> None:
    """BERT that was not made a decoder: its last step is like a prompt as long as all."""
    config = config_dict("bert-base") | {"num_hidden_layers": 1}
    options: dict[str, Any] = {"task": "causal-lm", "batch_size": BATCH}
    written = fw.memory(config, "fp32+eager", prompt_tokens=LENGTH, new_tokens=40, **options)
    read = fw.memory(config, "fp32+eager", prompt_tokens=LENGTH + 39, new_tokens=1, **options)
    assert written.phase == "decode"
    assert read.phase == "prefill"
    assert written.peak.allocated == read.peak.allocated


@pytest.mark.parametrize("model", ["opt-350m", "whisper-large"])
def test_no_layer_is_left_out_by_chance(model: str) -> None:
    """LayerDrop leaves layers out at random; the dry run draws a number that leaves none out."""

    def saved(layers: int, chance: float) -> int:
        keys = ("num_hidden_layers", "encoder_layers", "decoder_layers")
        config = config_dict(model) | dict.fromkeys(keys, layers)
        config |= dict.fromkeys(("layerdrop", "encoder_layerdrop", "decoder_layerdrop"), chance)
        found = fw.memory(config, "fp32+eager", train=True, seq_len=32, optimizer="none")
        return max(moment.categories.get("saved activations", 0) for moment in found.timeline)

    one, three = saved(1, 0.0), saved(3, 0.0)
    assert three > 1.5 * one
    assert saved(3, 0.9) == three


def test_a_model_that_is_halved_once_it_is_loaded_has_half_buffers(tiny: dict) -> None:
    question = ask(tiny, "fp16+eager", prompt_tokens=8, new_tokens=2)
    halved = replace(question, work=replace(question.work, halved=True)).predict()
    rotary = 2 * 8 * 4  # frequencies of head_dim / 2, and what they were at first
    loaded = question.predict()
    assert loaded.categories["weights"] - halved.categories["weights"] == rotary // 2


@pytest.mark.parametrize(
    ("version", "holds", "copies"),
    [
        ("4.41.2", True, False),
        ("4.42.0", False, False),
        ("4.45.0", False, True),
        ("4.46.3", False, True),
        ("4.47.0", False, False),
        ("5.13.1", False, False),
    ],
)
def test_what_generate_did_with_its_outputs(version: str, holds: bool, copies: bool) -> None:
    """As the sources of these releases have it; 4.45's copy is transformers issue 34796."""
    assert eras.generate_holds_outputs(version) is holds
    assert eras.generate_copies_logits(version) is copies
