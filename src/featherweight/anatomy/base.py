"""What a process takes before it has a tensor: Python, torch, transformers and their libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress

from featherweight.paths import cache_dir, write_atomic
from featherweight.versions import versions

_PROGRAM = """
import torch, transformers, psutil
from transformers import AutoModelForCausalLM, Trainer
torch.ones(64, 64) @ torch.ones(64, 64)
print(psutil.Process().memory_info().rss)
"""


def process_base() -> int:
    """Resident bytes of a process that has imported torch and transformers and multiplied once.

    Measured in a process of its own the first time, and kept for these versions.
    """
    key = json.dumps(versions(), sort_keys=True)
    cache = cache_dir() / "process.json"
    try:
        kept = json.loads(cache.read_text())
    except (OSError, ValueError):
        kept = {}
    if isinstance(kept, dict) and isinstance(kept.get(key), int):
        return kept[key]
    done = subprocess.run(
        [sys.executable, "-P", "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    measured = int(done.stdout.split()[-1])
    with suppress(OSError):  # then it is measured again next time
        write_atomic(cache, json.dumps({key: measured}).encode())
    return measured
