"""Peaks that others have measured, predicted under the transformers at hand."""

from __future__ import annotations

import pytest

import featherweight as fw

MIB = 1 << 20


@pytest.mark.parametrize(
    ("recipe", "keywords", "published_mib"),
    [
        ("fp32+eager", {"batch_size": 4}, 14949),
        ("fp32+eager", {"batch_size": 1, "accumulate": 4}, 8681),
        ("fp32+eager+checkpointing", {"batch_size": 1, "accumulate": 4}, 6775),
        ("fp32+eager", {"batch_size": 4, "optimizer": "adafactor"}, 12295),
        ("fp32+eager", {"batch_size": 4, "optimizer": "adam8bit"}, 13085),
    ],
)
def test_bert_large_of_the_2022_guide(recipe: str, keywords: dict, published_mib: int) -> None:
    """transformers' guide to training on one GPU: V100, torch 1.10, context of 1343 MiB."""
    found = fw.memory(
        "bert-large-uncased",
        recipe,
        train=True,
        task="sequence-classification",
        seq_len=512,
        gpu="v100-16gb",
        cuda_context=1343 * MIB,
        torch_version="1.10",
        **{"optimizer": "adamw_hf"} | keywords,
    )
    assert found.peak.process / MIB == pytest.approx(published_mib, rel=0.01)


@pytest.mark.parametrize(("rows", "tokens", "published_mb"), [(1, 128, 1474.32), (1, 512, 1551.35)])
def test_a_step_of_opt_350m(rows: int, tokens: int, published_mb: float) -> None:
    """transformers' documentation of OPT: fp16, logits.sum(), L40S, torch 2.4: allocated, in MB."""
    found = fw.memory(
        "facebook/opt-350m",
        "fp16+sdpa",
        train=True,
        batch_size=rows,
        seq_len=tokens,
        optimizer="none",
        loss="logits.sum",
        gpu="l40s",
        torch_version="2.4",
    )
    assert found.peak.allocated / 10**6 == pytest.approx(published_mb, rel=0.001)


def test_a_full_fine_tuning_of_llama_3_2_3b() -> None:
    """peft's method comparison, torch 2.13 on an L40S: 37068 MiB reserved."""
    found = fw.memory(
        "meta-llama/Llama-3.2-3B",
        "bf16+sdpa",
        train=True,
        batch_size=4,
        seq_len=768,
        padding=0.1,
        optimizer="adamw_torch",
        gpu="l40s",
    )
    assert found.peak.reserved / MIB == pytest.approx(37068, rel=0.08)
