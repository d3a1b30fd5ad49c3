"""LoRA on our layers, by every way that PEFT and transformers have to put it there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from featherweight.errors import UnsupportedError
from featherweight.nn import FourBitLinear, HalfLinear
from featherweight.nn.frozen import FrozenLinear

peft = pytest.importorskip("peft", reason="PEFT is an optional extra")

from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training  # noqa: E402

from featherweight.integrations.peft import FrozenLoraLinear, enable  # noqa: E402

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = ["nf4", "exact", "int8", "half"]


def adapted(model: Any) -> dict[str, FrozenLoraLinear]:
    """The layers with adapters, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, FrozenLoraLinear)}


def layer(kind: str, lighten: Any, bias: bool = True, **config: Any) -> tuple[Any, Any]:
    """A [48, 64] layer with an adapter of rank 4, and the bare layer in it."""
    torch.manual_seed(0)
    bare = lighten(nn.Sequential(nn.Linear(64, 48, bias=bias)), kind)[0]
    config = {"target_modules": ["0"], "r": 4, "lora_alpha": 8} | config
    model = peft.inject_adapter_in_model(LoraConfig(**config), nn.Sequential(bare))
    return model[0], bare


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_base_plus_adapter(kind: str, dtype: torch.dtype, lighten: Any, stir: Any):
    lora, bare = layer(kind, lighten)
    stir(lora)
    assert lora.lora_A["default"].weight.dtype is torch.float32
    x = torch.randn(3, 5, 64, dtype=dtype)
    a, b = lora.lora_A["default"].weight, lora.lora_B["default"].weight
    expected = (bare(x).float() + F.linear(F.linear(x.float(), a), b) * 2.0).to(dtype)
    found = lora(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, bare(x))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_dequantised_layer(kind: str, lighten: Any, stir: Any):
    lora, bare = layer(kind, lighten)
    stir(lora)
    x, g = torch.randn(6, 64, requires_grad=True), torch.randn(6, 48)
    lora(x).backward(g)
    a, b = (m["default"].weight.detach().clone() for m in (lora.lora_A, lora.lora_B))
    y = x.detach().clone().requires_grad_()
    a.requires_grad_(), b.requires_grad_()
    (F.linear(y, bare.dequantize()) + F.linear(F.linear(y, a), b) * 2.0).backward(g)
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(lora.lora_A["default"].weight.grad, a.grad)
    torch.testing.assert_close(lora.lora_B["default"].weight.grad, b.grad)
    assert bare.weight.grad is None


def test_dropout_and_scaling_are_the_configs(lighten: Any, stir: Any):
    lora, bare = layer("exact", lighten, lora_dropout=0.5, use_rslora=True)
    stir(lora)
    x = torch.randn(7, 64)
    a, b = lora.lora_A["default"].weight, lora.lora_B["default"].weight
    torch.manual_seed(3)
    found = lora(x)
    torch.manual_seed(3)
    dropped = F.dropout(x, 0.5)
    torch.testing.assert_close(found, bare(x) + F.linear(F.linear(dropped, a), b) * (8 / 4**0.5))
    torch.testing.assert_close(lora.eval()(x), bare(x) + F.linear(F.linear(x, a), b) * 4.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["all-linear", ALL])
def test_whole_model(
    kind: str, target: Any, tiny_llama: Path, read: Any, answer: Any, lighten: Any
):
    model = lighten(read(tiny_llama), kind)
    before = answer(model)
    wrapped = get_peft_model(model, LoraConfig(target_modules=target, r=4))
    assert len(adapted(wrapped)) == 14
    assert all(isinstance(m.base_layer, FrozenLinear) for m in adapted(wrapped).values())
    assert type(model.lm_head) is nn.Linear
    assert torch.equal(answer(model), before)  # B is zero
    trained = [n for n, p in wrapped.named_parameters() if p.requires_grad]
    assert len(trained) == 28
    assert all("lora_" in n for n in trained)


def test_all_linear_means_ours_and_plain_layers_but_no_adapters(
    tiny_llama: Path, read: Any, lighten: Any
):
    model = lighten(read(tiny_llama), "nf4")
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 128, bias=False)
    wrapped = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    assert type(model.model.layers[0].mlp.up_proj) is peft.tuners.lora.layer.Linear
    first = wrapped.peft_config["default"].target_modules
    wrapped.add_adapter("second", LoraConfig(target_modules="all-linear"))
    assert wrapped.peft_config["second"].target_modules == first
    assert sum("lora_A.second" in n for n, _ in wrapped.named_parameters()) == 14
    assert not any("lora_A.default.lora_A" in n for n, _ in wrapped.named_parameters())


