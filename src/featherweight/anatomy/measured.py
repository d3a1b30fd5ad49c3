"""`measure`: the memory that a workload takes when it is run, to set beside the prediction."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch

from featherweight.anatomy.asked import ask
from featherweight.errors import FeatherweightError
from featherweight.measure.child import ChildError
from featherweight.recipe import Recipe


@dataclass(frozen=True)
class Measured:
    """Peaks of a real run, in bytes, and its seconds.

    `allocated`: tensors. `resident`: growth of the process by memory in use, None on a GPU.
    `reserved`: what the allocator took from the system or the device. `process`: the whole of it,
    libraries or CUDA context included, as the system monitor or nvidia-smi shows it.
    """

    device: str
    allocated: int
    resident: int | None
    reserved: int
    process: int
    seconds: float
    note: str

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def measure(
    model: Any, recipe: str | Recipe | None = None, *, device: str = "cpu", **keywords: Any
) -> Measured:
    """Run what `featherweight.memory` predicts, with random weights, in processes of its own.

    Keywords are those of `featherweight.memory` that say what runs: not those that say what it is
    predicted for (gpu, cuda_context, transformers, torch_version). `device` is `cpu`, `cuda` or
    `cuda:1`.
    On a CPU the workload runs three times: for the process as it comes, for the memory in use
    (larger blocks go back to the system as soon as they are freed), and for the bytes of tensors.

    Raises what `featherweight.memory` raises for a wrong request, and ChildError where the run
    fails: memory ran out, or the model cannot do it.
    """
    elsewhere = {"gpu", "cuda_context", "transformers", "torch_version"} & keywords.keys()
    if elsewhere:
        raise FeatherweightError(
            f"{', '.join(sorted(elsewhere))}: a measurement runs here, with what is installed",
            hint="leave it out, or predict it",
        )
    place = _device(device)
    asked = ask(model, recipe, **keywords)
    request = {
        "config": asked.config,
        "recipe": str(asked.recipe),
        "work": asdict(asked.work),
        "task": asked.task,
        "device": str(place),
    }
    found: dict[str, Any] = {"resident": None}
    for in_use in (False,) if place.type == "cuda" else (False, True):
        found |= _run({**request, "in_use": in_use})
    return Measured(device=str(place), note=_note(place), **found)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        return device
    if device.type == "cpu":
        return device
    here = ", ".join(["cpu", *(f"cuda:{n}" for n in range(torch.cuda.device_count()))])
    raise FeatherweightError(f"nothing can be measured on '{name}'", hint=f"here: {here}")


def _run(request: dict[str, Any]) -> dict[str, Any]:
    debug = os.environ.get("FEATHERWEIGHT_DEBUG") == "1"
    done = subprocess.run(
        # -P: a file of the working folder must not stand in for a library
        [sys.executable, "-P", "-m", "featherweight.anatomy.measured_child"],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        stderr=None if debug else subprocess.PIPE,
        text=True,
        env=os.environ | {"FEATHERWEIGHT_BNB": "0"},  # `bnb-*` measures stock
    )
    if done.returncode == -signal.SIGKILL:
        raise ChildError(
            "the process was killed by the system, most likely because memory ran out",
            hint="measure a smaller batch or length",
        )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = (done.stderr or "").strip().splitlines()
        last = f": {said[-1].strip()}" if said else ""
        raise ChildError(f"the process ended by itself (status {done.returncode}){last}") from None
    if "error" in answer:
        raise ChildError(answer["error"])
    return answer["ok"]


def _note(device: torch.device) -> str:
    if device.type == "cuda":
        return f"random weights, {torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"random weights, {torch.get_num_threads()} threads, torch {torch.__version__}"
