"""The parent's side of `worker`: start a child process, ask it, notice when it dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from featherweight.errors import FeatherweightError


class ChildError(FeatherweightError):
    """A child could not do what it was asked, or is dead; the message is the row's reason."""


class InputError(ChildError):
    """What was asked for cannot be measured under any recipe: the model or the text is wrong."""


class Child:
    """One process for one recipe. A context manager: the process ends with the block."""

    def __init__(self, threads: int, seed: int) -> None:
        self._errors = tempfile.TemporaryFile(mode="w+b")  # noqa: SIM115  # closed by close()
        self._process = subprocess.Popen(
            # -P: a file of the working folder must not stand in for a library
            [sys.executable, "-P", "-m", "featherweight.measure.worker", str(threads), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("FEATHERWEIGHT_DEBUG") == "1" else self._errors,
            text=True,
            env=os.environ | {"FEATHERWEIGHT_BNB": "0"},  # `bnb-*` rows measure stock
            start_new_session=True,  # the terminal's Ctrl-C reaches the parent alone
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, method: str, **arguments: Any) -> Any:
        """Call a method of the child's `Session`; raises ChildError with a one-line reason."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            request = {"method": method, "arguments": arguments}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        if not line.endswith("\n"):  # it died, perhaps in the middle of its answer
            raise ChildError(self._epitaph())
        answer = json.loads(line)
        if "error" in answer:
            raise (InputError if answer["input"] else ChildError)(answer["error"])
        return answer["ok"]

    def _epitaph(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "the process was killed by the system, most likely because memory ran out"
        if code < 0:
            return f"the process was ended by {signal.Signals(-code).name}"
        said = self._last_words()
        return f"the process ended by itself (status {code}){': ' + said if said else ''}"

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def close(self) -> None:
        """End the process now."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._errors.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def scratch_folder(cache: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder for what children share, in the cache: the temporary folder may be memory."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="compare-", dir=cache)
    except OSError as error:
        raise FeatherweightError(
            f"the cache folder '{cache}' cannot be written to: {error.strerror}",
            hint="set FEATHERWEIGHT_CACHE to a folder on a disk with some space",
        ) from None
