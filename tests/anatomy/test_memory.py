"""`fw.memory`: predictions that can be worked out by hand, and those that were published."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import featherweight as fw
from featherweight.anatomy.result import Memory
from featherweight.errors import FeatherweightError, ModelError, RecipeError, UnsupportedError
from featherweight.known import config_dict

MIB = 1 << 20


PARAMETERS = 2 * 1000 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64


def test_model_states_of_training_are_16_bytes_a_parameter(tiny: dict) -> None:
    found = fw.memory(tiny, "fp32", train=True, batch_size=1, seq_len=8, optimizer="adamw_torch")
    assert found.parameters == PARAMETERS
    assert 4 * PARAMETERS <= found.categories["weights"] <= 4 * PARAMETERS + 256  # rotary
    gradients_and_states = found.phases["optimizer"] - found.categories["weights"]
    assert gradients_and_states >= 12 * PARAMETERS


def test_half_precision_halves_weights_gradients_and_states(tiny: dict) -> None:
    options: dict[str, Any] = {"train": True, "seq_len": 8, "optimizer": "adamw_torch"}
    whole = fw.memory(tiny, "fp32", **options)
    half = fw.memory(tiny, "bf16", **options)
    assert half.categories["weights"] == pytest.approx(whole.categories["weights"] / 2, rel=0.01)


def test_a_prediction_is_made_of_its_parts(tiny: dict) -> None:
    found = fw.memory(tiny, "fp32", train=True, batch_size=2, seq_len=64, gpu="a100-40gb")
    assert sum(found.categories.values()) == found.peak.allocated
    assert max(found.phases.values()) == found.peak.allocated
    assert max(moment.allocated for moment in found.timeline) == found.peak.allocated
    assert found.peak.allocated <= found.peak.reserved
    assert found.peak.process == found.peak.reserved + 400 * MIB
    again = Memory.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found


def test_eager_attention_holds_the_scores_and_flash_does_not(tiny: dict) -> None:
    options: dict[str, Any] = {"train": True, "seq_len": 512, "gpu": "a100-40gb"}
    eager = fw.memory(tiny, "bf16+eager", **options)
    flash = fw.memory(tiny, "bf16+sdpa", **options)
    assert flash.attention == ["flash"]
    assert eager.attention == []
    scores = 4 * 512 * 512 * 2
    # of each layer the softmax in float32 and its copy in bfloat16, for backward
    assert eager.peak.allocated - flash.peak.allocated > 2 * scores * 3


def test_checkpointing_does_not_change_the_attention_kernel(tiny: dict) -> None:
    """transformers makes no mask for whole sequences, but does for tensors that are exported."""
    options: dict[str, Any] = {"train": True, "seq_len": 64, "gpu": "a100-40gb"}
    assert fw.memory(tiny, "bf16+sdpa+checkpointing", **options).attention == ["flash"]
    assert fw.memory(tiny, "bf16+sdpa+checkpointing", padding=0.2, **options).attention == [
        "efficient"
    ]


def test_checkpointing_keeps_the_inputs_of_layers(tiny: dict) -> None:
    options: dict[str, Any] = {"train": True, "batch_size": 8, "seq_len": 256, "optimizer": "none"}
    deep = tiny | {"num_hidden_layers": 8, "vocab_size": 100}
    plain = fw.memory(deep, "fp32+eager", **options)
    checkpointed = fw.memory(deep, "fp32+eager+checkpointing", **options)
    assert checkpointed.peak.allocated < 0.4 * plain.peak.allocated


def test_accumulation_keeps_gradients_during_the_next_forward(tiny: dict) -> None:
    options: dict[str, Any] = {"train": True, "batch_size": 4, "seq_len": 128, "optimizer": "sgd"}
    one = fw.memory(tiny, "fp32", **options)
    four = fw.memory(tiny, "fp32", accumulate=4, **options)
    grown = four.peak.allocated - one.peak.allocated
    assert 0 < grown <= 4 * PARAMETERS + 4096
    assert fw.memory(tiny, "fp32", accumulate=9, **options).peak == four.peak


def test_lora_trains_its_adapters_alone(tiny: dict) -> None:
    found = fw.memory(
        tiny, "bf16+lora:r=4:target=q_proj,v_proj", train=True, seq_len=8, optimizer="adamw_torch"
    )
    adapters = 2 * (4 * (64 + 64) + 4 * (64 + 32))
    highest = {
        name: max(moment.categories.get(name, 0) for moment in found.timeline)
        for name in ("gradients", "optimizer state")
    }
    assert highest["gradients"] == 4 * adapters
    assert highest["optimizer state"] == pytest.approx(8 * adapters, abs=64)


def test_a_lora_config_says_the_same_as_the_technique(tiny: dict) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    options: dict[str, Any] = {"train": True, "seq_len": 8}
    by_config = fw.memory(tiny, "bf16", lora=config, **options)
    by_recipe = fw.memory(tiny, "bf16+lora:r=4:target=q_proj,v_proj", **options)
    assert by_config.peak == by_recipe.peak


def test_training_arguments_are_taken_as_they_are(tiny: dict, tmp_path: Path) -> None:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=3,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        optim="adafactor",
        use_cpu=True,
    )
    found = fw.memory(tiny, "fp32", train=arguments, seq_len=64)
    by_hand = fw.memory(
        tiny,
        "fp32+checkpointing",
        train=True,
        batch_size=3,
        accumulate=2,
        optimizer="adafactor",
        seq_len=64,
    )
    assert found.peak == by_hand.peak
    assert found.recipe == "fp32+checkpointing"


@pytest.mark.parametrize("recipe", ["int8", "nf4", "nf4:double", "bf16:compute=fp32", "bnb-nf4"])
def test_quantised_weights_have_the_size_of_their_codes(recipe: str) -> None:
    found = fw.memory("smollm2-135m", recipe, prompt_tokens=16, new_tokens=4)
    linear = 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536)
    rows = 30 * (2 * 576 + 2 * 192 + 2 * 1536 + 576)
    rest = 49152 * 576 * 4 + (2 * 30 + 1) * 576 * 4
    expected = {
        "int8": linear + 4 * rows + rest,
        "nf4": linear / 2 + 4 * linear / 64 + rest,
        "bnb-nf4": linear / 2 + 4 * linear / 64 + rest,
        "nf4:double": linear / 2 + linear / 64 + 4 * linear / 64 / 256 + rest,
        "bf16:compute=fp32": 2 * linear + 49152 * 576 * 2 + (2 * 30 + 1) * 576 * 4,
    }[recipe]
    # codebooks of every layer come to less than 0.3 MiB
    assert expected <= found.categories["weights"] < expected + 0.3 * MIB


def test_keys_and_values_of_a_generation(tiny: dict) -> None:
    found = fw.memory(tiny, "fp32", batch_size=2, prompt_tokens=300, new_tokens=100)
    tokens = 300 + 100 - 1  # the last token is not read any more
    highest = max(moment.categories.get("KV cache", 0) for moment in found.timeline)
    one_layer_twice = 2 * 32 * tokens * 4 * 2
    assert 2 * one_layer_twice <= highest <= 3 * one_layer_twice


def shallow(name: str, layers: int = 2) -> dict[str, Any]:
    """A known config with fewer layers, which are all alike."""
    config = config_dict(name)
    keys = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers")
    for key in (*keys, "decoder_layers", "num_decoder_layers"):
        if key in config:
            config[key] = layers
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][-layers:]
    return config


def test_a_sliding_window_caps_the_cache() -> None:
    config = shallow("mistral-7b")
    short = fw.memory(config, "bf16", prompt_tokens=4096, new_tokens=8)
    long = fw.memory(config, "bf16", prompt_tokens=16_384, new_tokens=8)
    most = {
        name: max(moment.categories.get("KV cache", 0) for moment in found.timeline[-40:])
        for name, found in (("short", short), ("long", long))
    }
    assert most["long"] < 1.1 * most["short"]


def test_every_expert_is_in_memory_and_the_reader_is_told(tiny: dict) -> None:
    found = fw.memory(shallow("mixtral-8x7b"), "bf16", prompt_tokens=64, new_tokens=2)
    layer = 8 * 3 * 4096 * 14336 + 4096 * 8 + 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096
    assert found.parameters == 2 * 32000 * 4096 + 2 * layer + 4096
    assert found.categories["weights"] == pytest.approx(2 * found.parameters, rel=1e-3)
    assert any("every expert" in note for note in found.notes)


@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("albert-base", "masked-lm"),
        ("distilbert", "sequence-classification"),
        ("opt-350m", None),
        ("gpt2", None),
        ("t5-3b", None),
        ("whisper-large", None),
        ("gemma-2-2b", None),
        ("gemma-3-1b", None),
        ("phi-1.5", None),
        ("falcon-7b", None),
        ("qwen3-30b-a3b", None),
        ("octocoder", None),
        ("bloom-176b", None),
    ],
)
def test_architectures_train_and_generate(model: str, task: str | None) -> None:
    config = shallow(model)
    trained = fw.memory(config, "bf16", train=True, task=task, seq_len=64, gpu="a100-80gb")
    assert trained.peak.allocated > 8 * trained.parameters  # weights, gradients, two moments
    if task is None:
        written = fw.memory(config, "bf16", prompt_tokens=64, new_tokens=8, gpu="a100-80gb")
        assert 2 * written.parameters <= written.categories["weights"] < written.peak.allocated


@pytest.mark.parametrize(
    ("keywords", "error", "says"),
    [
        ({"model": "no-such-model-at-all"}, ModelError, "no-such-model-at-all"),
        ({"gpu": "voodoo2"}, FeatherweightError, "no GPU is known as 'voodoo2'"),
        ({"batch_size": 0}, FeatherweightError, "batch_size is 0; give a whole number"),
        ({"padding": 1.0}, FeatherweightError, "padding is 1.0"),
        ({"optimizer": "adman"}, FeatherweightError, "no optimizer is known as 'adman'"),
        ({"recipe": "fp33"}, RecipeError, "unknown technique 'fp33'"),
        ({"recipe": "fp32+fastpath"}, UnsupportedError, "cannot look into the fast path"),
        ({"task": "poetry"}, FeatherweightError, "no task 'poetry'; allowed: causal-lm"),
        ({"model": "t5-3b", "task": "masked-lm"}, ModelError, "makes no model"),
        ({"cuda_context": 1}, FeatherweightError, "cuda_context without a gpu"),
        ({"transformers": "new"}, FeatherweightError, "'new' is no version of transformers"),
        ({"train": True, "forward": True}, FeatherweightError, "exclude each other"),
        ({"train": "yes"}, FeatherweightError, "train is a str"),
        ({"model": 7}, FeatherweightError, "memory() got a int"),
        (
            {"model": {"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}},
            UnsupportedError,
            "stored quantised (gptq): a dry run cannot build them; predict the model",
        ),
    ],
)
def test_bad_input_is_one_line(keywords: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        fw.memory(**{"model": "smollm2-135m", "recipe": "fp32"} | keywords)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_length_that_the_model_cannot_take_is_one_line() -> None:
    with pytest.raises(ModelError, match="'gpt2' has 1,024 positions, and 3,000 tokens are asked"):
        fw.memory("gpt2", "fp32", train=True, seq_len=3000)


def test_a_length_that_the_config_does_not_name_is_said(tiny: dict) -> None:
    found = fw.memory(tiny, "fp32", prompt_tokens=600, new_tokens=1)
    assert found.notes[0] == "601 tokens are more than the 512 that the config names"


def test_a_dry_run_leaves_nothing_fake_behind(tiny: dict) -> None:
    """Libraries that are imported on the way make their constants of real tensors."""
    program = """
