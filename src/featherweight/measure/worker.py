"""The child process of one recipe: `python -m featherweight.measure.worker THREADS SEED`.

Requests come as JSON lines on standard input, answers go as JSON lines to the standard output it
was started with; whatever libraries print goes to standard error instead. It ends with its parent.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from featherweight.errors import FeatherweightError, ModelError


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    _be_the_first_to_go()
    requests: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    session: Any = None
    while True:
        request = json.loads(requests.get())
        try:
            if session is None:
                session = _session()
            answer = {"ok": getattr(session, request["method"])(**request["arguments"])}
        except Exception as error:  # every failure becomes an answer
            answer = {"error": _reason(error), "input": _about_input(error)}
            traceback.print_exc()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _session() -> Any:
    import warnings

    import transformers

    from featherweight.measure.session import Session

    warnings.simplefilter("ignore", FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    return Session(int(sys.argv[1]), int(sys.argv[2]))


def _listen(requests: queue.Queue[str]) -> None:
    for line in sys.stdin:
        requests.put(line)
    os._exit(0)  # the parent is gone, whatever is being measured


def _be_the_first_to_go() -> None:
    """If memory runs out, let the system end this process and not the user's others."""
    with suppress(OSError):  # not Linux, or not allowed: nothing depends on it
        Path("/proc/self/oom_score_adj").write_text("1000")


def _reason(error: Exception) -> str:
    """One line that says what failed."""
    if isinstance(error, FeatherweightError):
        return str(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, MemoryError) or "allocate memory" in first or "out of memory" in first:
        return f"out of memory: {first or 'an allocation failed'}"
    return f"{type(error).__name__}: {first}"


def _about_input(error: Exception) -> bool:
    """Whether another recipe would fail alike; recipes and techniques raise subclasses."""
    return type(error) in (FeatherweightError, ModelError)


if __name__ == "__main__":
    main()
