"""Text and prompts: what is read, and one line about what cannot be."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from featherweight.errors import FeatherweightError
from featherweight.measure.text import paragraphs, read_prompts, read_text


def test_default_text_is_long_and_the_same_each_time() -> None:
    text = read_text(None)
    assert len(text.text) > 300_000
    assert text == read_text(None)


def test_a_file_is_described_without_its_text(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("Grüße\n", encoding="utf-8")
    assert read_text(path).to_json() == {
        "source": str(path),
        "characters": 6,
        "sha256": hashlib.sha256("Grüße\n".encode()).hexdigest(),
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "No such file"), (b" \n", "is empty"), (b"\xff\xfe\x00", "not UTF-8")],
    ids=["missing", "empty", "binary"],
)
def test_bad_text_is_one_line(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FeatherweightError, match=says) as caught:
        read_text(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paragraphs_are_unwrapped_and_headings_left_out() -> None:
    text = "Title\n\nOne two\n three four.\n\n \n\na b c d\n\nfive six seven eight"
    assert paragraphs(text, 2) == ["One two three four.", "a b c d"]
    assert len(paragraphs(text, 9)) == 3


def test_prompts_in_every_form(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    messages = '[{"role": "user", "content": "c"}]'
    path.write_text(f'"a"\n\n{{"prompt": "b"}}\n{{"messages": {messages}}}\n{messages}\n')
    chat = [{"role": "user", "content": "c"}]
    assert read_prompts(path) == ["a", "b", chat, chat]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ('"a"\nno', "line 2 .* is not JSON"),
        ("3", "line 1 .* holds no prompt"),
        ('" "', "holds no prompt"),
        ("{}", "holds no prompt"),
        ("[]", "holds no prompt"),
        ("[1, 2]", "holds no prompt"),
        ('["a"]', "holds no prompt"),
        ('{"prompt": ["a"]}', "holds no prompt"),
        ('{"messages": [{"role": "user"}]}', "holds no prompt"),
    ],
)
def test_bad_prompts_are_one_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(FeatherweightError, match=says) as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_prompts_file(tmp_path: Path) -> None:
    with pytest.raises(FeatherweightError, match="cannot be read"):
        read_prompts(tmp_path)
