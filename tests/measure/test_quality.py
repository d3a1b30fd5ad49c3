"""Quality figures against plain references, computed another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from featherweight.errors import FeatherweightError
from featherweight.measure import quality
from featherweight.models import Loaded, load

TOKENS = 1024


@pytest.fixture(autouse=True)
def _inference() -> Any:
    with torch.inference_mode():
        yield


# --- windows -------------------------------------------------------------------------------


def test_windows_are_consecutive_and_as_long_as_the_model_takes(llama: Loaded, text: str) -> None:
    rows = quality.windows(llama.model, llama.tokenizer, text, TOKENS)
    ids = llama.tokenizer(text[:20_000], add_special_tokens=False)["input_ids"]
    assert rows.shape == (4, 256)
    assert rows.flatten().tolist() == ids[:TOKENS]


def test_windows_are_no_longer_than_the_usual_context(llama: Loaded, text: str) -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=0, max_position_embeddings=4096))
    assert quality.windows(model, llama.tokenizer, text, TOKENS).shape == (2, quality.CONTEXT)
    assert quality.windows(model, llama.tokenizer, text, 1).shape == (1, quality.CONTEXT)


def test_every_window_begins_as_the_tokenizer_begins_a_text(
    tiny_llama: Path, llama: Loaded, text: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama, bos_token="<eos>")
    plain = quality.windows(llama.model, tokenizer, text, TOKENS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    rows = quality.windows(llama.model, tokenizer, text, TOKENS)
    assert rows.shape == (4, 256)
    assert rows[:, 0].tolist() == [1] * 4
    assert torch.equal(rows[:, 1:].flatten(), plain.flatten()[: 4 * 255])


def test_a_text_of_less_than_a_window_is_one_line(llama: Loaded) -> None:
    with pytest.raises(FeatherweightError, match=r"has \d+ tokens, .* windows of 256"):
        quality.windows(llama.model, llama.tokenizer, "far too short", TOKENS)


def test_the_second_half_of_each_window_is_scored(llama: Loaded, text: str) -> None:
    rows = quality.windows(llama.model, llama.tokenizer, text, 512)
    found = list(quality.scored(llama.model, rows))
    assert len(found) == 2
    for row, (logp, targets) in zip(rows, found, strict=True):
        whole = torch.log_softmax(llama.model(input_ids=row[None]).logits[0], -1)
        torch.testing.assert_close(logp, whole[127:255], atol=1e-4, rtol=1e-4)
        assert torch.equal(targets, row[128:])


# --- decoders ------------------------------------------------------------------------------


def reference(base: Any, other: Any, rows: torch.Tensor) -> dict[str, float]:
    """The same figures in float64, all at once, from whole windows."""
    before, after = (
        torch.log_softmax(m.double()(input_ids=rows).logits[:, 127:255], -1).flatten(0, 1)
        for m in (base, other)
    )
    true = rows[:, 128:].flatten()[:, None]
    mine, theirs = after.gather(1, true), before.gather(1, true)
    kld = torch.nn.functional.kl_div(after, before, log_target=True, reduction="none").sum(-1)
    return {
        "ppl": math.exp(-mine.mean()),
        "ppl_ratio": math.exp(-mine.mean()) / math.exp(-theirs.mean()),
        "kld": kld.mean().item(),
        "kld_p99": kld.quantile(0.99).item(),
        "same_top": (before.argmax(-1) == after.argmax(-1)).double().mean().item(),
        "rms_dp": (mine.exp() - theirs.exp()).square().mean().sqrt().item(),
    }


def test_decoder_figures_are_those_of_a_plain_reference(
    tiny_llama: Path,
    llama: Loaded,
    noisy: Callable[[Path], Loaded],
    text: str,
    tmp_path: Path,
) -> None:
    rows = quality.windows(llama.model, llama.tokenizer, text, TOKENS)
    baseline = quality.write_baseline(llama.model, rows, tmp_path)
    other = noisy(tiny_llama).model
    found = quality.compare_tokens(other, rows, tmp_path)
    expected = reference(load(str(tiny_llama)).model, other, rows)
    assert {key: estimate.value for key, estimate in found.items()} == pytest.approx(
        expected, rel=1e-4
    )
    assert expected["kld"] > 1e-3  # there was something to find
    assert baseline["ppl"].value == pytest.approx(expected["ppl"] / expected["ppl_ratio"], rel=1e-4)


def test_a_model_is_no_different_from_itself(llama: Loaded, text: str, tmp_path: Path) -> None:
    rows = quality.windows(llama.model, llama.tokenizer, text, TOKENS)
    baseline = quality.write_baseline(llama.model, rows, tmp_path)
    found = quality.compare_tokens(llama.model, rows, tmp_path)
    assert 0 <= found["kld"].value < 1e-6
    assert found["same_top"].value == 1
    assert found["ppl_ratio"].value == 1
    assert found["rms_dp"].value == 0
    assert found["ppl"] == baseline["ppl"]


def test_bf16_differs_a_little(tiny_llama: Path, llama: Loaded, text: str, tmp_path: Path) -> None:
    rows = quality.windows(llama.model, llama.tokenizer, text, TOKENS)
    quality.write_baseline(llama.model, rows, tmp_path)
    found = quality.compare_tokens(load(str(tiny_llama), "bf16").model, rows, tmp_path)
    assert 1e-5 < found["kld"].value < 1e-2
    assert found["kld_p99"].value > found["kld"].value


def test_fewer_tokens_than_the_baseline_read_are_compared_with_its_first(
    llama: Loaded, text: str, tmp_path: Path
) -> None:
    rows = quality.windows(llama.model, llama.tokenizer, text, TOKENS)
    quality.write_baseline(llama.model, rows, tmp_path)
    found = quality.compare_tokens(llama.model, rows[:2], tmp_path)
    assert found["kld"].value < 1e-6
    assert found["same_top"].value == 1


def test_tokens_that_a_model_masks_count_for_nothing(
    llama: Loaded, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = quality.windows(llama.model, llama.tokenizer, text, TOKENS)
    plain = llama.model.lm_head.forward
    never = torch.tensor([i for i in range(384) if i not in set(rows.flatten().tolist())])
    assert len(never) > 20
    monkeypatch.setattr(
        llama.model.lm_head,
        "forward",
        lambda hidden: plain(hidden).index_fill(-1, never, -math.inf),
    )
    quality.write_baseline(llama.model, rows, tmp_path)
    found = quality.compare_tokens(llama.model, rows, tmp_path)
    assert 0 <= found["kld"].value < 1e-6
    assert math.isfinite(found["ppl"].value)


# --- encoders ------------------------------------------------------------------------------


def batches(loaded: Loaded, texts: list[str], size: int) -> list[Any]:
    return [
        loaded.tokenizer(texts[at : at + size], padding=True, return_tensors="pt")
        for at in range(0, len(texts), size)
    ]


def alone(loaded: Loaded, text: str) -> torch.Tensor:
    """A text's embedding without padding, float64."""
    inputs = loaded.tokenizer(text, return_tensors="pt")
    return loaded.model(**inputs).last_hidden_state[0].double().mean(0)


