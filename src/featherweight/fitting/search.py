"""The most that fits, found with few tries: each is a dry run, which takes seconds."""

from __future__ import annotations

import math
from collections.abc import Callable

MOST = 4096  # rows of a batch; more are not looked for
STRAIGHT = 6  # guesses along a line, before intervals are halved
GRAIN = 64  # lengths are looked for in steps of so many tokens
CLOSE = 0.02  # share of the limit that the longest length found may leave unused
TRIES = 4  # of lengths, at most


def largest_batch(peak: Callable[[int], int], limit: int, start: int = 1) -> int:
    """The most rows up to `MOST` whose `peak` is at most `limit`; 0 if `start` are too many.

    Guesses go along the line through what was seen; but the answer was itself seen to fit, and one
    row more not to.
    """
    seen = {start: peak(start)}
    if seen[start] > limit:
        return 0
    while True:
        good, bad = _between(seen, limit)
        bad = MOST + 1 if bad is None else bad
        if bad <= good + 1:
            return good
        if len(seen) == 1:
            guess = 2 * start
        elif len(seen) > STRAIGHT:
            guess = (good + bad) // 2
        else:
            guess = _meets(seen, limit, default=2 * good)
        guess = min(max(guess, good + 1), bad - 1)
        seen[guess] = peak(guess)


def longest(
    peak: Callable[[int], int], first: tuple[int, int], fixed: int, limit: int, most: int
) -> int:
    """The most tokens up to `most` whose `peak` is at most `limit`, to `CLOSE` or `GRAIN`.

    `first` is a length and its peak, of which `fixed` does not grow with length: the rest grows as
    a power of it, linearly or up to its square. What is returned was itself seen to fit; 0 if
    nothing was.
    """
    seen = dict([first])
    for _ in range(TRIES):
        good, bad = _between(seen, limit)
        if good == most or (good and limit - seen[good] <= CLOSE * limit):
            break
        guess = min(_by_power(seen, fixed, int(limit * (1 - CLOSE / 4)), most), most)
        if bad is not None and guess >= bad:
            guess = (good + bad) // 2
        if guess != most and guess > GRAIN:
            guess = guess // GRAIN * GRAIN
        if guess <= good or guess in seen:
            break
        seen[guess] = peak(guess)
    return _between(seen, limit)[0]


def _by_power(seen: dict[int, int], fixed: int, limit: int, most: int) -> int:
    """Where the power of length through the two points nearest to the limit meets it."""
    growing = {n: needs - fixed for n, needs in seen.items() if needs > fixed}
    if limit <= fixed or not growing:
        return 0 if limit <= fixed else most
    (n, part), *others = sorted(growing.items(), key=lambda p: abs(p[1] - limit + fixed))[:2]
    power = math.log(others[0][1] / part) / math.log(others[0][0] / n) if others else 1.0
    if power <= 0.1:  # hardly grows
        return most
    return int(min(n * ((limit - fixed) / part) ** (1 / power), most))


def largest_divisor(peak: Callable[[int], int], limit: int, number: int) -> int:
    """The largest divisor of `number` whose `peak` is at most `limit`, of which 1 is one."""
    sizes = [n for n in range(1, number + 1) if number % n == 0]
    good, bad = 0, len(sizes)
    while bad - good > 1:
        middle = bad - 1 if bad == len(sizes) else (good + bad) // 2  # all at once first
        if peak(sizes[middle]) <= limit:
            good = middle
        else:
            bad = middle
    return sizes[good]


def _between(seen: dict[int, int], limit: int) -> tuple[int, int | None]:
    """The largest that fits, 0 if none does, and the smallest that does not."""
    good = max((n for n, needs in seen.items() if needs <= limit), default=0)
    return good, min((n for n, needs in seen.items() if needs > limit), default=None)


def _meets(seen: dict[int, int], limit: int, default: int) -> int:
    """Where the line through the two points nearest to the limit meets it."""
    nearest = sorted(seen.items(), key=lambda pair: abs(pair[1] - limit))[:2]
    (low, least), (high, more) = sorted(nearest)
    if more <= least:
        return default
    return int(low + (limit - least) * (high - low) / (more - least))
