"""The passes that can be profiled: reading a prompt, writing a token, a step of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from featherweight.errors import FeatherweightError, UnsupportedError
from featherweight.measure import clock, quality
from featherweight.profiling.counting import BACKWARD, Counter, Timer


def check(model: Any, settings: dict[str, Any]) -> None:
    """Refuse what cannot be run, before anything is."""
    config = getattr(model, "config", None)
    name = type(model).__name__
    if config is None or model.main_input_name != "input_ids" or config.is_encoder_decoder:
        raise UnsupportedError(
            f"{name} cannot be profiled", hint="decoders and encoders of text can be"
        )
    if settings["pass"] == "decode" and not model.can_generate():
        raise UnsupportedError(
            f"{name} writes no text, so that it has no decoding to profile",
            hint="leave decode out, or name a …ForCausalLM",
        )
    limit, asked = quality.longest(model), settings["seq_len"]
    if settings["pass"] == "decode":
        asked += 2 + 2 * settings["runs"]
    if limit is not None and asked > limit:
        raise FeatherweightError(
            f"the profile takes {asked} tokens, and the model {limit}",
            hint="lower --prompt-tokens (seq_len)",
        )
    if settings["pass"] == "train" and not any(p.requires_grad for p in model.parameters()):
        raise FeatherweightError(
            f"no parameter of {name} is trained, so that there is no backward pass",
            hint="add a trained part such as 'lora:r=8' to the recipe, or leave train out",
        )


@contextmanager
def mode(model: nn.Module, train: bool) -> Iterator[None]:
    """Training or evaluation mode; afterwards each module's own, and the random numbers as before.

    Not inference mode, in which ops that are made of others would reach no kernel of their own.
    """
    before = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(), torch.set_grad_enabled(train):
        model.train(train)
        try:
            yield
        finally:
            for module, training in before.items():
                module.training = training


def prepare(
    model: Any, settings: dict[str, Any], device: torch.device
) -> Callable[[Counter | Timer | None], None]:
    """The pass to profile; it tells a watcher when the backward pass begins."""
    vocabulary = model.config.get_text_config().vocab_size
    batch, length, seed = (settings[name] for name in ("batch_size", "seq_len", "seed"))
    ids = clock.random_ids(vocabulary, batch, length, seed, device)
    if settings["pass"] == "train":
        trained = [p for p in model.parameters() if p.requires_grad]
        labels = {"labels": ids} if model.can_generate() else {}
        settings["loss"] = "next tokens" if labels else "mean square of the output"

        def step(watcher: Counter | Timer | None) -> None:
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **labels)
            loss = output.loss if labels else output[0].float().square().mean()
            if watcher is not None:
                watcher.phase = BACKWARD
            torch.autograd.grad(loss, trained, allow_unused=True)
            clock.wait(device)

        return step
    if settings["pass"] == "decode":
        _, cache = clock.forward(model, ids)
        token = clock.random_ids(vocabulary, batch, 1, seed, device)

        def write(watcher: Counter | Timer | None) -> None:
            nonlocal cache
            _, cache = clock.forward(model, token, cache)
            clock.wait(device)

        return write

    def read(watcher: Counter | Timer | None) -> None:
        if model.can_generate():
            clock.forward(model, ids)
        else:
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
        clock.wait(device)

    return read
