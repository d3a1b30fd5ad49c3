"""Which recipes fit: every claim is checked against a prediction or a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import featherweight as fw
from featherweight.anatomy.asked import ask
from featherweight.errors import FeatherweightError
from featherweight.fitting.facts import Facts
from featherweight.fitting.fit import fit
from featherweight.fitting.result import Fit
from featherweight.fitting.search import largest_divisor, longest
from featherweight.known import config_dict
from featherweight.recipe import Recipe
from featherweight.tensors import decoded_bytes, held

MIB, GIB = 2**20, 2**30
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 32768,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def on_gpu() -> Fit:
    """A Llama of 36 million parameters where 300 MiB are CUDA's own: fp32 is too large alone."""
    found = fit(LLAMA, memory=430 * MIB, gpu="t4", ctx=512)
    assert isinstance(found, Fit)
    return found


def predicted(recipe: str, context: int) -> int:
    new = min(128, context // 2)
    return fw.memory(
        LLAMA, recipe, gpu="t4", prompt_tokens=context - new, new_tokens=new
    ).peak.process


def test_what_fits_is_what_is_predicted_to(on_gpu: Fit) -> None:
    assert on_gpu.fits
    assert {row.recipe for row in on_gpu.rows} == {
        "fp32",
        "fp16",
        "bnb-int8",
        "bnb-nf4:double:compute=fp16",
    }
    run = [row for row in on_gpu.rows if row.peak is not None]
    assert len(run) == 3
    for row in run:
        assert row.peak == predicted(row.recipe, 512)
        assert row.fits == (max(row.peak, row.load_peak or 0) <= 430 * MIB)


def test_a_recipe_whose_weights_are_too_much_is_not_run(on_gpu: Fit) -> None:
    fp32 = on_gpu.rows[-1]
    assert (fp32.recipe, fp32.fits, fp32.peak, fp32.context) == ("fp32", False, None, 0)
    assert fp32.weights is not None
    assert fp32.weights + 300 * MIB > 430 * MIB
    assert fp32.missing > 0
    assert "not run" in str(fp32.reason)


def test_those_that_fit_come_first_and_the_least_to_read_first(on_gpu: Fit) -> None:
    assert [row.fits for row in on_gpu.rows] == sorted((r.fits for r in on_gpu.rows), reverse=True)
    read = [row.read for row in on_gpu.rows if row.fits and row.read]
    assert read == sorted(read)
    assert len(read) == 3
    assert on_gpu.best is on_gpu.rows[0]
    assert on_gpu.best.recipe == "bnb-nf4:double:compute=fp16"
    assert all(row.tokens_per_s is None for row in on_gpu.rows)  # its bandwidth is not known


def test_the_longest_context_fits_and_leaves_little(on_gpu: Fit) -> None:
    best = on_gpu.best
    assert best is not None
    assert best.context is not None
    assert best.context >= 512
    needs = predicted(best.recipe, best.context)
    assert needs <= 430 * MIB
    assert predicted(best.recipe, best.context + 2048) > 430 * MIB


def test_the_cache_is_of_the_whole_context(on_gpu: Fit) -> None:
    fp16 = next(row for row in on_gpu.rows if row.recipe == "fp16")
    whole = 8 * 2 * 512 * 512 * 2  # layers, keys and values, tokens, width, bytes
    assert fp16.kv_cache == pytest.approx(whole, rel=0.01)
    assert fp16.read == (fp16.weights or 0) + (fp16.kv_cache or 0) - 4000 * 512 * 2


def test_where_nothing_fits_the_nearest_is_run_and_says_what_is_missing() -> None:
    found = fit(LLAMA, memory=310 * MIB, gpu="t4", ctx=1024)
    assert isinstance(found, Fit)
    assert not found.fits
    assert found.best is None
    assert found.nearest is not None
    assert found.nearest.peak is not None
    assert found.nearest.missing >= found.nearest.peak - 310 * MIB > 0


def test_on_a_cpu_tokens_per_second_are_what_reading_allows(tiny_llama: Path) -> None:
    found = fit(tiny_llama, memory="4GiB", recipe="int8:head=int8", batch_size=2)
    assert isinstance(found, Fit)
    assert found.bandwidth
    (row,) = found.rows
    assert row.fits
    assert row.read
    assert row.tokens_per_s == pytest.approx(2 * found.bandwidth / row.read)
    assert row.command == (f"featherweight generate {tiny_llama} PROMPT --recipe int8:head=int8")
    assert found.context == 256
    assert found.context_source.startswith("the most")


def test_an_encoder_makes_one_pass_and_reads_nothing_twice() -> None:
    found = fit("minilm-l6", memory=2 * GIB, recipe="fp32")
    assert isinstance(found, Fit)
    (row,) = found.rows
    assert found.workload == "forward pass, batch 1 × 512 tokens"
    assert (row.fits, row.read, row.kv_cache, row.tokens_per_s) == (True, None, None, None)
    assert row.command == 'model = featherweight.load("minilm-l6", "fp32").model'


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "int8", "nf4:double:head=int8"])
def test_weights_and_what_a_token_reads_are_those_of_the_real_model(
    tiny_llama: Path, tiny_gpt2: Path, recipe: str
) -> None:
    for folder in (tiny_llama, tiny_gpt2):
        model = fw.load(folder, recipe).model
        weights, read = Facts(ask(folder)).weights(Recipe.parse(recipe), 1)
        assert weights == pytest.approx(held(model).total, abs=1024)
        assert read == pytest.approx(decoded_bytes(model), abs=1024)


