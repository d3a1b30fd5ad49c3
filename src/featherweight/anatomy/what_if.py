"""Which single change would lower the peak most, each by a dry run of its own."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from typing import Any

from featherweight.anatomy.asked import Asked, ask
from featherweight.anatomy.candidates import changes
from featherweight.anatomy.result import Memory
from featherweight.anatomy.work import Work
from featherweight.errors import FeatherweightError
from featherweight.recipe import Recipe


@dataclass(frozen=True)
class Change:
    """One change, and what it would do."""

    label: str
    recipe: str
    saved: int  # bytes of the process at the peak
    memory: Memory
    command: str  # that predicts it again
    cost: str


def what_if(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    count: int = 5,
    before: Memory | None = None,
    **keywords: Any,
) -> list[Change]:
    """The single changes that lower the peak most, the largest first; keywords as of `fw.memory`.

    `before` is the prediction without a change, where it is at hand. A change that the model cannot
    have, or that saves nothing, is left out.
    """
    asked = ask(model, recipe, **keywords)
    before = before or asked.predict()
    found = []
    for candidate in changes(
        asked.recipe,
        asked.work,
        asked.config,
        asked.gpu is not None,
        half=asked.half,
        has_sdpa=asked.has_sdpa,
    ):
        changed = replace(asked, recipe=candidate.recipe, work=candidate.work)
        try:
            after = changed.predict()
        except FeatherweightError:
            continue
        saved = before.peak.process - after.peak.process
        if saved > 0:
            found.append(
                Change(
                    candidate.label,
                    str(candidate.recipe),
                    saved,
                    after,
                    command(changed),
                    candidate.cost,
                )
            )
    return sorted(found, key=lambda change: -change.saved)[:count]


_FLAGS = {
    "batch_size": "--batch-size",
    "seq_len": "--seq-len",
    "padding": "--padding",
    "optimizer": "--optimizer",
    "loss": "--loss",
    "mixed_precision": "--mixed-precision",
    "accumulate": "--accumulate",
    "max_grad_norm": "--max-grad-norm",
    "prompt_tokens": "--prompt-tokens",
    "new_tokens": "--new-tokens",
    "num_beams": "--num-beams",
    "outputs": "--outputs",
}
_OF_KIND = {
    "train": ("batch_size", "seq_len", "padding", "optimizer", "loss", "mixed_precision",
              "accumulate", "max_grad_norm", "outputs"),
    "forward": ("batch_size", "seq_len", "padding", "mixed_precision", "outputs"),
    "generate": ("batch_size", "prompt_tokens", "new_tokens", "padding", "num_beams", "outputs"),
}  # fmt: skip


def command(asked: Asked) -> str:
    """The `featherweight memory` command that asks the same; what is usual is left out."""
    words = ["featherweight", "memory", asked.model, "--recipe", str(asked.recipe)]
    kind = asked.work.kind
    words += [f"--{kind}"] if kind != "generate" else []
    words += ["--task", asked.task] if asked.task else []
    usual = asdict(Work(kind=kind))
    for name in _OF_KIND[kind]:
        value = getattr(asked.work, name)
        if value != usual[name]:
            words += [_FLAGS[name], str(value)]
    if asked.gpu:
        words += ["--gpu", asked.gpu.name]
        words += ["--cuda-context", str(asked.base)] if asked.base != asked.gpu.lazy_context else []
    words += ["--transformers", asked.transformers] if asked.transformers else []
    words += ["--torch", asked.torch_version] if asked.torch_version else []
    words += ["--revision", asked.revision] if asked.revision else []
    words += ["--trust-remote-code"] if asked.trust_remote_code else []
    return shlex.join(words)