import featherweight as fw, sys, torch
from torch._subclasses.fake_tensor import FakeTensor
import gc
config = %r
first = fw.memory(config, "bf16+lora:r=2", train=True, seq_len=8)
second = fw.memory(config, "bf16+lora:r=2", train=True, seq_len=8)
assert first == second, (first.peak, second.peak)
gc.collect()
left = [o for o in gc.get_objects() if isinstance(o, FakeTensor)]
print(len(left))
"""
    done = subprocess.run(
        [sys.executable, "-c", program % (tiny,)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.split()[-1] == "0"


@pytest.mark.parametrize("recipe", ["fp32", "fp16"])
def test_experts_run_in_every_dtype(recipe: str) -> None:
    config = shallow("mixtral-8x7b")
    found = fw.memory(config, recipe, train=True, seq_len=16, optimizer="none")
    width = 4 if recipe == "fp32" else 2
    assert found.categories["weights"] == pytest.approx(width * found.parameters, rel=1e-3)
    assert found.peak.allocated > 2 * width * found.parameters  # and a gradient of each


def test_positions_of_a_picture_do_not_bound_the_text() -> None:
    config = config_dict("gemma-3-4b")
    config["text_config"] |= {"num_hidden_layers": 6}
    config["vision_config"] |= {"num_hidden_layers": 1}
    found = fw.memory(config, "bf16", prompt_tokens=8000, new_tokens=2)
    assert found.categories["weights"] > 0


def test_a_layer_that_is_computed_again_is_left_again(tiny: dict) -> None:
    """Recomputation ends by an exception; what comes after is not that layer's."""
    found = fw.memory(
        tiny, "fp32+checkpointing", train=True, seq_len=256, batch_size=4, optimizer="adamw_torch"
    )
    states = {h.module for h in found.holders if h.category == "optimizer state"}
    assert states == {""}


BART = {
    "model_type": "bart",
    "architectures": ["BartForConditionalGeneration"],
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "is_encoder_decoder": True,
}


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"train": True, "seq_len": 129}, "has 128 positions, and 129 tokens are asked for"),
        ({"prompt_tokens": 129, "new_tokens": 2}, "has 128 positions, and 129 tokens"),
        ({"padding": 0.1}, "is an encoder-decoder, which is predicted without padding"),
    ],
)
def test_an_encoder_decoder_refuses_what_it_cannot_take(keywords: dict, says: str) -> None:
    assert fw.memory(BART, "fp32", prompt_tokens=128, new_tokens=8).peak.allocated > 0
    with pytest.raises(FeatherweightError, match=says):
        fw.memory(BART, "fp32", **keywords)