def test_of_experts_as_many_are_read_as_tokens_can_choose() -> None:
    facts = Facts(ask("mixtral-8x7b"))
    recipe = Recipe.parse("bf16")
    weights, one = facts.weights(recipe, 1)
    expert = 32 * 3 * 4096 * 14336 * 2  # layers, matrices, bytes
    embedding = 32000 * 4096 * 2
    assert one == pytest.approx(weights - embedding - 6 * expert)
    assert facts.weights(recipe, 4)[1] == weights - embedding
    assert "of 8 experts, 2 are read for a step" in facts.notes


def test_loading_holds_two_tensors_of_those_that_change() -> None:
    facts = Facts(ask("llama-2-7b"))
    head, widest = 32000 * 4096 * 2, 4096 * 11008 * 2
    assert facts.loading(Recipe.parse("fp16")) == 0  # as stored: views of the file
    assert facts.loading(Recipe.parse("nf4:double")) == 2 * widest
    assert facts.loading(Recipe.parse("nf4:double:head=int8")) == 2 * head
    assert facts.loading(Recipe.parse("bf16")) == 2 * head


def test_short_names_become_names_that_can_be_loaded() -> None:
    found = fit("smollm2-360m", memory="8GiB", recipe="bf16", ctx=64, revision=None)
    assert isinstance(found, Fit)
    assert found.rows[0].command is not None
    assert found.rows[0].command.startswith("featherweight generate HuggingFaceTB/SmolLM2-360M ")


def test_a_gpu_gets_lines_of_python_and_its_own_size_as_the_limit() -> None:
    found = fit(LLAMA | {"_name_or_path": "me/it"}, gpu="t4", ctx=64, recipe="bnb-nf4:double")
    assert isinstance(found, Fit)
    assert (found.memory, found.memory_source) == (15 * GIB, "all of t4")
    said = str(found.rows[0].command)
    assert said.startswith('model = AutoModelForCausalLM.from_pretrained("me/it", ')
    assert 'bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True' in said


def test_a_context_that_the_model_was_not_made_for_is_said_or_refused() -> None:
    short = LLAMA | {"max_position_embeddings": 256}
    found = fit(short, memory=GIB, gpu="t4", ctx=300, recipe="fp32")
    assert "300 tokens are more than the 256 that the config names" in found.notes
    with pytest.raises(FeatherweightError, match="has 512 positions, and 600 tokens"):
        fit("minilm-l6", memory="2GiB", ctx=600, recipe="fp32")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"memory": "12 apples"}, "'12 apples' is no size"),
        ({"memory": 0}, "memory is 0"),
        ({"ctx": 1}, "ctx is 1"),
        ({"seq_len": 8}, "seq_len is of training"),
        ({"ctx": 8, "train": True}, "ctx is of inference"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"cuda_context": MIB}, "cuda_context without a gpu"),
        ({"recipe": "fastpath"}, "a dry run cannot look into the fast path"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(FeatherweightError, match=says):
        fit(LLAMA, **{"memory": GIB, **options})


@pytest.mark.parametrize(
    ("per_token", "square"), [(1000, 0), (7, 0), (100, 1)], ids=["steep", "flat", "quadratic"]
)
def test_the_longest_length_is_found_in_few_tries(per_token: int, square: int) -> None:
    tried: list[int] = []

    def peak(tokens: int) -> int:
        tried.append(tokens)
        return 10**6 + per_token * tokens + square * tokens**2

    limit = peak(6000)
    found = longest(peak, (512, peak(512)), 10**6, limit, most=10**6)
    assert peak(found) <= limit
    assert found in tried
    assert limit - peak(found) <= 0.05 * limit
    assert len(tried) <= 8


def test_the_longest_length_is_none_or_all() -> None:
    assert longest(lambda n: 100 + n, (512, 612), 100, 90, most=4096) == 0
    assert longest(lambda n: 100 + n, (4096, 4196), 100, 10**6, most=4096) == 4096


def test_the_largest_divisor_is_found() -> None:
    assert largest_divisor(lambda n: n, 5, 12) == 4
    assert largest_divisor(lambda n: n, 12, 12) == 12
    assert largest_divisor(lambda n: n, 1, 7) == 1


def test_the_config_of_a_known_model_is_left_as_it_was() -> None:
    before = config_dict("llama-2-7b")
    Facts(ask("llama-2-7b")).weights(Recipe.parse("fp32"), 1)
    assert config_dict("llama-2-7b") == before
