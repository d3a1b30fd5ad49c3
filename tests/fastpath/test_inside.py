"""What is done to modules inside a decoder is not passed over: hooks, adapters, other weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw

TOLERANCE = 2e-5  # float32 sums in another order


class Steered(nn.Module):
    """A layer whose forward somebody has replaced."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Twice what there was."""
        return self.inside(*args, **kwargs) * 2


def scale(module: nn.Module) -> Any:
    """A hook that scales what a module gives."""
    return module.register_forward_hook(lambda module, args, out: out * 1.5)


def prescale(module: nn.Module) -> Any:
    """A hook that scales what a module is given."""
    return module.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


@pytest.mark.parametrize("hook", [scale, prescale])
@pytest.mark.parametrize("path", ["layers.1.mlp", "layers.2.self_attn.o_proj", "layers.0"])
def test_hooks(
    path: str,
    hook: Callable[[nn.Module], Any],
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float],
    forward_of: Callable[[Any], Any],
) -> None:
    """Hooks on modules inside are called as ever; once they are gone, the call is served."""
    model, ids = build("llama"), tokens(1, 9)
    inside = model.model.get_submodule(path)
    with torch.no_grad():
        plain = model(ids).logits
        handle = hook(inside)
        wanted = model(ids).logits
        handle.remove()
        assert difference(plain, wanted) > 0.01
        receipt = fw.apply(model, "fastpath").receipt
        cache = model(ids[:, :5]).cache
        assert receipt.not_served == {}
        handle = hook(inside)
        assert torch.equal(model(ids).logits, wanted)
        assert receipt.not_served == {"hooks on modules inside": 1}
        assert "hooks on modules inside" in str(receipt)
        handle.remove()
        assert difference(model(ids).logits, plain) < TOLERANCE
        assert sum(forward_of(model).reasons.values()) == 1
        assert difference(model(ids[:, 5:], cache=cache).logits, plain[:, 5:]) < TOLERANCE


def test_hook_before_a_single_token(fast: Any, tokens: Callable[..., torch.Tensor]) -> None:
    """A hook that comes between two tokens of a text is called at the next."""
    seen: list[int] = []
    with torch.no_grad():
        cache = fast(tokens(1, 5)).cache
        fast.model.layers[1].register_forward_hook(lambda *args: seen.append(1))
        fast(tokens(1, 1), cache=cache)
    assert seen == [1]


def test_hooks_around_are_no_reason(
    fast: Any, tokens: Callable[..., torch.Tensor], forward_of: Callable[[Any], Any]
) -> None:
    """Those on the inner model itself and on the head see what they always see."""
    seen: list[torch.Size] = []
    fast.model.register_forward_hook(
        lambda module, args, out: seen.append(out.last_hidden_state.shape)
    )
    fast.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with torch.no_grad():
        fast(tokens(1, 9))
    assert seen == [(1, 9, 64), (1, 9, 384)]
    assert forward_of(fast).reasons == {}


def test_replaced_forward(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor], difference: Callable[..., float]
) -> None:
    """A forward that was put on one module is not passed over in silence."""
    model, ids = build("llama"), tokens(1, 9)
    mlp = model.model.layers[0].mlp
    old = mlp.forward
    mlp.forward = lambda x: old(x) * 2
    with torch.no_grad():
        wanted = model(ids).logits
        with pytest.raises(fw.FeatherweightError, match=r"layers\.0\.mlp"):
            fw.apply(model, "fastpath")
        assert torch.equal(model(ids).logits, wanted)
        del mlp.forward
        fw.apply(model, "fastpath")
        model(ids)
        mlp.forward = lambda x: old(x) * 2
        assert difference(model(ids).logits, wanted) < TOLERANCE


def test_replaced_module(
    fast: Any, tokens: Callable[..., torch.Tensor], forward_of: Callable[[Any], Any]
) -> None:
    """An adapter that comes after the fast path is not passed over, and is no error."""
    ids = tokens(1, 9)
    with torch.no_grad():
        plain = fast(ids).logits
        o = fast.model.layers[1].self_attn.o_proj
        fast.model.layers[1].self_attn.o_proj = Steered(o)
        changed = fast(ids).logits
        fast.model.layers[1].self_attn.o_proj = o
        again = fast(ids).logits
    assert not torch.allclose(changed, plain, atol=1e-3)
    assert torch.equal(again, plain)
    assert [reason for reason in forward_of(fast).reasons if "Steered" in reason]


def test_lora_after(
    fast: Any, tokens: Callable[..., torch.Tensor], difference: Callable[..., float]
) -> None:
    """PEFT on a model with the fast path: the adapter counts, and counts no more when merged."""
    peft = pytest.importorskip("peft", reason="the extra 'peft' is not installed")
    ids = tokens(1, 9)
    with torch.no_grad():
        plain = fast(ids).logits
        config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(fast, config).eval()
        with_lora = adapted(ids).logits
        assert difference(with_lora, plain) > 0.01
        merged = adapted.merge_and_unload()
        assert difference(merged(ids).logits, with_lora) < 1e-4


@pytest.mark.parametrize("length", [1, 9])
def test_changed_weights(
    length: int, build: Callable[..., Any], tokens: Callable[..., torch.Tensor],
    difference: Callable[..., float], forward_of: Callable[[Any], Any],
) -> None:  # fmt: skip
    """Other weights after the first call, in place or in another dtype, are those that count."""
    model, ids = build("llama").bfloat16(), tokens(2, length)
    fw.apply(model, "fastpath")
    with torch.no_grad():
        model(ids)
        for change in (
            lambda: model.load_state_dict(
                {key: value * 1.25 for key, value in model.state_dict().items()}
            ),
            lambda: model.float(),
            lambda: setattr(
                model.model.layers[1].mlp.up_proj, "weight", nn.Parameter(torch.ones(96, 64))
            ),
            lambda: model.model.norm.weight.mul_(2),
        ):
            change()
            found = model(ids).logits
            wanted = type(model.model).forward(model.model, ids).last_hidden_state
            wanted = model.lm_head(wanted)
            assert difference(found, wanted) < (0.2 if found.dtype == torch.bfloat16 else TOLERANCE)
    assert forward_of(model).reasons == {}
