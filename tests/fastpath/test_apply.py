"""Putting the fast path on a model and taking it away; copies of the model; refusals."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import featherweight as fw
from featherweight.errors import UnsupportedError

TOLERANCE = 2e-5  # float32 sums in another order


def strides(model: nn.Module) -> dict[str, tuple[tuple[int, ...], int]]:
    """How each parameter lies, and where."""
    return {name: (p.stride(), p.data_ptr()) for name, p in model.named_parameters()}


def test_undo(architecture: str, build: Callable[..., Any], state: type) -> None:
    """Everything is as it was: objects, bits, strides and addresses."""
    model = build(architecture)
    before, lay = state(model), strides(model)
    applied = fw.apply(model, "fastpath")
    with torch.no_grad():
        model(torch.arange(2, 9)[None])
    applied.undo()
    assert strides(model) == lay
    assert state(model) == before
    assert not [name for name, module in model.named_modules() if "forward" in vars(module)]


def test_undo_with_other_techniques(build: Callable[..., Any], state: type) -> None:
    """Together with a quantiser, on a GPT-2, whose weights lie the other way round meanwhile."""
    model = build("gpt2")
    before, lay = state(model), strides(model)
    with fw.apply(model, "fastpath+int8"), torch.no_grad():
        model(torch.arange(2, 9)[None])
    assert strides(model) == lay
    assert state(model) == before


def test_receipt(architecture: str, build: Callable[..., Any]) -> None:
    """It names what was replaced and with which kernels; the weights are no more and no less."""
    receipt = fw.apply(build(architecture), "fastpath").receipt
    assert "3 layers" in str(receipt)
    assert "native" in str(receipt)
    assert "keys and values in fp32" in str(receipt)
    assert receipt.bytes_after == receipt.bytes_before


def test_weights_stay_the_same(architecture: str, build: Callable[..., Any]) -> None:
    """It makes a model faster, and changes no weight."""
    model = build(architecture)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fw.apply(model, "fastpath")
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_saved(
    name: str, build: Callable[..., Any], tokens: Callable[..., torch.Tensor], tmp_path: Path
) -> None:
    """`save_pretrained` writes the model as it is without."""
    model, ids = build(name), tokens(1, 9)
    with torch.no_grad():
        wanted = model(ids).logits
        fw.apply(model, "fastpath")
        model(ids)
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        assert torch.equal(again(ids).logits, wanted)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_copies(
    name: str,
    way: Callable[[Any], Any],
    build: Callable[..., Any],
    tokens: Callable[..., torch.Tensor],
    forward_of: Callable[[Any], Any],
    difference: Callable[..., float],
) -> None:
    """A copy has a fast path and weights of its own."""
    model, ids = build(name), tokens(2, 9)
    fw.apply(model, "fastpath")
    with torch.no_grad():
        wanted = model(ids).logits
        other = way(model)
        assert torch.equal(other(ids).logits, wanted)
        assert forward_of(other) is not forward_of(model)
        assert forward_of(other).reasons == {}
        for parameter in other.parameters():
            parameter.mul_(1.5)
        assert torch.equal(model(ids).logits, wanted)
        changed = other(ids).logits
        del vars(forward_of(other)._inner())["forward"]
        assert difference(changed, other(ids).logits) < TOLERANCE
    model.generate(ids, max_new_tokens=2, pad_token_id=0)
    del model
    with torch.no_grad():
        other(ids)


def test_inner_model_alone(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor], difference: Callable[..., float]
) -> None:
    """A model without head is its own inner model."""
    model, ids = build("llama").model, tokens(1, 9)
    with torch.no_grad():
        wanted = model(ids).last_hidden_state
        with fw.apply(model, "fastpath"):
            assert difference(model(ids).last_hidden_state, wanted) < TOLERANCE
        assert torch.equal(model(ids).last_hidden_state, wanted)


def test_unknown_architecture(tiny_bert: Path, read: Callable[..., Any]) -> None:
    """The refusal names the model, the nearest that is known, and how to add it."""
    with pytest.raises(UnsupportedError) as error:
        fw.apply(read(tiny_bert), "fastpath")
    for words in ("BertModel", "nearest", "featherweight/fastpath"):
        assert words in str(error.value)


def test_nearest(build: Callable[..., Any]) -> None:
    """A class with a name like a known one is told so."""
    inner = build("qwen3").model
    inner.__class__ = type("Qwen3NextModel", (type(inner),), {})
    with pytest.raises(UnsupportedError, match=r"Qwen3NextModel.*nearest.*Qwen3Model"):
        fw.apply(inner, "fastpath")


def test_same_name_of_somebody_elses(
    build: Callable[..., Any], tokens: Callable[..., torch.Tensor], difference: Callable[..., float]
) -> None:
    """A class of the same name that is not transformers' own is not known either."""
    inner = build("llama").model
    inner.__class__ = type("LlamaModel", (type(inner),), {"__module__": "somewhere.modeling"})
    with pytest.raises(UnsupportedError, match="LlamaModel"):
        fw.apply(inner, "fastpath")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"hidden_act": "quick_gelu"}, "activation 'QuickGELU"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention"),
        ("gemma3", {"use_bidirectional_attention": True}, "both directions"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "softcapping"),
    ],
)
def test_settings_refused(
    name: str, changes: dict[str, Any], words: str, build: Callable[..., Any]
) -> None:
    """What an architecture has in some models and the fast path has not."""
    with pytest.raises(UnsupportedError, match=words):
        fw.apply(build(name, **changes), "fastpath")