def test_an_output_head_of_ours_is_left_too(tiny_llama: Path, read: Any, lighten: Any):
    model = lighten(read(tiny_llama), "int8")
    model.lm_head = HalfLinear.from_weight(model.lm_head.weight)
    get_peft_model(model, LoraConfig(target_modules="all-linear"))
    assert type(model.lm_head) is HalfLinear


def test_gpt2s_transposed_layers(tiny_gpt2: Path, read: Any, answer: Any, lighten: Any, stir: Any):
    model = lighten(read(tiny_gpt2), "exact")
    wrapped = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4))
    assert len(adapted(wrapped)) == 8
    stir(wrapped)
    expected = answer(model)
    merged = wrapped.merge_and_unload()
    assert type(merged.transformer.h[0].attn.c_attn) is nn.Linear
    torch.testing.assert_close(answer(merged), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_the_same_on_a_base_quantised_anew(
    kind: str, tiny_llama: Path, tmp_path: Path, read: Any, answer: Any, lighten: Any, stir: Any
):
    wrapped = get_peft_model(
        lighten(read(tiny_llama), kind), LoraConfig(target_modules=ALL, r=4, lora_alpha=3)
    )
    stir(wrapped)
    expected = answer(wrapped)
    wrapped.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {"adapter_config.json"}
    again = PeftModel.from_pretrained(lighten(read(tiny_llama), kind), tmp_path)
    assert len(adapted(again)) == 14
    assert torch.equal(answer(again), expected)
    loaded = lighten(read(tiny_llama), kind)
    loaded.load_adapter(str(tmp_path))
    assert torch.equal(answer(loaded), expected)


def test_transformers_own_methods(
    tiny_llama: Path,
    tmp_path: Path,
    read: Any,
    answer: Any,
    lighten: Any,
    stir: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    # transformers 5.24 asks for a PEFT that is not out yet; older ones do all that it needs.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.21.0")
    model = lighten(read(tiny_llama), "nf4")
    plain = answer(model)
    model.add_adapter(LoraConfig(target_modules=["q_proj"]), "first")
    stir(model)
    changed = answer(model)
    assert not torch.equal(changed, plain)
    model.disable_adapters()
    assert torch.equal(answer(model), plain)
    model.enable_adapters()
    assert torch.equal(answer(model), changed)
    model.save_pretrained(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} >= {"adapter_config.json"}
    assert not (tmp_path / "model.safetensors").exists()
    other = lighten(read(tiny_llama), "nf4")
    other.load_adapter(str(tmp_path), "first")
    assert torch.equal(answer(other), changed)


def test_several_adapters(tiny_llama: Path, read: Any, answer: Any, lighten: Any, stir: Any):
    model = lighten(read(tiny_llama), "nf4")
    plain = answer(model)
    wrapped = get_peft_model(model, LoraConfig(target_modules=ALL, r=4), adapter_name="one")
    wrapped.add_adapter("two", LoraConfig(target_modules=["q_proj"], r=2))
    stir(wrapped)
    wrapped.eval()
    of_a = answer(model)
    wrapped.set_adapter("two")
    of_b = answer(model)
    trained = {n.split(".")[-2] for n, p in wrapped.named_parameters() if p.requires_grad}
    assert trained == {"two"}
    ids, mask = torch.arange(2 * 9).reshape(2, 9) + 5, torch.ones(2, 9, dtype=torch.long)
    with torch.no_grad():
        names = ["one", "two"]
        mixed = wrapped(input_ids=ids, attention_mask=mask, adapter_names=names).logits
        for row, name in enumerate(names):
            wrapped.set_adapter(name)
            alone = wrapped(input_ids=ids, attention_mask=mask).logits[row]
            torch.testing.assert_close(mixed[row], alone, rtol=1e-4, atol=1e-4)
        base = wrapped(input_ids=ids, adapter_names=["__base__", "one"]).logits[0]
        with wrapped.disable_adapter():
            torch.testing.assert_close(base, wrapped(input_ids=ids).logits[0])
            assert torch.equal(answer(model), plain)
    wrapped.base_model.set_adapter(["one", "two"])
    both = answer(model)
    assert not any(torch.equal(x, y) for x, y in ((of_a, of_b), (both, of_a), (both, of_b)))
    wrapped.delete_adapter("one")
    wrapped.set_adapter("two")
    assert torch.equal(answer(model), of_b)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_merging_is_dequantising_and_adding(kind: str, bias: bool, lighten: Any, stir: Any):
    lora, bare = layer(kind, lighten, bias, lora_bias=bias)
    stir(lora)
    x = torch.randn(5, 64)
    unmerged = lora(x)
    codes = {n: t.clone() for n, t in bare.state_dict().items()}
    a, b = lora.lora_A["default"].weight, lora.lora_B["default"].weight
    weight = (bare.dequantize() + (b @ a) * 2.0).detach()
    offset = bare.bias + lora.lora_B["default"].bias * 2.0 if bias else None
    with pytest.warns(UserWarning, match="becomes a dense nn.Linear, 4 bytes a weight instead of"):
        lora.merge()
    assert lora.merged
    assert type(lora.base_layer) is nn.Linear
    torch.testing.assert_close(lora.base_layer.weight, weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lora(x), F.linear(x, weight, offset))
    assert not any("_frozen" in name for name in lora.state_dict())
    lora.unmerge()
    assert lora.base_layer is bare
    assert all(torch.equal(t, codes[n]) for n, t in bare.state_dict().items())
    assert torch.equal(lora(x), unmerged)
    with pytest.warns(UserWarning, match="Already unmerged"):
        lora.unmerge()


def test_merging_leaves_a_weight_that_was_widened(lighten: Any, stir: Any):
    lora, bare = layer("half", lighten)
    stir(lora)
    bare.weight.data = bare.weight.data.float()  # as `prepare_model_for_kbit_training` does
    before = bare.weight.clone()
    lora.merge()
    assert torch.equal(bare.weight, before)
    assert not torch.equal(lora.base_layer.weight, before)


def test_merging_one_after_the_other_is_merging_both(lighten: Any, stir: Any):
    lora, bare = layer("int8", lighten)
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["0"])
    lora.update_layer("second", 2, 2, config=config)
    stir(lora)
    lora.set_adapter(["default", "second"])
    lora.merge()
    both = lora.base_layer.weight
    lora.unmerge()
    lora.merge(adapter_names=["default"])
    with pytest.warns(UserWarning, match="additionally merging second"):
        lora.merge(adapter_names=["second", "unknown"])
    assert lora.merged_adapters == ["default", "second"]
    assert torch.equal(lora.base_layer.weight, both)
    with pytest.warns(UserWarning, match="nothing to do"):
        lora.merge()
    x = torch.randn(2, 64)
    merged = lora(x)
    lora.enable_adapters(False)
    assert torch.equal(lora(x), bare(x))  # as PEFT: a call with adapters off unmerges
    assert not lora.merged
    assert not torch.equal(merged, bare(x))


def test_merging_can_be_safe(lighten: Any, stir: Any):
    lora, bare = layer("nf4", lighten)
    stir(lora)
    lora.lora_B["default"].weight.data[3, 1] = float("nan")
    with pytest.raises(UnsupportedError, match="merging default gives weights with NaN or inf"):
        lora.merge(safe_merge=True)
    assert lora.base_layer is bare
    assert not lora.merged


def test_a_bias_needs_a_bias_to_merge_into(lighten: Any, stir: Any):
    with pytest.warns(UserWarning, match="has no bias"):
        lora, bare = layer("nf4", lighten, bias=False, lora_bias=True)
    with pytest.raises(UnsupportedError, match=r"bias of adapter 'default' \(lora_bias=True\)"):
        lora.merge()
    assert lora.base_layer is bare


@pytest.mark.parametrize("how", ["called", "bias", "adapter"])
def test_the_merged_dtype_is_that_of_the_arithmetic(how: str, lighten: Any):
    lora, bare = layer("nf4", lighten, bias=how == "bias")
    if how == "called":
        lora(torch.randn(1, 64, dtype=torch.bfloat16))
    elif how == "bias":
        bare.bias.data = bare.bias.data.bfloat16()
    lora.merge()
    expected = torch.float32 if how == "adapter" else torch.bfloat16
    assert lora.base_layer.weight.dtype is expected


@pytest.mark.parametrize("kind", ["exact", "int8", "half"])
def test_merge_and_unload(
    kind: str, tiny_llama: Path, read: Any, answer: Any, lighten: Any, stir: Any
):
    reference, model = read(tiny_llama), lighten(read(tiny_llama), kind)
    wrapped = get_peft_model(model, LoraConfig(target_modules=ALL, r=4))
    stir(wrapped)
    for name, module in adapted(wrapped).items():
        dense = reference.get_submodule(name.removeprefix("base_model.model."))
        delta = module.lora_B["default"].weight @ module.lora_A["default"].weight * 2.0
        dense.weight.data = (module.base_layer.dequantize() + delta).detach()
    wrapped.merge_adapter()
    merged = answer(model)
    wrapped.unmerge_adapter()
    result = wrapped.merge_and_unload()
    assert result is model
    assert not adapted(result)
    assert not any(isinstance(module, FrozenLinear) for module in result.modules())
    assert type(result.model.layers[1].mlp.up_proj) is nn.Linear
    torch.testing.assert_close(answer(result), answer(reference), rtol=1e-5, atol=1e-5)
    assert torch.equal(answer(result), merged)


def test_unload_gives_the_frozen_layers_back(
    tiny_llama: Path, read: Any, answer: Any, lighten: Any, stir: Any
):
    model = lighten(read(tiny_llama), "nf4")
    before, plain = dict(model.named_modules()), answer(model)
    wrapped = get_peft_model(model, LoraConfig(target_modules=ALL))
    stir(wrapped)
    result = wrapped.unload()
    assert {n: id(m) for n, m in result.named_modules()} == {n: id(m) for n, m in before.items()}
    assert torch.equal(answer(result), plain)


def test_a_merged_model_can_be_copied(lighten: Any, stir: Any):
    lora, _ = layer("nf4", lighten)
    stir(lora)
    lora.merge()
    twin = copy.deepcopy(lora)
    twin.unmerge()
    assert type(twin.base_layer) is FourBitLinear
    assert lora.merged
    x = torch.randn(2, 64)
    lora.unmerge()
    assert torch.equal(twin(x), lora(x))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_dora": True}, "DoraLinearVariant cannot adapt a FourBitLinear; use plain LoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is made from a dense weight"),
        ({"init_lora_weights": "olora"}, "choose one of True, False, gaussian, eva"),
    ],
)
def test_what_needs_a_dense_weight_is_refused(config: dict[str, Any], says: str, lighten: Any):
    with pytest.raises(UnsupportedError, match=says):
        layer("nf4", lighten, **config)


