"""How much time is left, for the plan and for the user."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

Progress = Callable[[str, float | None], None]  # what is being done, seconds left if known


class Pace:
    """The clock of one `compare`: its budget, and what recipes have taken so far."""

    def __init__(self, budget: float | None, progress: Progress) -> None:
        self._progress = progress
        self._end = None if budget is None else time.monotonic() + budget
        self._began = time.monotonic()  # the recipe at work
        self._until: float | None = None  # when it should be done, once its rounds are planned
        self._took: list[float] = []  # of recipes that are done
        self._label = ""
        self._after = 0  # recipes still to come after this one

    def begin(self, label: str, after: int) -> None:
        """A recipe is next, and so many come after it."""
        self._label, self._after = label, after
        self._began, self._until = time.monotonic(), None

    def finish(self) -> None:
        """The recipe is done."""
        self._took.append(self.elapsed())

    def elapsed(self) -> float:
        """Seconds since the recipe began."""
        return time.monotonic() - self._began

    def expect(self, seconds: float) -> None:
        """The recipe will be done in so many seconds."""
        self._until = time.monotonic() + seconds

    def left(self) -> float | None:
        """Seconds of the budget; None: no limit."""
        return None if self._end is None else self._end - time.monotonic()

    def share(self) -> float | None:
        """The recipe's part of what is left, when those to come get as much; None: no limit."""
        left = self.left()
        return None if left is None else left / (self._after + 1)

    def say(self, doing: str) -> None:
        """Tell the user what is being done, and how long the rest may take."""
        self._progress(f"{self._label}: {doing}", self._estimate())

    def _estimate(self) -> float | None:
        """Seconds: this recipe's plan, and for those to come what others took."""
        now, left = time.monotonic(), self.left()
        if self._took:
            typical = fmean(self._took)
        elif self._until is not None:
            typical = self._until - self._began
        else:
            return left
        until = self._began + typical if self._until is None else self._until
        rest = max(0.0, until - now) + typical * self._after
        return rest if left is None else max(0.0, min(rest, left))
