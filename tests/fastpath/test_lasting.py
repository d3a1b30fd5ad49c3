"""Threads, interrupts and memory: what shows only when a model is used for long."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import featherweight as fw
from featherweight.native import decoder
from featherweight.native.libc import malloc_trim

TOLERANCE = 2e-5  # float32 sums in another order


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_two_threads(
    name: str, build: Callable[..., Any], tokens: Callable[..., torch.Tensor]
) -> None:
    """Each gives what it gives alone, with prompts of different lengths on one model."""
    model = build(name)
    fw.apply(model, "fastpath")
    prompts = [tokens(1, 9, seed=1), tokens(2, 31, seed=2), tokens(1, 1, seed=3)]

    def generate(ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=25, pad_token_id=0
        )
        return found

    alone = [generate(ids) for ids in prompts]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            for found, wanted in zip(pool.map(generate, prompts), alone, strict=True):
                assert torch.equal(found, wanted)


def test_weights_change_while_another_generates(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor]
) -> None:
    """A thread whose executor was replaced under it finishes with the one it began with."""
    model, ids = build("llama"), tokens(1, 9)
    fw.apply(model, "fastpath")
    stop = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                with torch.no_grad():
                    assert model(ids).logits.isfinite().all()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        for parameter in model.model.layers.parameters():
            parameter.data = parameter.data.clone()
        with torch.no_grad():
            model(ids)
    stop.set()
    thread.join()
    assert not failed


class Interrupting:
    """The native call, with an interrupt at one of its calls."""

    def __init__(self, call: Callable[..., int], at: int) -> None:
        self._call, self._left = call, at

    def __call__(self, *args: Any) -> int:
        """As the call itself, or an interrupt before it."""
        if not self._left:
            raise KeyboardInterrupt
        self._left -= 1
        return self._call(*args)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_interrupt(
    name: str,
    at: int,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An interrupt between native calls leaves the cache as it was, and the model usable."""
    model, ids = build(name), tokens(2, 40)
    with torch.no_grad():
        wanted = model(ids).logits
        fw.apply(model, "fastpath")
        cache = model(ids[:, :11]).cache
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        interrupting = Interrupting(decoder._layers(), at)
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "PRODUCTS", 1)
            patch.setattr(decoder, "_layers", lambda: interrupting)
            with pytest.raises(KeyboardInterrupt):
                model(ids[:, 11:], cache=cache)
        for layer, (keys, values) in zip(cache.layers, before, strict=True):
            assert torch.equal(layer.keys, keys)
            assert torch.equal(layer.values, values)
        assert difference(model(ids[:, 11:], cache=cache).logits, wanted[:, 11:]) < TOLERANCE
        assert difference(model(ids).logits, wanted) < TOLERANCE


def test_real_signals(
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupts that come when they like, in a prompt of many native calls."""
    model, ids = build("llama", num_hidden_layers=12), tokens(1, 400)
    monkeypatch.setattr(decoder, "PRODUCTS", 1)
    struck = 0
    with torch.no_grad():
        wanted = model(ids).logits
        fw.apply(model, "fastpath")
        cache = model(ids[:, :5]).cache
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            for i in range(12):
                signal.setitimer(signal.ITIMER_REAL, 0.002 * (i + 1))
                try:
                    while True:
                        model(ids[:, 5:], cache=cache)
                        cache.crop(-395)
                except KeyboardInterrupt:
                    struck += 1
                assert {layer.get_seq_length() for layer in cache.layers} <= {5, 400}
                if cache.get_seq_length() == 400:
                    cache.crop(-395)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert struck == 12
        assert difference(model(ids[:, 5:], cache=cache).logits, wanted[:, 5:]) < TOLERANCE


@pytest.mark.parametrize("at", [0, 1, 4])
def test_interrupt_as_the_cache_advances(
    at: int,
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even then the layers of the cache agree, so that the same tokens can be given again."""
    from featherweight.fastpath.cache import GrowingLayer

    model, ids = build("llama"), tokens(1, 20)
    fw.apply(model, "fastpath")
    advance, calls = GrowingLayer.advance, iter(range(100))

    def interrupted(layer: GrowingLayer, count: int) -> None:
        if next(calls) == at:
            raise KeyboardInterrupt
        advance(layer, count)

    with torch.no_grad():
        wanted = model(ids).logits
        cache = model(ids[:, :10]).cache
        with monkeypatch.context() as patch:
            patch.setattr(GrowingLayer, "advance", interrupted)
            for begin in (10, 11):
                try:
                    model(ids[:, begin : begin + 1], cache=cache)
                except KeyboardInterrupt:
                    break
        done = cache.get_seq_length()
        assert difference(model(ids[:, done:], cache=cache).logits, wanted[:, done:]) < TOLERANCE
        assert {layer.keys.shape[2] for layer in cache.layers} == {20}


def test_native_calls_are_short(
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No call has more products than its limit, whatever the prompt's length."""
    model, ids = build("llama", max_position_embeddings=2048), tokens(2, 700)
    products = sum(p.numel() for p in model.model.layers[0].parameters() if p.ndim == 2)
    limit = 200 * products  # a layer of a hundred tokens of both rows
    call: Callable[..., int] = decoder._layers()
    made: list[int] = []

    def noting(*args: Any) -> int:
        chunk = decoder.Chunk.from_address(args[3])
        made.append(args[2] * chunk.batch * chunk.tokens * products)
        return call(*args)

    with torch.no_grad():
        wanted = model(ids).logits
        fw.apply(model, "fastpath")
        monkeypatch.setattr(decoder, "PRODUCTS", limit)
        monkeypatch.setattr(decoder, "_layers", lambda: noting)
        found = model(ids).logits
    assert difference(found, wanted) < TOLERANCE
    assert sum(made) == 3 * 1400 * products
    assert max(made) <= limit


def test_generations_leave_nothing_behind(
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    resident: Callable[[str], int],
) -> None:
    """Two thousand of them, after the first fifty, take no memory."""
    model = build("llama")
    fw.apply(model, "fastpath")

    def generate(times: int) -> None:
        for i in range(times):
            ids = tokens(1, 1 + i % 40)
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0
            )
        gc.collect()

    generate(50)
    before = resident("RssAnon")
    generate(2000)
    assert resident("RssAnon") - before < 4 << 20


def test_long_prompts_take_linear_memory(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor], resident: Callable[[str], int]
) -> None:
    """A few kilobytes a token: what the layers hold of it, never a matrix of scores."""
    model = build("llama", max_position_embeddings=8192)
    fw.apply(model, "fastpath")
    with torch.inference_mode():
        model(tokens(1, 16), logits_to_keep=1)
        gc.collect()
        malloc_trim()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        before = resident("VmHWM")
        model(tokens(1, 8000), logits_to_keep=1)
        assert resident("VmHWM") - before < 8000**2 * 4 / 4  # a quarter of one head's scores