@pytest.mark.parametrize("scaling", [0.0, -0.1, float("nan")])
def test_scaling_refused(scaling: float, build: Callable[..., Any]) -> None:
    """The maximum of scores is looked for before they are scaled."""
    model = build("llama")
    model.model.layers[1].self_attn.scaling = scaling
    with pytest.raises(UnsupportedError, match=f"scaled by {scaling:g}"):
        fw.apply(model, "fastpath")


def test_lora_refused(build: Callable[..., Any]) -> None:
    """An adapter that is not merged: the refusal names the module; merged, it is served."""
    peft = pytest.importorskip("peft", reason="the extra 'peft' is not installed")
    config = peft.LoraConfig(target_modules=["v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(build("llama"), config).eval()
    with pytest.raises(UnsupportedError, match=r"layers\.0\.self_attn\.v_proj.*merge"):
        fw.apply(model, "fastpath")
    fw.apply(model.merge_and_unload(), "fastpath")


def test_bitsandbytes_refused(build: Callable[..., Any]) -> None:
    """Its layers are named; `bnb-nf4` measures what users have today."""
    pytest.importorskip("bitsandbytes", reason="the extra 'bitsandbytes' is not installed")
    model = build("llama", intermediate_size=128)
    with pytest.raises(UnsupportedError, match="Linear4bit"):
        fw.apply(model, "bnb-nf4+fastpath")
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float64])
def test_dtype_refused(dtype: torch.dtype, build: Callable[..., Any]) -> None:
    """At once, not at the first call."""
    with pytest.raises(UnsupportedError, match="float64"):
        fw.apply(build("llama").to(dtype), "fastpath")


def test_offloaded_refused(build: Callable[..., Any]) -> None:
    """A model of which a part is not in memory."""
    model = build("llama")
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(UnsupportedError, match="meta"):
        fw.apply(model, "fastpath")


def test_left_out_with_a_warning(tiny_bert: Path, read: Callable[..., Any]) -> None:
    """`on_fallback="warn"` leaves it out and says so."""
    applied = fw.apply(read(tiny_bert), "bf16+fastpath", on_fallback="warn")
    assert "fastpath left out" in str(applied.receipt)


def test_no_native_library(tiny_llama: Path) -> None:
    """Where it cannot be loaded `apply` refuses, and says why."""
    program = (
        "import sys, featherweight as fw, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "try:\n"
        "    fw.apply(model, 'fastpath')\n"
        "except fw.FeatherweightError as error:\n"
        "    print(type(error).__name__, error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_llama)],
        env={**os.environ, "FEATHERWEIGHT_ISA": "nonsense"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.startswith("UnsupportedError"), done.stderr
    assert "nonsense" in done.stdout
