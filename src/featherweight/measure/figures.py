"""From the seconds that children report to the figures of a row."""

from __future__ import annotations

from dataclasses import dataclass

from featherweight.measure.result import Figure
from featherweight.measure.stats import figure, paired_ratio
from featherweight.measure.workload import Workload


@dataclass(frozen=True)
class Round:
    """One round of one side: what was run, and seconds by batch and part (`"1 prefill"`)."""

    workload: Workload
    seconds: dict[str, float]

    def tokens(self, batch: int, part: str) -> int:
        """Tokens that the part processed, per sequence (of all texts for an encoder)."""
        if part == "encode":
            return int(self.seconds[f"{batch} tokens"])
        return self.workload.prompt_tokens if part in PROMPT_PARTS else self.workload.new_tokens

    def value(self, batch: int, part: str) -> float:
        """Tokens a second over the whole batch; seconds for the first token."""
        seconds = self.seconds[f"{batch} {part}"]
        if part == "first":
            return seconds
        if part == "encode":
            return self.tokens(batch, part) / seconds
        # generate() is timed from its first token to its last
        steps = self.tokens(batch, part) - (part == "generate")
        return batch * steps / seconds


PROMPT_PARTS = ("prefill", "first")
PARTS = ("prefill", "decode", "generate", "first", "encode")


def figures(asked: Workload, rounds: list[Round], baseline: list[Round]) -> dict[str, Figure]:
    """Figures by name. `baseline`: rounds that ran beside `rounds`, in the same order.

    Where rounds differ in length only the longest count; rounds of the baseline that are missing,
    or of another length, make no pair.
    """
    if not rounds:
        return {}
    found = {}
    for batch in asked.batch_sizes:
        names = asked.keys(batch)
        for part in (p for p in PARTS if f"{batch} {p}" in rounds[0].seconds):
            tokens = max(r.tokens(batch, part) for r in rounds)
            kept = [i for i, r in enumerate(rounds) if r.tokens(batch, part) == tokens]
            ours = [rounds[i].value(batch, part) for i in kept]
            wanted = {**dict.fromkeys(PROMPT_PARTS, asked.prompt_tokens), "encode": tokens}
            made = figure(
                ours,
                "s" if part == "first" else "t/s",
                tokens,
                wanted.get(part, asked.new_tokens),
            )
            pairs = [
                (rounds[i].value(batch, part), baseline[i].value(batch, part))
                for i in kept
                if i < len(baseline) and baseline[i].tokens(batch, part) == tokens
            ]
            if pairs:
                mine, theirs = zip(*(p[::-1] if part == "first" else p for p in pairs), strict=True)
                made.ratio, made.rounds = paired_ratio(mine, theirs), len(pairs)
            found[names[part]] = made
    return found
