"""Tiny decoders of every architecture that the fast path knows, and how close is equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

import featherweight as fw
from featherweight import native
from featherweight.fastpath.forward import FastForward

STATUS = native.status()
ISAS = [isa for isa in STATUS.built if isa in STATUS.detected]
VOCABULARY = 384

_TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
_SIZES = _TOKENS | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large enough for attention to matter
}
_GPT2_SIZES = _TOKENS | {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.2,
}


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


# name: (prefix of transformers' classes, what is different from the sizes above)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "llama-mqa-llama3": (
        "Llama",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}
        | _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-mha-yarn": ("Llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama-linear": ("Llama", {"head_dim": 24} | _rope("linear", factor=4.0)),
    "llama-dynamic": ("Llama", {"max_position_embeddings": 32} | _rope("dynamic", factor=4.0)),
    "llama-many-heads": (  # more queries to a head of keys than a kernel takes at once
        "Llama",
        {"hidden_size": 60, "num_attention_heads": 20, "num_key_value_heads": 2, "head_dim": 6},
    ),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 16, "head_dim": 16}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 2}),
    "qwen2-windows": (
        "Qwen2",
        {
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": None}),
    "phi3-window": (
        "Phi3",
        {"sliding_window": 16} | _rope("default", partial_rotary_factor=0.5),
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_key_value_heads": 2,
            "head_dim": 20,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": ("GPT2", {}),
    "gpt2-scaled": ("GPT2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 72}),
    "gpt2-unscaled": ("GPT2", {"scale_attn_weights": False, "activation_function": "relu"}),
    "neox": ("GPTNeoX", _rope("default", partial_rotary_factor=0.25)),
    "neox-sequential": (
        "GPTNeoX",
        {"use_parallel_residual": False, "attention_bias": False}
        | _rope("default", partial_rotary_factor=1.0),
    ),
    "bigcode": ("GPTBigCode", {}),
    "bigcode-mha": ("GPTBigCode", {"multi_query": False}),
}


def build(name: str, **changes: Any) -> Any:
    """An architecture's model, always of the same random weights, norms and biases included."""
    prefix, different = ARCHITECTURES[name]
    config_class = getattr(
        transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config"
    )
    model_class = getattr(
        transformers, f"{prefix}LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM"
    )
    sizes = _GPT2_SIZES if prefix in ("GPT2", "GPTBigCode") else _SIZES
    if prefix == "Llama" and "num_key_value_heads" not in different:
        sizes = sizes | {"num_key_value_heads": 4}
    torch.manual_seed(0)
    model = model_class(config_class(**(sizes | different | changes))).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            torch.nn.init.normal_(parameter, 0.5, 0.2)
    return model


@pytest.fixture(name="build", scope="session")
def build_fixture() -> Callable[..., Any]:
    """`build(name, **changes)`: a fresh model of an architecture, with changes to its config."""
    return build


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    """Each architecture in turn."""
    name: str = request.param
    return name


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn; in use while the test runs."""
    with native.forced_isa(request.param):
        yield request.param


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Token ids [batch, length], none of them for padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, length), generator=generator)


@pytest.fixture(name="tokens", scope="session")
def tokens_fixture() -> Callable[..., torch.Tensor]:
    """`tokens(batch, length, seed=1)`."""
    return tokens


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, in standard deviations of what is wanted."""
    assert found.shape == wanted.shape
    assert found.isfinite().all()
    return float((found.float() - wanted.float()).abs().max() / wanted.float().std())


@pytest.fixture(name="difference", scope="session")
def difference_fixture() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """`difference(found, wanted)`: relative; fails for what is not finite."""
    return difference


def forward_of(model: Any) -> FastForward:
    """What stands in for the inner model's forward."""
    found = [vars(module).get("forward") for module in model.modules()]
    return next(forward for forward in found if isinstance(forward, FastForward))


@pytest.fixture(name="forward_of", scope="session")
def forward_of_fixture() -> Callable[[Any], FastForward]:
    """`forward_of(model)`: its `reasons` say what went to the original."""
    return forward_of


@pytest.fixture
def both() -> Callable[..., tuple[Any, Any]]:
    """`both(model, work)`: what `work()` gives without and with the fast path, all of it served.

    The fast path stays on the model until the test ends.
    """

    def run(model: Any, work: Callable[[], Any], recipe: str = "fastpath") -> tuple[Any, Any]:
        few = torch.tensor([[2, 3]])  # forgets how long dynamic angles have become
        with torch.no_grad():
            model(few)
            wanted = work()
            fw.apply(model, recipe)
            model(few)
            found = work()
        assert forward_of(model).reasons == {}
        return wanted, found

    return run


@pytest.fixture
def fast() -> Any:
    """A Llama with the fast path, eager attention."""
    model = build("llama")
    model.set_attn_implementation("eager")
    fw.apply(model, "fastpath")
    return model
