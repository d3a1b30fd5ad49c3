"""flash: the flash kernel and no other, or an error that says why."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import featherweight as fw
from featherweight.errors import UnsupportedError
from featherweight.techniques.flash import OTHERS, only_flash

KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


class Attentions(TorchDispatchMode):
    """The attention kernels that torch really runs, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "attention" in name or name == "_softmax":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_flash_in_torch() -> Iterator[None]:
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(True)


@pytest.mark.parametrize("recipe", ["flash", "bf16+flash", "fp16+flash"])
def test_every_layer_runs_the_flash_kernel_and_equals_sdpa(
    tiny: Path, recipe: str, read: Any, answer: Any
):
    model = read(tiny)
    with fw.apply(model, recipe.replace("flash", "sdpa")):
        expected = answer(model)
    with fw.apply(model, recipe), Attentions() as ran:
        found = answer(model)  # padded
    assert ran.names == [KERNEL] * 2
    # torch prefers the same kernel by itself on a CPU
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_prefill_and_decode_run_it(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    ids = torch.arange(3, 19)[None]
    expected = model(ids).logits
    with fw.apply(model, "flash"):
        with Attentions() as prefill:
            first = model(ids[:, :12], use_cache=True)
        with Attentions() as decode:
            one = model(ids[:, 12:13], past_key_values=first.past_key_values)
        with Attentions() as several:
            rest = model(ids[:, 13:], past_key_values=one.past_key_values)
    assert prefill.names == decode.names == several.names == [KERNEL] * 2
    found = torch.cat([first.logits, one.logits, rest.logits], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_generate_gives_the_same_tokens(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    ids = torch.arange(20).reshape(2, 10)
    mask = torch.tensor([[0] * 4 + [1] * 6, [1] * 10])
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, **options)
    with fw.apply(model, "flash"), Attentions() as ran:
        assert torch.equal(model.generate(ids, **options), expected)
    assert set(ran.names) == {KERNEL}


@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_a_padded_row_is_as_if_alone(tiny_llama: Path, side: str, read: Any):
    model = read(tiny_llama)
    ids = torch.arange(2, 26).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[1, slice(7, None) if side == "right" else slice(0, 5)] = 0
    alone = ids[1][mask[1].bool()][None]
    with fw.apply(model, "flash"), Attentions() as ran:
        together = model(ids, attention_mask=mask).logits[1][mask[1].bool()]
        expected = model(alone).logits[0]
    assert set(ran.names) == {KERNEL}
    torch.testing.assert_close(together, expected, rtol=1e-4, atol=1e-4)


def test_training_goes_through_it_too(tiny_llama: Path, read: Any):
    model = read(tiny_llama).train()
    ids = torch.arange(16)[None]
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with fw.apply(model, "flash"), Attentions() as ran:
        model(ids, labels=ids).loss.backward()
    assert set(ran.names) == {KERNEL, f"{KERNEL}_backward"}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_float64_runs_the_flash_kernel(tiny_llama: Path, read: Any, answer: Any):
    model = read(tiny_llama).double()
    expected = answer(model)
    with fw.apply(model, "flash"), Attentions() as ran:
        torch.testing.assert_close(answer(model), expected)
    assert ran.names == [KERNEL] * 2


def test_dropout_in_training_is_an_error_with_the_reason(tiny_gpt2: Path, read: Any):
    model = read(tiny_gpt2)
    before = [enabled() for enabled, _ in OTHERS]
    ids = torch.ones(1, 6, dtype=torch.long)
    with fw.apply(model, "flash"):
        model.train()
        assert model.config.attn_pdrop > 0
        says = r"cannot run here \(cpu, float32, head_dim 16, no mask\): .*dropout.*use 'sdpa'"
        with pytest.raises(UnsupportedError, match=says) as caught:
            model(ids)
        assert "\n" not in str(caught.value)
        assert [enabled() for enabled, _ in OTHERS] == before
        model.eval()
        model(ids)
    assert [enabled() for enabled, _ in OTHERS] == before


@pytest.mark.usefixtures("no_flash_in_torch")
def test_a_torch_without_flash_refuses_at_apply(tiny_llama: Path, read: Any, state: Any):
    model = read(tiny_llama)
    before = state(model)
    with pytest.raises(UnsupportedError, match=r"flash attention cannot run here \(cpu, bfloat16"):
        fw.apply(model, "bf16+flash")
    assert state(model) == before
    applied = fw.apply(model, "bf16+flash", on_fallback="warn")
    (note,) = applied.receipt.notes
    assert note.startswith("flash left out: flash attention cannot run here")
    assert applied.receipt.actual == {"dtype": "bfloat16"}


def test_a_model_without_sdpa_is_refused_before_the_first_change():
    from transformers import MambaConfig, MambaModel

    model = MambaModel(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(UnsupportedError, match="MambaModel supports no scaled_dot_product"):
        fw.apply(model, "bf16+flash", reversible=False)
    assert model.dtype is torch.float32


def test_only_flash_restores_every_switch():
    for _, enable in OTHERS:
        enable(True)
    OTHERS[1][1](False)
    before = [enabled() for enabled, _ in OTHERS]
    query = torch.ones(1, 1, 4, 8)
    try:
        with only_flash():
            assert [enabled() for enabled, _ in OTHERS] == [False] * 3
            F.scaled_dot_product_attention(query, query, query)
        assert [enabled() for enabled, _ in OTHERS] == before
        with pytest.raises(RuntimeError), only_flash():
            F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        assert [enabled() for enabled, _ in OTHERS] == before
    finally:
        OTHERS[1][1](True)


@pytest.fixture
def switches() -> Iterator[list[bool]]:
    """The switches of the other kernels, one of them off, to be found so again."""
    for _, enable in OTHERS:
        enable(True)
    OTHERS[1][1](False)
    before = [enabled() for enabled, _ in OTHERS]
    yield before
    OTHERS[1][1](True)


def test_the_last_to_leave_restores_every_switch(switches: list[bool]):
    first, second = only_flash(), only_flash()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert [enabled() for enabled, _ in OTHERS] == [False] * 3  # the second is still inside
    second.__exit__(None, None, None)
    assert [enabled() for enabled, _ in OTHERS] == switches


def test_two_threads_leave_every_switch(tiny_llama: Path, read: Any, switches: list[bool]):
    ids = torch.arange(10)[None]
    models = [read(tiny_llama), read(tiny_llama)]
    both = Barrier(2)

    def generate(model: Any) -> torch.Tensor:
        both.wait()
        return model.generate(ids, max_new_tokens=16, do_sample=False)

    expected = models[0].generate(ids, max_new_tokens=16, do_sample=False)
    with (
        fw.apply(models[0], "flash"),
        fw.apply(models[1], "flash"),
        ThreadPoolExecutor(2) as pool,
    ):
        found = list(pool.map(generate, models))
    assert all(torch.equal(tokens, expected) for tokens in found)
    assert [enabled() for enabled, _ in OTHERS] == switches


def test_other_errors_are_not_taken_for_a_refusal(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.int32)
    with fw.apply(model, "flash"), pytest.raises(RuntimeError, match="attn_mask dtype"):
        model(torch.ones(1, 6, dtype=torch.long), attention_mask=mask)