@pytest.mark.parametrize("init", [False, "gaussian"])
def test_other_initialisations(init: Any, lighten: Any):
    lora, _ = layer("half", lighten, init_lora_weights=init)
    assert lora.lora_A["default"].weight.dtype is torch.float32
    assert lora(torch.randn(2, 64)).isfinite().all()


def test_other_tuners_say_that_they_cannot(tiny_llama: Path, read: Any, lighten: Any):
    model = lighten(read(tiny_llama), "nf4")
    config = peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    with pytest.raises(ValueError, match="is not supported"):
        get_peft_model(model, config)


def test_enabling_twice_is_enabling_once():
    from peft.tuners import tuners_utils
    from peft.tuners.lora import model as lora

    before = lora.dispatch_default, tuners_utils._maybe_include_all_linear_layers
    enable()
    assert (lora.dispatch_default, tuners_utils._maybe_include_all_linear_layers) == before


@pytest.mark.parametrize("kind", KINDS)
def test_preparing_for_training_leaves_codes_and_scales(
    kind: str, tiny_llama: Path, read: Any, answer: Any, lighten: Any
):
    model = lighten(read(tiny_llama), kind)
    before, plain = {n: b.clone() for n, b in model.named_buffers()}, answer(model)
    dtypes = {n: p.dtype for n, p in model.named_parameters()}
    prepared = prepare_model_for_kbit_training(model)
    assert prepared.is_gradient_checkpointing
    assert all(
        b.dtype is before[n].dtype and torch.equal(b, before[n]) for n, b in model.named_buffers()
    )
    after = {n: p.dtype for n, p in model.named_parameters()}
    if kind == "half":  # PEFT widens every half parameter; the values, and the answers, stay
        after = {n: dtypes[n] if "proj" in n else d for n, d in after.items()}
        torch.testing.assert_close(answer(model), plain, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(answer(model), plain)
    assert after == dtypes
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_checkpointing_gives_the_same_gradients(
    kind: str, reentrant: bool, tiny_llama: Path, read: Any, lighten: Any, stir: Any
):
    ids = torch.arange(2 * 12).reshape(2, 12) * 5 % 384

    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        model = lighten(read(tiny_llama), kind)
        options = {"use_reentrant": reentrant}
        model = prepare_model_for_kbit_training(model, checkpointing, options)
        assert model.is_gradient_checkpointing is checkpointing
        wrapped = get_peft_model(model, LoraConfig(target_modules="all-linear", r=4))
        stir(wrapped)
        wrapped.train()
        wrapped(input_ids=ids, labels=ids).loss.backward()
        return {n: p.grad for n, p in wrapped.named_parameters() if p.requires_grad}

    plain, checkpointed = gradients(False), gradients(True)
    assert len(plain) == 28
    assert all(g.abs().sum() > 0 for g in plain.values())
    for name, gradient in plain.items():
        assert torch.equal(checkpointed[name], gradient), name
