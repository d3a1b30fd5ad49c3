"""One side of a comparison: a recipe's process, its row, and what its rounds cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from featherweight.measure.child import Child
from featherweight.measure.figures import Round, figures
from featherweight.measure.plan import Costs
from featherweight.measure.result import Estimate, PeakMemory, Row
from featherweight.measure.workload import Workload

DECODER_PARTS = ("prefill", "decode", "generate")
ENCODER_PARTS = ("encode",)
NO_TOKENIZER = "the checkpoint has no tokenizer: quality was not measured"


@dataclass(frozen=True)
class Request:
    """What to measure, and with what."""

    model: str  # folder or gguf file
    workload: Workload
    runs: int
    threads: int
    seed: int
    seconds: float | None  # for the whole run
    quality_tokens: int
    text: str | None
    prompts: Sequence[Any] | None
    device: str | None
    trust_remote_code: bool


class Side:
    """Asks one child, and writes down what it answers."""

    def __init__(self, child: Child, row: Row, request: Request, folder: Path) -> None:
        self.child = child
        self.row = row
        self.costs: Costs = {}
        self.rounds: list[Round] = []
        self._request = request
        self._folder = str(folder)  # what the sides share
        self._weights_read: int | None = None  # bytes of weights that a decode step must read

    def load(self, recipe: str | None) -> dict[str, Any]:
        """Load the model with the recipe; returns its provenance."""
        info = self.child.ask(
            "load",
            model=self._request.model,
            recipe=recipe,
            device=self._request.device,
            trust_remote_code=self._request.trust_remote_code,
        )
        row = self.row
        row.recipe = info["recipe"]
        row.load_s = info["load_s"]
        row.load_memory = PeakMemory(**info["load_memory"])
        self._weigh(info)
        row.receipt = info["receipt"]
        row.notes += info["notes"]
        self.has_text: bool = info["has_text"]
        self.parts = ENCODER_PARTS if info["provenance"]["kind"] == "encoder" else DECODER_PARTS
        provenance: dict[str, Any] = info["provenance"]
        return provenance

    def _weigh(self, info: dict[str, Any]) -> None:
        self.row.weights, self.row.weights_mapped = info["weights"], info["weights_mapped"]
        self._weights_read = info["bytes_per_token"]

    def write_reference(self) -> float:
        """Store answers for the other sides to be verified against; returns their tolerance."""
        tolerance: float = self.child.ask("write_reference", folder=self._folder)["tolerance"]
        return tolerance

    def verify(self, tolerance: float) -> None:
        """Hold the answers against the stored ones; ChildError if they are too far off."""
        assert self.row.receipt is not None
        verified = self.child.ask("verify", folder=self._folder, tolerance=tolerance)
        self.row.receipt["verified"] = verified

    def warm_up(self, work: Workload) -> None:
        """Run once: peak memory, KV cache and what the parts of a round cost."""
        row = self.row
        warm = self.child.ask("warm_up", workload=work.to_json(), text=self._request.text)
        row.run_memory, row.kv_cache = PeakMemory(**warm["run_memory"]), warm["kv_cache"]
        row.notes += [f"not served by the fast path: {reason}" for reason in warm["not_served"]]
        self._weigh(warm)
        self.costs = warm["costs"]
        if row.kv_cache is not None and self._weights_read is not None:
            # tgN starts from an empty cache, which on average is half of N tokens long
            a_token = row.kv_cache / (work.prompt_tokens + work.new_tokens)
            row.bytes_per_token = int(self._weights_read + a_token * work.new_tokens / 2)

    def quality(self, work: Workload, tokens: int, write: bool) -> dict[str, Any]:
        """Compare with the stored outputs, or store them; returns what it was measured on."""
        answer = self.child.ask(
            "quality",
            text=self._request.text,
            tokens=tokens,
            texts=work.texts,
            folder=self._folder,
            write=write,
        )
        self.row.quality = {key: Estimate(**value) for key, value in answer["quality"].items()}
        measured: dict[str, Any] = answer["measured"]
        return measured

    def prompts(self, new_tokens: int) -> None:
        """Continue the user's prompts."""
        self.row.outputs = self.child.ask(
            "prompts", prompts=self._request.prompts, new_tokens=new_tokens
        )

    def sample(self, work: Workload, part: str) -> dict[str, float]:
        """Seconds of one part of a round, by batch size."""
        request = {"workload": work.to_json(), "part": part, "text": self._request.text}
        seconds: dict[str, float] = self.child.ask("sample", **request)
        return seconds

    def warm_generate(self, work: Workload) -> None:
        """The first call of `generate()` imports and builds things: not for the clock."""
        if "generate" in self.parts:
            self.sample(work.shorter(min(work.prompt_tokens, 8), 2), "generate")

    def fill(self, work: Workload, beside: list[Round], bandwidth: float) -> None:
        """Write the row's figures; `beside` are the baseline's rounds, bandwidth is in GB/s."""
        row, batch = self.row, work.batch_sizes[0]
        row.figures = figures(work, self.rounds, beside)
        decode = row.figures.get(work.keys(batch)["decode"])
        if decode and row.bytes_per_token and self._request.device in (None, "cpu"):
            steps = decode.value / batch  # a step of the whole batch reads the weights once
            row.bandwidth_share = row.bytes_per_token * steps / (bandwidth * 1e9)
