"""What fits of training; BERT-large by the figures of Hugging Face's guide of 2022, on a V100."""

from __future__ import annotations

from typing import Any

import pytest

import featherweight as fw
from featherweight.anatomy import candidates
from featherweight.anatomy.work import Work
from featherweight.errors import FeatherweightError
from featherweight.fitting.fit import fit
from featherweight.fitting.result import TrainingFit
from featherweight.fitting.search import MOST, largest_batch
from featherweight.recipe import Recipe

MIB, GIB = 2**20, 2**30
BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 8000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
SMALL: dict[str, Any] = {"train": True, "gpu": "t4", "seq_len": 256}
# (batch, accumulated, optimizer, checkpointing): MiB that nvidia-smi showed
PUBLISHED = {
    (4, 1, "adamw", False): 14949,
    (1, 4, "adamw", False): 8681,
    (1, 4, "adamw", True): 6775,
    (4, 1, "adafactor", False): 12295,
    (4, 1, "adam8bit", False): 13085,
}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("allowed", "recipe", "optimizer"),
    [
        (8 * GIB, "fp32+eager+checkpointing", "adamw"),
        (5 * GIB, "fp32+eager+checkpointing", "adamw_bnb_8bit"),
    ],
    ids=["8 GiB", "5 GiB"],
)
def test_settings_for_bert_large_are_those_whose_published_figures_fit(
    allowed: int, recipe: str, optimizer: str
) -> None:
    found = fit(
        "bert-large",
        memory=allowed,
        train=True,
        task="sequence-classification",
        seq_len=512,
        batch_size=4,
        gpu="v100-16gb",
        cuda_context=1343 * MIB,
        torch_version="1.10",
    )
    assert isinstance(found, TrainingFit)
    assert (found.recipe, found.optimizer) == (recipe, optimizer)
    assert found.fits
    assert found.peak <= allowed
    assert found.batch_size * found.accumulate == 4
    known = 0
    for one in found.tried:
        key = (one.batch_size, one.accumulate, one.optimizer, "checkpointing" in one.recipe)
        if key in PUBLISHED:
            known += 1
            assert one.fits == (PUBLISHED[key] * MIB <= allowed)
            if one.peak is not None:
                assert one.peak == pytest.approx(PUBLISHED[key] * MIB, rel=0.03)
    assert known >= 2
    assert "gradient_checkpointing=True" in str(found.code)


def predicted(recipe: str, rows: int, **options: Any) -> int:
    return fw.memory(BERT, recipe, batch_size=rows, **SMALL, **options).peak.process


@pytest.fixture(scope="module")
def small() -> TrainingFit:
    """A BERT of 5 million parameters in 600 MiB, of which 300 are CUDA's."""
    found = fit(BERT, memory=600 * MIB, recipe="fp32+eager", **SMALL)
    assert isinstance(found, TrainingFit)
    return found


def test_the_largest_micro_batch_fits_and_one_row_more_does_not(small: TrainingFit) -> None:
    assert small.batch_size > 1
    assert small.more == small.batch_size + 1
    assert small.peak == predicted("fp32+eager", small.batch_size) <= 600 * MIB
    assert small.more_peak == predicted("fp32+eager", small.more) > 600 * MIB


def test_what_fills_the_memory_adds_up(small: TrainingFit) -> None:
    whole = sum(small.categories.values()) + small.reserved + small.base
    assert whole == small.peak
    assert small.base == 300 * MIB
    assert small.categories["saved activations"] > 0


def test_two_changes_let_more_rows_fit_and_are_predicted_to(small: TrainingFit) -> None:
    assert len(small.gains) == 2
    assert next(gain.label for gain in small.gains) == "sdpa attention"
    for gain in small.gains:
        assert gain.batch_size > small.batch_size
        mixed = "fp16" if "fp16 mixed" in gain.workload else None
        options = {"optimizer": gain.optimizer, "mixed_precision": mixed}
        assert gain.peak == predicted(gain.recipe, gain.batch_size, **options) <= 600 * MIB
        assert predicted(gain.recipe, gain.batch_size + 1, **options) > 600 * MIB


def test_where_not_one_row_fits_it_says_how_much_is_missing() -> None:
    found = fit(BERT, memory=330 * MIB, recipe="fp32", **SMALL)
    assert isinstance(found, TrainingFit)
    assert not found.fits
    assert (found.batch_size, found.code, found.more) == (0, None, None)
    assert found.missing == found.peak - 330 * MIB > 0


