"""The optimizers of a dry run: the real ones, and shapes of those that need a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from featherweight.anatomy.eras import Era
from featherweight.errors import FeatherweightError

Parameters = list[nn.Parameter]
BLOCK = 256  # values that share one absmax in an 8-bit state (bitsandbytes)
SMALLEST = 4096  # bitsandbytes keeps states of smaller tensors in float32


class EightBit(torch.optim.Optimizer):
    """The memory of bitsandbytes' 8-bit optimizers (arXiv 2110.02861); it computes nothing.

    A state of 8-bit codes and a float32 absmax for each 256 of them. The update is one kernel, in
    place. `whole` are parameters whose states stay in float32.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], whole: Iterable[nn.Parameter], states: int = 2
    ) -> None:
        super().__init__(parameters, {})
        self.states = states
        self.whole = {id(parameter) for parameter in whole}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the states of parameters that have a gradient and no state yet."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or self.state[parameter]:
                    continue
                for number in range(self.states):
                    self.state[parameter].update(self._make(parameter, number))

    def _make(self, parameter: nn.Parameter, number: int) -> dict[str, torch.Tensor]:
        if parameter.numel() < SMALLEST or id(parameter) in self.whole:
            return {f"state{number}": torch.zeros_like(parameter, dtype=torch.float32)}
        blocks = -(-parameter.numel() // BLOCK)
        return {
            f"state{number}": torch.zeros_like(parameter, dtype=torch.uint8),
            f"absmax{number}": torch.zeros(blocks, dtype=torch.float32),
        }


class AdamWByHand(torch.optim.Optimizer):
    """AdamW as transformers had it until 4.x (`adamw_hf`): one tensor after the other."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["exp_avg"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(parameter.grad, parameter.grad)
                denominator = state["exp_avg_sq"].sqrt().add_(1e-6)
                parameter.addcdiv_(state["exp_avg"], denominator, value=-1e-5)


def _torch(
    name: str, **options: Any
) -> Callable[[Parameters, Parameters, bool], torch.optim.Optimizer]:
    def make(
        parameters: Parameters, embeddings: Parameters, at_once: bool
    ) -> torch.optim.Optimizer:
        return getattr(torch.optim, name)(parameters, lr=1e-5, **(options | {"foreach": at_once}))

    return make


def _fused(parameters: Parameters, embeddings: Parameters, at_once: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def _adafactor(
    parameters: Parameters, embeddings: Parameters, at_once: bool
) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-5, scale_parameter=False, relative_step=False)


_TABLE: dict[str, Callable[[Parameters, Parameters, bool], Any]] = {
    "none": lambda parameters, embeddings, at_once: None,
    "adamw_torch": _torch("AdamW"),
    "adamw_torch_fused": _fused,
    "adamw_hf": lambda parameters, embeddings, at_once: AdamWByHand(parameters),
    "adam8bit": lambda parameters, embeddings, at_once: EightBit(parameters, ()),
    "adamw_bnb_8bit": lambda parameters, embeddings, at_once: EightBit(parameters, embeddings),
    "adamw_8bit": lambda parameters, embeddings, at_once: EightBit(parameters, embeddings),
    "lion_8bit": lambda parameters, embeddings, at_once: EightBit(parameters, embeddings, states=1),
    "adafactor": _adafactor,
    "sgd": _torch("SGD"),
    "sgd-momentum": _torch("SGD", momentum=0.9),
    "rmsprop": _torch("RMSprop"),
    "adagrad": _torch("Adagrad"),
}
BY_TRAINER = "adamw"
# `Trainer`'s names that mean the memory of another: pages are the process's all the same.
SAME = {
    "adamw_torch_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "paged_adamw_32bit": "adamw_torch",
    "paged_lion_8bit": "lion_8bit",
}
NAMES = (BY_TRAINER, *_TABLE, *SAME)


def check(name: str) -> None:
    """Raise FeatherweightError for an optimizer that is not known."""
    if name not in NAMES:
        raise FeatherweightError(
            f"no optimizer is known as '{name}'", hint=f"allowed: {', '.join(NAMES)}"
        )


def resolve(name: str, era: Era) -> str:
    """The optimizer that a name stands for: `adamw` is what `Trainer` takes by itself.

    transformers' own until 4.30, torch's since; in one kernel with torch 2.8 and a transformers
    that asks for it.
    """
    import transformers
    from transformers import pytorch_utils

    check(name)
    if name != BY_TRAINER:
        return SAME.get(name, name)
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if version < (4, 30):
        return "adamw_hf"
    asks = hasattr(pytorch_utils, "is_torch_greater_or_equal_than_2_8")
    return "adamw_torch_fused" if asks and era.version >= (2, 8) else "adamw_torch"


def make(
    name: str, parameters: Parameters, *, at_once: bool, embeddings: Iterable[Any] = ()
) -> Any:
    """A resolved optimizer of these parameters; None for `none`.

    `Trainer` has bitsandbytes keep the states of embeddings in 32 bits; `adam8bit` is
    bitsandbytes' own, made by hand, and does not.

    `at_once`: torch's own work on all tensors at once (`foreach`), as they do on a GPU, which costs
    them a copy of what they take the root of.
    """
    return _TABLE[name](parameters, list(embeddings), at_once)
