"""One dry run in a process of its own: `python -m featherweight.anatomy.worker`.

A request comes as JSON on standard input, the answer goes as the last line of standard output.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from featherweight.errors import FeatherweightError


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what `memory.request` describes; the result as plain data."""
    from featherweight.anatomy import gpus
    from featherweight.anatomy.dryrun import dry_run
    from featherweight.anatomy.eras import Era
    from featherweight.anatomy.work import Work
    from featherweight.recipe import Recipe

    gpu, era = request["gpu"], request["era"]
    memory = dry_run(
        request["model"],
        request["config"],
        Recipe.parse(request["recipe"]),
        Work.of(request["work"]),
        task=request["task"],
        gpu=gpus.find(gpu) if gpu else None,
        base=request["base"],
        era=Era.of(era) if era else None,
    )
    return memory.to_json()


def main() -> None:
    """Answer the one request."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    said: dict[str, Any]
    try:
        said = {"ok": answer(json.load(sys.stdin))}
    except Exception as error:  # every failure becomes an answer
        reason = str(error) if isinstance(error, FeatherweightError) else repr(error)
        said = {"error": reason}
        traceback.print_exc()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
