"""How many rounds of how many tokens fit into the time that is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from featherweight.measure.workload import Workload

FEW_ROUNDS = 5  # fewer make wide intervals; tokens are cut short before that
LEAST_NEW, LEAST_PROMPT = 8, 32
PART = 0.9  # of the time given to rounds; the rest is for what was guessed too low

Costs = Mapping[str, Mapping[str, float]]  # batch size → seconds of "prefill" and "token"


@dataclass(frozen=True)
class Plan:
    """So many rounds of this workload."""

    rounds: int
    workload: Workload
    seconds: float  # that it will take


def round_seconds(work: Workload, costs: Costs, measured: Workload) -> float:
    """Seconds of one round, from costs measured at `measured.prompt_tokens`."""
    seconds = 0.0
    for batch in work.batch_sizes:
        cost = costs[str(batch)]
        if "encode" in cost:
            seconds += cost["encode"]
            continue
        prefill = cost["prefill"] * work.prompt_tokens / measured.prompt_tokens
        seconds += 2 * (prefill + cost["token"] * work.new_tokens)  # once alone, once in generate()
    return seconds


def plan(asked: Workload, runs: int, sides: list[Costs], seconds: float | None) -> Plan:
    """Fit rounds of all `sides` (recipe, and baseline beside it) into `seconds`; None: no limit.

    First fewer rounds, down to `FEW_ROUNDS`; then fewer new tokens, then a shorter prompt; at last
    a single round, which is run whatever it takes.
    """

    def cost(work: Workload) -> float:
        return sum(round_seconds(work, costs, asked) for costs in sides)

    if seconds is None:
        return Plan(runs, asked, runs * cost(asked))
    time = PART * seconds
    work = asked
    few = min(runs, FEW_ROUNDS)
    while few * cost(work) > time:
        less = _less(work)
        if cost(less) >= cost(work):
            break
        work = less
    rounds = max(1, min(runs, int(time / cost(work)))) if cost(work) else runs
    return Plan(rounds, work, rounds * cost(work))


def _less(work: Workload) -> Workload:
    """The next shorter workload; the same one where there is none."""
    prompt, new = work.prompt_tokens, work.new_tokens
    if new > LEAST_NEW:
        return work.shorter(prompt, max(LEAST_NEW, new * 3 // 4))
    if prompt > LEAST_PROMPT:
        return work.shorter(max(LEAST_PROMPT, prompt // 2), new)
    return work
