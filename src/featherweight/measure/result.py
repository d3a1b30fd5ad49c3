"""What `compare` found: one `Report`, one `Row` a recipe, plain data with a JSON form.

The JSON document is flat where people look things up: a row's figures and quality stand under the
names that the table shows (`pp512`, `tg64`, `gen`, `ttft`, `kld`, `same_top`, `ppl`, …).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "featherweight.compare/1"


@dataclass
class Interval:
    """A point estimate and its 95 % confidence interval."""

    value: float
    low: float
    high: float


@dataclass
class Figure:
    """A repeated measurement: every sample, and what they come to."""

    value: float  # median of `samples`
    unit: str  # "t/s" or "s"
    sd: float  # sample standard deviation
    samples: list[float]
    tokens: int  # tokens of one sample as measured
    asked: int  # tokens asked for; more than `tokens` where a slow recipe was cut short
    ratio: Interval | None = None  # speed against the baseline (above 1: faster), paired by round
    rounds: int = 0  # pairs behind `ratio`


@dataclass
class Estimate:
    """A mean over tokens or texts, with its standard error."""

    value: float
    se: float | None = None


@dataclass
class PeakMemory:
    """Peak resident bytes above the floor (the same process before it had a model).

    `anonymous` and `file` peak at different moments, so that they need not add up to `total`;
    None where the system does not tell them apart. The CUDA figures are None without a GPU.
    """

    total: int
    anonymous: int | None = None
    file: int | None = None
    cuda_allocated: int | None = None
    cuda_reserved: int | None = None
    cuda_process: int | None = None  # context included, as nvidia-smi counts; after the run


@dataclass
class Row:
    """One recipe, measured; or the reason why it was not."""

    recipe: str
    baseline: bool = False
    status: str = "ok"  # "ok", "partial" (stopped early), "failed"
    reason: str | None = None  # why `status` is not "ok"; one line
    notes: list[str] = field(default_factory=list)  # what explains the figures; a line each
    verdict: str | None = None
    receipt: dict[str, Any] | None = None
    load_s: float | None = None
    weights: int | None = None  # bytes, each storage once, quantisation state counted
    weights_mapped: int | None = None  # of these, views of a memory-mapped file
    kv_cache: int | None = None  # bytes at the end of prompt and new tokens
    load_memory: PeakMemory | None = None
    run_memory: PeakMemory | None = None
    bytes_per_token: int | None = None  # least that one decode step must read
    bandwidth_share: float | None = None  # bytes_per_token × tg / measured read bandwidth
    figures: dict[str, Figure] = field(default_factory=dict)
    quality: dict[str, Estimate] = field(default_factory=dict)
    outputs: list[dict[str, Any]] | None = None  # per prompt: text, tokens, first_difference

    def to_json(self) -> dict[str, Any]:
        """The row as JSON types, figures and quality under their own names."""
        data = asdict(self)
        figures, quality = data.pop("figures"), data.pop("quality")
        return data | figures | quality


@dataclass
class Report:
    """Everything one `compare` measured, and on what."""

    model: dict[str, Any]  # name, architecture, kind, dtype, parameters, source
    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]  # threads, runs, prompt_tokens, new_tokens, batch_sizes, seed, text …
    rows: list[Row] = field(default_factory=list)
    prompts: list[str] | None = None
    elapsed_s: float = 0.0
    complete: bool = True  # False: interrupted, or out of time
    interrupted: bool = False  # by Ctrl-C
    gates: list[str] = field(default_factory=list)  # --max-kld, --max-ppl-ratio broken; a line each

    def to_json(self) -> dict[str, Any]:
        """One document, rows flattened (see `Row.to_json`)."""
        data = {"schema": SCHEMA} | {k: v for k, v in vars(self).items() if k != "rows"}
        return data | {"rows": [row.to_json() for row in self.rows]}

    def __str__(self) -> str:
        from featherweight.report import render

        return render(self, "human")
