"""Real text to measure on: a file of the user's, or the help topics that come with CPython."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featherweight.errors import FeatherweightError


@dataclass(frozen=True)
class Text:
    """A text and where it is from; the sha256 tells two versions apart."""

    source: str
    text: str

    def to_json(self) -> dict[str, Any]:
        """Everything but the text itself."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        return {"source": self.source, "characters": len(self.text), "sha256": digest}


def read_text(path: str | Path | None) -> Text:
    """The file's text; without one, `pydoc_data.topics` (about 465,000 characters)."""
    if path is None:
        from pydoc_data.topics import topics

        body = "\n\n".join(topics[key].strip() for key in sorted(topics))
        return Text("pydoc_data.topics of CPython", body)
    try:
        body = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise FeatherweightError(
            f"the text file '{path}' cannot be read: {reason}",
            hint="name a UTF-8 text file, or leave --text out",
        ) from None
    if not body.strip():
        raise FeatherweightError(f"the text file '{path}' is empty", hint="name one with some text")
    return Text(str(path), body)


def paragraphs(text: str, count: int) -> list[str]:
    """The first `count` paragraphs of at least four words, as an encoder would be given them."""
    found = [" ".join(part.split()) for part in text.split("\n\n")]
    return [part for part in found if len(part.split()) >= 4][:count]


def read_prompts(path: str | Path) -> list[Any]:
    """Prompts from a JSONL file: a string, `{"prompt": …}` or `{"messages": […]}` a line."""
    prompts: list[Any] = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise FeatherweightError(f"the prompts file '{path}' cannot be read: {reason}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
            raise FeatherweightError(
                f"line {number} of '{path}' is not JSON: {error.msg}",
                hint='write one JSON value a line, such as {"prompt": "The capital of France is"}',
            ) from None
        if isinstance(item, dict):
            item = item.get("messages") or item.get("prompt")
        if not _is_prompt(item):
            raise FeatherweightError(
                f"line {number} of '{path}' holds no prompt",
                hint='write "…", {"prompt": "…"} or {"messages": [{"role": …, "content": …}]}',
            )
        prompts.append(item)
    if not prompts:
        raise FeatherweightError(
            f"the prompts file '{path}' is empty", hint="write a prompt a line"
        )
    return prompts


def _is_prompt(item: Any) -> bool:
    """Some text, or messages as a chat template takes them."""
    if isinstance(item, list):
        return bool(item) and all(
            isinstance(message, dict) and {"role", "content"} <= set(message) for message in item
        )
    return isinstance(item, str) and bool(item.strip())
