"""One recipe in this process: what each request answers, and what cannot be measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from featherweight.errors import FeatherweightError
from featherweight.measure.session import Session, encode_prompt
from featherweight.measure.side import DECODER_PARTS
from featherweight.measure.workload import Workload

SHORT = Workload(16, 4, (1,), 20)


@pytest.fixture
def session() -> Callable[..., tuple[Session, dict[str, Any]]]:
    """`session(folder, recipe)`: the session, and what its `load` answered."""

    def start(folder: Path, recipe: str | None = "fp32") -> tuple[Session, dict[str, Any]]:
        session = Session(torch.get_num_threads(), 0)
        return session, session.load(str(folder), recipe, None, False)

    return start


def test_load_tells_what_was_loaded(session, tiny_llama: Path) -> None:
    _, info = session(tiny_llama, None)
    assert info["recipe"] == "fp32"
    assert info["provenance"]["kind"] == "decoder"
    assert info["has_text"]
    assert info["load_s"] > 0
    assert info["bytes_per_token"] == info["weights"]  # the tied head reads all


def test_an_input_embedding_of_its_own_is_not_read_for_each_token(
    session, tiny_llama: Path, tmp_path: Path
) -> None:
    config = LlamaConfig.from_pretrained(tiny_llama, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    _, info = session(tmp_path)
    assert info["weights"] - info["bytes_per_token"] == 384 * 64 * 4
    assert not info["has_text"]


def test_a_dtype_that_no_recipe_names_is_one_line(
    session, tiny_llama: Path, tmp_path: Path
) -> None:
    LlamaForCausalLM.from_pretrained(tiny_llama).double().save_pretrained(tmp_path)
    with pytest.raises(FeatherweightError, match="dtype is float64"):
        session(tmp_path, None)


def test_warm_up_counts_the_whole_cache(session, tiny_llama: Path) -> None:
    one, _ = session(tiny_llama)
    work = Workload(16, 4, (2, 1))
    answer = one.warm_up(work.to_json(), None)
    assert answer["kv_cache"] == 2 * (2 * 2 * 2 * 16) * (16 + 4) * 4  # of the first batch size
    assert set(answer["costs"]) == {"1", "2"}


def test_weights_are_taken_again_after_the_first_pass(session, tiny_llama: Path) -> None:
    one, info = session(tiny_llama)
    model = one.loaded.model
    assert one.warm_up(SHORT.to_json(), None)["weights"] == info["weights"]

    def repack(*ignored: Any) -> None:
        model.packed = torch.zeros(1000, dtype=torch.uint8)

    model.model.register_forward_hook(repack)  # as bitsandbytes does in a forward pass
    answer = one.warm_up(SHORT.to_json(), None)
    assert answer["weights"] == info["weights"] + 1000
    assert answer["weights_mapped"] == info["weights_mapped"]
    assert answer["bytes_per_token"] == info["bytes_per_token"] + 1000


def test_experts_leave_what_a_step_reads_open(session, tiny_llama: Path) -> None:
    one, info = session(tiny_llama)
    assert info["bytes_per_token"]
    one.loaded.model.config.num_local_experts = 4
    assert one._weights()["bytes_per_token"] is None


def test_a_round_measures_every_part_of_every_batch(session, tiny_llama: Path) -> None:
    one, _ = session(tiny_llama)
    work = Workload(8, 2, (1, 3)).to_json()
    parts = {"prefill": ("prefill",), "decode": ("decode",), "generate": ("first", "generate")}
    assert tuple(parts) == DECODER_PARTS
    for part, keys in parts.items():
        found = one.sample(work, part, None)
        assert set(found) == {f"{batch} {key}" for batch in (1, 3) for key in keys}
        assert all(seconds > 0 for seconds in found.values())


def test_an_encoder_round_counts_real_tokens(session, tiny_bert: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one two three four\n\nfive six seven eight nine\n")
    one, _ = session(tiny_bert)
    found = one.sample(Workload(batch_sizes=(2,)).to_json(), "encode", str(tmp_path / "text"))
    tokenizer = one.loaded.tokenizer
    texts = ["one two three four", "five six seven eight nine"]
    assert found["2 tokens"] == sum(len(tokenizer(text)["input_ids"]) for text in texts)
    answer = one.quality(str(tmp_path / "text"), 512, 64, str(tmp_path), True)
    assert answer["measured"] == {"texts": 2}


def test_long_texts_are_cut_to_what_the_encoder_takes(
    session, tiny_bert: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text("far too long " * 300)
    one, _ = session(tiny_bert)
    found = one.sample(Workload(batch_sizes=(1,)).to_json(), "encode", str(tmp_path / "text"))
    assert found["1 tokens"] == 256
    one.loaded.tokenizer.model_max_length = 100
    found = one.sample(Workload(batch_sizes=(1,)).to_json(), "encode", str(tmp_path / "text"))
    assert found["1 tokens"] == 100


def test_prompts_are_continued_greedily(session, tiny_llama: Path) -> None:
    one, _ = session(tiny_llama)
    answers = one.prompts(["A list is", "An integer"], 5)
    ids = one.loaded.tokenizer("An integer", return_tensors="pt")["input_ids"]
    for _ in range(len(answers[1]["ids"])):
        with torch.no_grad():
            next_ = one.loaded.model(ids).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, next_], dim=1)
    assert answers[1]["ids"] == ids[0, -len(answers[1]["ids"]) :].tolist()
    assert answers[0]["text"] == one.loaded.tokenizer.decode(
        answers[0]["ids"], skip_special_tokens=True
    )


def test_messages_go_through_the_chat_template(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    inputs = encode_prompt(tokenizer, [{"role": "user", "content": "hi"}])
    assert tokenizer.decode(inputs["input_ids"][0]) == "<hi>"
    tokenizer.chat_template = None
    with pytest.raises(FeatherweightError, match="no chat template"):
        encode_prompt(tokenizer, [{"role": "user", "content": "hi"}])


def test_more_tokens_than_the_model_takes_are_one_line(session, tiny_llama: Path) -> None:
    one, _ = session(tiny_llama)
    one.warm_up(Workload(240, 16, (1,)).to_json(), None)
    with pytest.raises(FeatherweightError, match="make 257, and the model takes 256"):
        one.warm_up(Workload(240, 17, (1,)).to_json(), None)


def test_an_encoder_without_a_tokenizer_is_one_line(session, tiny_bert: Path) -> None:
    one, _ = session(tiny_bert)
    one.loaded.tokenizer = None
    with pytest.raises(FeatherweightError, match="no tokenizer"):
        one.warm_up(SHORT.to_json(), None)


def test_a_text_without_paragraphs_is_one_line(session, tiny_bert: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("too few words\n")
    one, _ = session(tiny_bert)
    with pytest.raises(FeatherweightError, match="no paragraph"):
        one.warm_up(SHORT.to_json(), str(tmp_path / "text"))


@pytest.mark.parametrize("device", ["cuda:99", "nonsense"])
def test_a_device_that_is_not_there_is_one_line(tiny_llama: Path, device: str) -> None:
    with pytest.raises(FeatherweightError, match=f"cannot be put on device '{device}'") as caught:
        Session(torch.get_num_threads(), 0).load(str(tiny_llama), "fp32", device, False)
    assert "\n" not in str(caught.value)