def test_without_a_recipe_what_changes_the_update_comes_last() -> None:
    found = candidates.training(Work("train"), on_gpu=True)
    labels = [one.label for one in found]
    assert labels[:2] == ["plain", "checkpointing"]
    assert labels[-1] == "LoRA on 4-bit weights, checkpointing"
    assert str(found[-1].recipe) == "bf16+bnb-nf4:double:compute=bf16+lora+checkpointing"
    asked_for = candidates.training(Work("train", optimizer="sgd"), on_gpu=True)
    assert {one.work.optimizer for one in asked_for} == {"sgd"}
    old = candidates.training(Work("train"), on_gpu=True, half="fp16", has_sdpa=False)
    assert all("eager" in str(one.recipe) for one in old)


def test_a_batch_is_accumulated_from_the_largest_micro_batches_that_fit() -> None:
    found = fit(BERT, memory=600 * MIB, recipe="fp32+eager", batch_size=12, **SMALL)
    assert isinstance(found, TrainingFit)
    assert found.batch_size * found.accumulate == 12
    assert found.accumulate > 1
    assert found.more in (2, 3, 4, 6, 12)
    assert (found.more_peak or 0) > 600 * MIB >= found.peak
    assert f"gradient_accumulation_steps={found.accumulate}" in str(found.code)


@pytest.mark.parametrize(
    ("recipe", "work", "labels"),
    [
        (
            "fp32+eager",
            Work("train", batch_size=2),
            ["sdpa attention", "bf16 mixed precision", "checkpointing", "8-bit Adam", "Adafactor",
             "bf16 weights", "LoRA", "batch 1, accumulated 2 times", "sequences of 256 tokens"],
        ),
        (
            "bf16+bnb-int8+lora+checkpointing",
            Work("train", mixed_precision="bf16", seq_len=128),
            ["4-bit weights", "adapters in bf16"],
        ),
        (
            "bf16",
            Work("generate", num_beams=4),
            ["8-bit weights", "4-bit weights", "no beams", "prompts of 256 tokens"],
        ),
        (
            "bnb-nf4",
            Work("generate", prompt_tokens=8, batch_size=3),
            ["nested scales", "batch 1"],
        ),
    ],
    ids=["full", "qlora", "beams", "4-bit"],
)  # fmt: skip
def test_changes_are_those_that_are_not_there_yet(
    recipe: str, work: Work, labels: list[str]
) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    found = candidates.changes(Recipe.parse(recipe), work, config, on_gpu=True)
    assert [one.label for one in found] == labels
    assert all(one.cost for one in found)
    assert all((one.recipe, one.work) != (Recipe.parse(recipe), work) for one in found)


def test_a_checkpoint_in_half_is_offered_its_own_kind_of_mixed_precision() -> None:
    config = {"architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    found = candidates.changes(Recipe.parse("lora"), Work("train"), config, on_gpu=True)
    assert found[0].work.mixed_precision == "fp16"


@pytest.mark.parametrize("per_row", [1, 90, 399, 400, 401])
def test_the_largest_batch_is_exact_on_lines_and_in_few_runs(per_row: int) -> None:
    tried: list[int] = []

    def peak(rows: int) -> int:
        tried.append(rows)
        return 1000 + per_row * rows

    found = largest_batch(peak, 1800)
    assert found == 800 // per_row
    assert len(tried) == len(set(tried)) <= 6


def test_the_largest_batch_is_exact_where_there_is_no_line() -> None:
    assert largest_batch(lambda n: n**2, 10_000) == 100
    assert largest_batch(lambda n: n // 50 * 1000, 7_000) == 399
    assert largest_batch(lambda n: 0, 1) == MOST
    assert largest_batch(lambda n: n, 8, start=9) == 0


def test_an_optimizer_that_is_not_known_is_refused() -> None:
    with pytest.raises(FeatherweightError, match="no optimizer is known as 'adamx'"):
        fit(BERT, memory=GIB, optimizer="adamx", **SMALL)


def test_a_limit_below_the_process_itself_is_one_line() -> None:
    with pytest.raises(FeatherweightError, match="nothing can fit into 100 MiB: the process takes"):
        fit("minilm-l6", memory="100MiB", train=True, gpu="t4")
