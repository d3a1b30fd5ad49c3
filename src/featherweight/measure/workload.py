"""What is measured: how many tokens of which kind."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Workload:
    """A decoder writes `new_tokens` after `prompt_tokens`; an encoder reads `texts` texts."""

    prompt_tokens: int = 512
    new_tokens: int = 64
    batch_sizes: tuple[int, ...] = (1,)
    texts: int = 64

    def keys(self, batch: int) -> dict[str, str]:
        """Names of figures by part, as in llama-bench; other batch sizes than 1 are marked."""
        mark = "" if batch == 1 else f"@b{batch}"
        return {
            "encode": f"encode{mark}",
            "prefill": f"pp{self.prompt_tokens}{mark}",
            "decode": f"tg{self.new_tokens}{mark}",
            "generate": f"gen{mark}",
            "first": f"ttft{mark}",
        }

    def shorter(self, prompt_tokens: int, new_tokens: int) -> Workload:
        """The same with fewer tokens."""
        return replace(self, prompt_tokens=prompt_tokens, new_tokens=new_tokens)

    def to_json(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Workload:
        """The inverse of `to_json`."""
        return cls(**data | {"batch_sizes": tuple(data["batch_sizes"])})
