"""`featherweight.profiling.profile`: real models, counted and timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from featherweight import native
from featherweight.errors import FeatherweightError, ModelError, UnsupportedError
from featherweight.profiling import profile as home
from featherweight.profiling.operations import CONTRACTION, ELEMENTWISE, NORMALISATION, UNKNOWN
from featherweight.profiling.profiled import Profile
from featherweight.profiling.scores import heads_of, scores
from featherweight.report.profile import attention, lines, render, verdict

profile = home.profile
GIB = 2**30


@pytest.fixture(scope="module")
def real(smollm2: str) -> Profile:
    return profile(smollm2, seq_len=32, runs=2)


@pytest.fixture(scope="module")
def trained(smollm2: str) -> Profile:
    return profile(smollm2, train=True, seq_len=32, runs=1)


def group_flops(made: Profile, phase: str, names: set[str]) -> int:
    return sum(o.work.flops for o in made.operations if o.phase == phase and o.name in names)


def test_flops_of_the_real_decoder_are_those_of_its_weights(real: Profile) -> None:
    hidden, inside, vocabulary, keys = 576, 1536, 49152, 192
    layer = 2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * inside
    mm = next(o for o in real.operations if o.name == "mm")
    assert mm.work.calls == 30 * 7 + 1
    assert mm.work.flops == 2 * (32 * 30 * layer + hidden * vocabulary)  # head: last token only
    flash = next(o for o in real.operations if "flash" in o.name)
    assert flash.work.flops == 30 * 4 * 9 * 32 * 32 * 64
    assert mm.work.read > 4 * (30 * layer + hidden * vocabulary)


def test_every_op_of_the_real_models_has_a_group(real: Profile, trained: Profile) -> None:
    for made in (real, trained, profile("minilm-l6", seq_len=16, runs=1)):
        assert [o.name for o in made.operations if o.group == UNKNOWN] == []
        assert not any("not classified" in note for note in made.notes)
    groups = {o.name: o.group for o in trained.operations}
    assert groups["mean"] == groups["rsqrt"] == groups["_log_softmax"] == NORMALISATION
    assert groups["nll_loss_forward"] == groups["sum"] == NORMALISATION
    assert groups["mul"] == groups["silu"] == groups["cat"] == groups["embedding"] == ELEMENTWISE
    assert groups["mm"] == CONTRACTION
    assert groups["_scaled_dot_product_flash_attention_for_cpu_backward"] == CONTRACTION


def test_linear_layers_cost_exactly_twice_as_much_backward(trained: Profile) -> None:
    forward = group_flops(trained, "forward", {"mm"})
    assert group_flops(trained, "backward", {"mm"}) == 2 * forward
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    back = group_flops(trained, "backward", {flash + "_backward"})
    assert back == 2.5 * group_flops(trained, "forward", {flash})
    assert trained.settings["loss"] == "next tokens"


def test_encoders_are_trained_too(tiny_bert: Path, read: Callable[..., Any]) -> None:
    made = profile(read(tiny_bert), train=True, seq_len=16, runs=1)
    products = {"addmm", "mm"}
    # The pooler is no part of the loss.
    forward = group_flops(made, "forward", products) - 2 * 64 * 64
    assert group_flops(made, "backward", products) == 2 * forward
    assert made.settings["loss"] == "mean square of the output"
    names = {o.name for o in made.operations if o.phase == "backward"}
    assert "native_layer_norm_backward" in names


def test_shares_and_sums_are_of_the_whole(real: Profile) -> None:
    whole = real.total()
    assert whole is not None
    parts = [real.total("forward", g) for g in (CONTRACTION, NORMALISATION, ELEMENTWISE)]
    works = [part for part in parts if part]
    assert sum(work.flops for work in works) == whole.flops
    assert sum(work.moved for work in works) == whole.moved
    assert sum(work.seconds for work in works) == pytest.approx(whole.seconds)
    assert whole.seconds == pytest.approx(real.operations_s)
    assert real.outside_s + real.operations_s == pytest.approx(real.seconds)
    assert real.outside_s >= 0
    assert all(len(o.work.samples) == 2 for o in real.operations)
    assert real.total("backward") is None


def test_each_call_is_placed_under_the_roofline(real: Profile) -> None:
    mean = next(o.work for o in real.operations if o.name == "mean")
    assert mean.bound == "memory"
    assert mean.attainable_s == pytest.approx(mean.moved / real.roofline.bandwidth / 1e9)
    assert mean.intensity == pytest.approx(0.25, rel=0.01)  # 1 FLOP for 4 bytes read


def test_json_has_every_sample_and_shares_of_one(real: Profile) -> None:
    document = json.loads(json.dumps(real.to_json(), allow_nan=False))
    shares = sum(o["share"] for o in document["operations"]) + document["outside"]["share"]
    assert shares == pytest.approx(1)
    assert document["settings"]["pass"] == "forward"
    assert document["model"]["parameters"] == 134515008
    assert {g["group"] for g in document["groups"]} == {CONTRACTION, NORMALISATION, ELEMENTWISE}
    assert len(document["wall"]) == 2


def test_decoding_reads_the_weights_and_waits_for_memory(smollm2: str) -> None:
    made = profile(smollm2, decode=True, seq_len=16, runs=1)
    mm = next(o for o in made.operations if o.name == "mm")
    assert mm.work.bound == "memory"
    assert mm.work.flops == 2 * 134_479_872  # a multiply and an add for each weight of a Linear
    assert mm.work.intensity == pytest.approx(0.5, rel=0.01)


@pytest.mark.skipif(not native.status().available, reason="the fast path is native")
def test_the_fast_path_is_seen_as_one_op(tiny_llama: Path, read: Callable[..., Any]) -> None:
    model = read(tiny_llama)
    plain = profile(model, seq_len=8, runs=1)
    fast = profile(model, "fastpath", seq_len=8, runs=1)
    block = next(o for o in fast.operations if o.name == "featherweight::decoder_layers")
    head = next(o for o in fast.operations if o.name == "mm")
    products = {"mm", "_scaled_dot_product_flash_attention_for_cpu"}
    assert block.work.flops + head.work.flops == group_flops(plain, "forward", products)
    assert any("fast path" in note for note in fast.notes)
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128
    states, cache = 4 * 8 * 64, 2 * 2 * 2 * 16 * 8 * 4
    assert block.work.read == 2 * 4 * layer + states + cache


def test_a_quantised_model_multiplies_by_our_ops(tiny_llama: Path, read: Callable) -> None:
    made = profile(read(tiny_llama), "int8", seq_len=8, runs=1)
    names = {o.name: o.work.calls for o in made.operations if o.group == CONTRACTION}
    assert names["featherweight::linear_int8"] == 14


def test_a_model_object_is_put_back(tiny_llama: Path, read: Callable, state: Any) -> None:
    model = read(tiny_llama)
    model.model.layers[0].train()
    before, rng = state(model), torch.get_rng_state()
    profile(model, "bf16", train=True, seq_len=8, runs=1)
    assert state(model) == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"train": True, "decode": True}, "exclude each other"),
        ({"seq_len": 300}, "the profile takes 300 tokens, and the model 256; lower --prompt"),
        ({"seq_len": 250, "decode": True}, "the profile takes 262 tokens"),
        ({"runs": 0}, "runs is 0; give a whole number from 1 upwards"),
    ],
    ids=["both", "long", "decode", "runs"],
)
def test_settings_that_cannot_be(
    tiny_llama: Path, read: Callable, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(FeatherweightError, match=says):
        profile(read(tiny_llama), **options)


def test_models_that_cannot_be(tiny_bert: Path, tiny_llama: Path, read: Callable) -> None:
    with pytest.raises(UnsupportedError, match="Linear cannot be profiled; decoders and encoders"):
        profile(nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="BertModel writes no text"):
        profile(read(tiny_bert), decode=True)
    frozen = read(tiny_llama).requires_grad_(False)
    with pytest.raises(FeatherweightError, match="no parameter of LlamaForCausalLM is trained"):
        profile(frozen, train=True, seq_len=8)
    with pytest.raises(ModelError, match="a profile runs the model for real, so that a config"):
        profile("./nowhere")


def test_the_score_matrix_at_checked_lengths() -> None:
    short, long = scores(40, 128, 2, (16_000, 100_000))
    assert short.eager == 20_480_000_000
    assert round(short.eager / GIB) == 19
    assert round(long.eager / GIB) == 745
    assert short.flash == 40 * 16_000 * (4 + 2 * 128)
    assert scores(40, 128, 2, (16_000,), batch_size=3)[0].eager == 3 * short.eager


def test_heads_come_from_the_config(tiny_config: Callable[..., Any]) -> None:
    assert heads_of(tiny_config()) == (4, 16)
    assert heads_of(tiny_config(head_dim=32)) == (4, 32)


def test_a_table_says_all_that_was_found(real: Profile, trained: Profile) -> None:
    text = str(real)
    for said in ("smollm2-135m", "LlamaForCausalLM", "tensor contraction", "mm", "roofline"):
        assert said in text
    assert "outside of operations" in text
    assert "backward" not in text
    found = lines(trained)
    assert [line.cells[0] for line in found if line.level == 0] == ["forward", "backward", "all"]
    assert found[-1].cells[-1] == "100.0"
    assert verdict(real).startswith("tensor contractions are 99.")
    title, rows = attention(real)
    assert title == "attention of one layer, 9 heads of 64, float32, batch 1"
    assert rows[0] == ("512", "9.00 MiB", "1.14 MiB", "8×")


def test_a_narrow_table_keeps_what_matters(trained: Profile) -> None:
    text = render(trained, "human", width=80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "time %" in text
    assert "calls" not in text
    assert "…" not in text


def test_markdown_and_csv(real: Profile) -> None:
    table = render(real, "md").splitlines()
    assert table[0].startswith("| operation | calls | GFLOP |")
    assert len({line.count("|") for line in table[: table.index("")]}) == 1
    head, *rows = render(real, "csv").splitlines()
    assert head.startswith("phase,group,name,calls,flops,read,written")
    assert len(rows) == len(real.operations) + 1
    assert rows[-1].startswith(",,outside of operations")
    with pytest.raises(FeatherweightError, match="unknown report format 'xml'"):
        render(real, "xml")