def test_encoder_figures_are_those_of_a_plain_reference(
    tiny_bert: Path, bert: Loaded, noisy: Callable[[Path], Loaded], tmp_path: Path
) -> None:
    texts = [f"{word} and then some " * (1 + i % 4) for i, word in enumerate("abcdefghijklmnopq")]
    other = noisy(tiny_bert)
    quality.write_embeddings(bert.model, batches(bert, texts, 5), tmp_path)
    found = quality.compare_embeddings(other.model, batches(other, texts, 5), tmp_path)

    cosine = torch.nn.functional.cosine_similarity
    before, after = ([alone(loaded, text) for text in texts] for loaded in (bert, other))
    expected = [cosine(b, a, dim=0).item() for b, a in zip(before, after, strict=True)]
    assert found["cosine"].value == pytest.approx(sum(expected) / 17, abs=1e-5)

    def nearest(vectors: list[torch.Tensor], i: int) -> set[int]:
        others = [j for j in range(17) if j != i]
        others.sort(key=lambda j: -cosine(vectors[i], vectors[j], dim=0).item())
        return set(others[: quality.NEIGHBOURS])

    kept = [len(nearest(before, i) & nearest(after, i)) / quality.NEIGHBOURS for i in range(17)]
    assert found["neighbours"].value == pytest.approx(sum(kept) / 17)
    assert 0 < found["neighbours"].value < 1


def test_an_encoder_keeps_all_its_own_neighbours(bert: Loaded, tmp_path: Path) -> None:
    inputs = batches(bert, [f"text number {i}" for i in range(30)], 8)
    quality.write_embeddings(bert.model, inputs, tmp_path)
    found = quality.compare_embeddings(bert.model, inputs, tmp_path)
    assert found["cosine"].value == pytest.approx(1, abs=1e-6)
    assert found["neighbours"].value == 1


def test_one_text_has_no_neighbours(bert: Loaded, tmp_path: Path) -> None:
    inputs = batches(bert, ["only this"], 1)
    quality.write_embeddings(bert.model, inputs, tmp_path)
    assert set(quality.compare_embeddings(bert.model, inputs, tmp_path)) == {"cosine"}
