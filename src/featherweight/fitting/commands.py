"""What a user types to run a recipe."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path

from transformers.training_args import OptimizerNames

from featherweight.anatomy import build
from featherweight.anatomy.candidates import Candidate
from featherweight.fitting.dry_runs import DryRuns
from featherweight.fitting.facts import Facts
from featherweight.known import KNOWN
from featherweight.named import NAMED
from featherweight.recipe import Recipe, name_of
from featherweight.techniques.base import Technique
from featherweight.techniques.bnb import Bnb
from featherweight.techniques.cast import DTYPES, Cast, short
from featherweight.techniques.quantiser import Quantiser

# `Trainer`'s names of optimizers that have a shorter one here.
_OPTIMIZERS = {"adam8bit": "adamw_bnb_8bit"}  # made by hand, which Trainer has no name for


def command(runs: DryRuns, recipe: Recipe, facts: Facts) -> str | None:
    """A command line on a CPU where the model writes text, else Python; None if nothing can."""
    if runs.on_gpu or not facts.writes:
        return "\n".join(_model(runs, list(recipe), facts))
    if facts.two_sided:
        return None  # `load` does not read encoder-decoders
    name = hub_id(runs.asked.model)
    words = ["featherweight", "generate", name, "PROMPT", "--recipe", str(recipe)]
    words += ["--revision", runs.asked.revision] if runs.asked.revision else []
    words += ["--trust-remote-code"] if runs.asked.trust_remote_code else []
    return shlex.join(words)


def hub_id(name: str) -> str:
    """What `load` finds the model by: short names of known configs are no names of models."""
    if name.lower() in KNOWN and name not in NAMED and not Path(name).expanduser().exists():
        return KNOWN[name.lower()][0]
    return name


def training_code(runs: DryRuns, setting: Candidate, facts: Facts) -> str:
    """Lines of Python: the model, and the arguments of `Trainer` that make it such a training."""
    work = setting.work
    checkpointed = [t for t in setting.recipe if name_of(t) == "checkpointing"]
    lines = _model(runs, [t for t in setting.recipe if t not in checkpointed], facts)
    given = [f"per_device_train_batch_size={work.batch_size}"]
    if work.accumulate > 1:
        given.append(f"gradient_accumulation_steps={work.accumulate}")
    if checkpointed:
        given.append("gradient_checkpointing=True")
    if work.mixed_precision:
        given.append(f"{work.mixed_precision}=True")
    name = _OPTIMIZERS.get(work.optimizer, work.optimizer)
    if name in {known.value for known in OptimizerNames}:
        given.append(f'optim="{name}"')
    elif name != "adamw":
        lines.append(f"# Trainer has no optim='{name}': pass it optimizers=(…)")
    return "\n".join([*lines, f"args = TrainingArguments({', '.join(given)})"])


def _model(runs: DryRuns, techniques: list[Technique], facts: Facts) -> list[str]:
    """Lines that make the model without ever holding more than is needed.

    On a GPU that is transformers' own way, which puts each tensor there as it is read.
    """
    ours = any(isinstance(technique, Quantiser) for technique in techniques)
    if facts.task == facts.own_task and not facts.two_sided and (ours or not runs.on_gpu):
        given = [f'"{_joined(techniques)}"'] if techniques else []
        given += ['device="cuda:0"'] if runs.on_gpu else []
        return [f"model = featherweight.load({_arguments(runs, given)}).model"]
    first = [t for t in techniques if _is_dtype(t) or isinstance(t, Bnb) or _is_stock(t)]
    rest = [t for t in techniques if t not in first]
    given = [_option(technique) for technique in first]
    given += ['device_map="cuda:0"'] if runs.on_gpu else []
    lines = [f"model = {build.TASKS[facts.task]}.from_pretrained({_arguments(runs, given)})"]
    return [*lines, _applied(rest)] if rest else lines


def _arguments(runs: DryRuns, given: list[str]) -> str:
    found_by = [f"revision={json.dumps(runs.asked.revision)}"] if runs.asked.revision else []
    found_by += ["trust_remote_code=True"] if runs.asked.trust_remote_code else []
    return ", ".join([json.dumps(hub_id(runs.asked.model)), *given, *found_by])


def _option(technique: Technique) -> str:
    """Of `from_pretrained`."""
    if isinstance(technique, Cast):
        return f"dtype=torch.{short(technique.dtype)}"
    if isinstance(technique, Bnb):
        return f"quantization_config={_bnb_config(technique)}"
    return f'attn_implementation="{name_of(technique)}"'


def _applied(techniques: list[Technique]) -> str:
    return f'featherweight.apply(model, "{_joined(techniques)}", reversible=False)'


def _is_dtype(technique: Technique) -> bool:
    return isinstance(technique, Cast) and not getattr(technique, "compute", None)


def _is_stock(technique: Technique) -> bool:
    """Attention that transformers has under the same name."""
    return name_of(technique) in ("eager", "sdpa")


def _joined(techniques: Iterable[Technique]) -> str:
    return str(Recipe(tuple(techniques)))


def _bnb_config(technique: Bnb) -> str:
    if not hasattr(technique, "compute"):
        threshold = getattr(technique, "threshold", 6.0)
        return f"BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold={threshold})"
    compute = short(DTYPES[technique.compute])
    double = ", bnb_4bit_use_double_quant=True" if getattr(technique, "double", False) else ""
    kind = getattr(technique, "quant_type", "nf4")
    return (
        f'BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="{kind}"{double},'
        f" bnb_4bit_compute_dtype=torch.{compute})"
    )
