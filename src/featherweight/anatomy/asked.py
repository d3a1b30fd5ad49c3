"""What is asked of the predictor: a model's config, a recipe, a workload and a device."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import Any

from featherweight.anatomy import arguments, environments, gpus
from featherweight.anatomy.base import process_base
from featherweight.anatomy.eras import Era
from featherweight.anatomy.result import Memory
from featherweight.anatomy.work import Work
from featherweight.anatomy.worker import answer
from featherweight.errors import FeatherweightError, UnsupportedError
from featherweight.known import config_dict
from featherweight.recipe import Recipe
from featherweight.tensors import EXPERTS

DEFAULT_SEQ_LEN = 512


@dataclass(frozen=True)
class Asked:
    """One question; `predict` answers it."""

    model: str
    config: dict[str, Any]
    recipe: Recipe
    work: Work
    task: str | None = None
    gpu: gpus.Gpu | None = None
    base: int = 0  # bytes of the process that are no tensors
    transformers: str | None = None
    torch_version: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def has_sdpa(self) -> bool:
        """Whether torch has scaled_dot_product_attention: from 2.0 on."""
        version = self.torch_version
        return version is None or Era.of(version).version >= (2, 0)

    @property
    def half(self) -> str:
        """The half dtype that the device multiplies fast: `bf16`, or on an old GPU `fp16`."""
        gpu = self.gpu
        return "fp16" if gpu and gpu.capability < (8, 0) else "bf16"

    def predict(self) -> Memory:
        """Run the program dry, here or under another transformers."""
        request = {
            "model": self.model,
            "config": self.config,
            "recipe": str(self.recipe),
            "work": asdict(self.work),
            "task": self.task,
            "gpu": self.gpu.name if self.gpu else None,
            "base": self.base,
            "era": self.torch_version,
        }
        if self.transformers is None or environments.is_installed_here(self.transformers):
            found = Memory.from_json(answer(request))
        else:
            found = Memory.from_json(environments.run_in(self.transformers, request))
        return replace(found, notes=[*found.notes, *self._notes()])

    def _notes(self) -> list[str]:
        notes = []
        if any(self.config.get(key) for key in EXPERTS):
            notes.append("mixture of experts: every expert is in memory, however tokens are routed")
        return notes


def ask(
    model: Any,
    recipe: str | Recipe | None = None,
    *,
    train: Any = False,
    task: str | None = None,
    batch_size: int | None = None,
    seq_len: int = DEFAULT_SEQ_LEN,
    padding: float = 0.0,
    optimizer: str | None = None,
    loss: str | None = None,
    mixed_precision: str | None = None,
    accumulate: int | None = None,
    max_grad_norm: float | None = None,
    prompt_tokens: int = 512,
    new_tokens: int = 128,
    num_beams: int = 1,
    forward: bool = False,
    outputs: str | None = None,
    lora: Any = None,
    gpu: str | None = None,
    cuda_context: int | None = None,
    transformers: str | None = None,
    torch_version: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Asked:
    """The question that these keywords of `fw.memory` put; raises what `fw.memory` raises."""
    name, config = config_of(model, revision, trust_remote_code)
    if trust_remote_code and "AutoConfig" in (config.get("auto_map") or {}):
        raise UnsupportedError(
            f"'{name}' brings its own code, which a dry run does not run",
            hint="measure it in a script, or predict a model like it that transformers has",
        )
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown method")
        raise UnsupportedError(
            f"the weights of '{name}' are stored quantised ({method}): a dry run cannot build them",
            hint="predict the model that it was made from, with a recipe such as 'bnb-nf4'",
        )
    recipe = Recipe.parse(recipe if recipe is not None else own_dtype(config))
    given = arguments.given(train)
    if given.checkpointing:
        recipe = arguments.with_technique(recipe, "checkpointing")
    if lora is not None:
        recipe = arguments.with_technique(recipe, arguments.lora_technique(lora))
    if forward and train:
        raise FeatherweightError("forward and train exclude each other", hint="give one of them")
    work = Work(
        kind="train" if train else "forward" if forward else "generate",
        batch_size=arguments.first(batch_size, given.batch_size, 1),
        seq_len=seq_len,
        padding=padding,
        optimizer=arguments.first(optimizer, given.optimizer, "adamw"),
        loss=loss,
        mixed_precision=arguments.first(mixed_precision, given.mixed_precision),
        accumulate=arguments.first(accumulate, given.accumulate, 1),
        max_grad_norm=arguments.first(max_grad_norm, given.max_grad_norm, 1.0),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        num_beams=num_beams,
        outputs=outputs,
    )
    device = gpus.find(gpu) if gpu else None
    if device is None and cuda_context is not None:
        raise FeatherweightError("cuda_context without a gpu", hint="name the GPU: gpu='a100-40gb'")
    if device is None:
        base = process_base()
    else:
        base = device.lazy_context if cuda_context is None else cuda_context
    return Asked(
        name,
        config,
        recipe,
        work,
        task,
        device,
        base,
        transformers,
        torch_version,
        revision,
        trust_remote_code,
    )


def own_dtype(config: dict[str, Any]) -> str:
    """The dtype that a checkpoint is stored in, as a recipe: `fp32` where the config has none."""
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return short.get(str(dtype).removeprefix("torch."), "fp32")


def config_of(
    model: Any, revision: str | None = None, trust: bool = False
) -> tuple[str, dict[str, Any]]:
    """Name and config of a name, a folder, a config or a model."""
    if isinstance(model, (str, os.PathLike)):
        name = os.fspath(model)
        return name, config_dict(name, revision=revision, trust_remote_code=trust)
    config = getattr(model, "config", model)
    if isinstance(config, dict):
        return str(config.get("_name_or_path") or config.get("model_type")), config
    if not hasattr(config, "to_dict"):
        raise FeatherweightError(
            f"memory() got a {type(model).__name__}",
            hint="give a name, a folder, a config or a transformers model",
        )
    name = getattr(config, "name_or_path", "") or type(config).__name__
    return name, config.to_dict()
