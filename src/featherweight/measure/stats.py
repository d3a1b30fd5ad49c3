"""From samples to figures: medians, paired ratios with intervals, and quality estimates.

Pure functions over numbers. Log-probabilities and divergences are in nats, shares are 0 … 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, median, stdev

import numpy as np
from numpy.typing import ArrayLike

from featherweight.measure.result import Estimate, Figure, Interval

RESAMPLES = 10_000
FEWEST_TO_RESAMPLE = 6  # rounds; see `paired_ratio`
NOISY = 0.10  # coefficient of variation


def figure(samples: Sequence[float], unit: str, tokens: int, asked: int) -> Figure:
    """Median and sample standard deviation of `samples`, both in `unit`.

    `tokens` is what one sample measured, of `asked`. The deviation of a single sample is nan.
    """
    values = [float(sample) for sample in samples]
    sd = stdev(values) if len(values) > 1 else math.nan
    return Figure(median(values), unit, sd, values, tokens, asked)


def noise(figures: Mapping[str, Figure]) -> list[str]:
    """One line of advice if samples vary by more than 10 % of their median, else nothing."""
    shares = {key: f.sd / f.value for key, f in figures.items() if f.sd > NOISY * f.value}
    if not shares:
        return []
    named = ", ".join(f"{key} by {share:.0%}" for key, share in shares.items())
    return [f"noisy: {named} (one standard deviation); close other programs, or raise --runs"]


def paired_ratio(
    recipe: Sequence[float], baseline: Sequence[float], confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Median over rounds of recipe / baseline, with its confidence interval.

    Samples of the same round stand at the same place, so that what slows a whole round cancels.
    For rates the ratio is above 1 where the recipe is faster; for times swap the arguments.

    Six rounds or more: bootstrap over rounds, at percentile levels widened for small samples
    (Hesterberg 2014, "expanded percentile interval"). Two to five: Student's interval of the log
    ratios, because resampling never leaves the range of the samples, and the range of n samples
    holds the true median in only 1 − 2^(1−n) of all cases. One round says nothing of the
    spread: the interval is 0 … inf.
    """
    pairs = list(zip(recipe, baseline, strict=True))
    if not pairs or not all(0 < sample < math.inf for pair in pairs for sample in pair):
        raise ValueError("a paired ratio needs at least one round of positive, finite samples")
    ratios = np.array([ours / theirs for ours, theirs in pairs])
    rounds = len(ratios)
    point = float(np.median(ratios))
    if rounds == 1:
        return Interval(point, 0.0, math.inf)
    t = _t_quantile((1 + confidence) / 2, rounds - 1)
    if rounds < FEWEST_TO_RESAMPLE:
        logs = np.log(ratios)
        reach = t * logs.std(ddof=1) / math.sqrt(rounds)
        low, high = np.exp([logs.mean() - reach, logs.mean() + reach])
    else:
        level = NormalDist().cdf(-math.sqrt(rounds / (rounds - 1)) * t)
        picks = np.random.default_rng(seed).integers(rounds, size=(RESAMPLES, rounds))
        medians = np.median(ratios[picks], axis=1)
        low, high = np.quantile(medians, [level, 1 - level])
    return Interval(point, min(float(low), point), max(float(high), point))


def _t_quantile(p: float, df: int) -> float:
    """The `p` quantile (0.5 < p < 1) of Student's t with `df` degrees of freedom."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _t_within(middle, df) < 2 * p - 1:
            low = middle
        else:
            high = middle
    return math.sqrt(df) * math.tan(low)


def _t_within(theta: float, df: int) -> float:
    """P(|T| < √df · tan θ): the finite sums 26.7.3 and 26.7.4 of Abramowitz & Stegun."""
    odd = df % 2
    cosine = math.cos(theta)
    term = cosine if odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(2 + odd, df - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    total *= math.sin(theta)
    return 2 / math.pi * (theta + total) if odd else total


# A broken recipe gives infinite losses; they are a result to report, not a reason to warn.
@np.errstate(over="ignore", invalid="ignore")
def mean_se(values: ArrayLike) -> Estimate:
    """The mean and its standard error (None for a single value)."""
    array = np.asarray(values, dtype=np.float64)
    se = float(array.std(ddof=1) / math.sqrt(array.size)) if array.size > 1 else None
    return Estimate(float(array.mean()), se)


@np.errstate(over="ignore", invalid="ignore")
def perplexity(nll: ArrayLike) -> Estimate:
    """exp of the mean negative log-likelihood; standard error by the delta method."""
    mean = mean_se(nll)
    value = float(np.exp(mean.value))
    return Estimate(value, None if mean.se is None else value * mean.se)


@np.errstate(invalid="ignore")
def perplexity_ratio(nll_recipe: ArrayLike, nll_base: ArrayLike) -> Estimate:
    """Recipe's perplexity over the baseline's on the same tokens, paired (1: unchanged)."""
    recipe = np.asarray(nll_recipe, dtype=np.float64)
    return perplexity(recipe - np.asarray(nll_base, dtype=np.float64))


def token_quality(
    logp_base: ArrayLike, logp_recipe: ArrayLike, kld: ArrayLike, same_top: ArrayLike
) -> dict[str, Estimate]:
    """Quality over tokens, each figure with the meaning that llama-perplexity gives it.

    `logp_*` are log-probabilities of the true token, `kld` is KL(baseline ‖ recipe) per token,
    `same_top` says whether both rank the same token first. Of the result, `same_top` and `rms_dp`
    (root mean square difference in probability of the true token) are shares, 0 … 1.
    """
    base = np.asarray(logp_base, dtype=np.float64)
    recipe = np.asarray(logp_recipe, dtype=np.float64)
    return {
        "ppl": perplexity(-recipe),
        "ppl_ratio": perplexity_ratio(-recipe, -base),
        "kld": mean_se(kld),
        "kld_p99": Estimate(float(np.percentile(np.asarray(kld, dtype=np.float64), 99))),
        "same_top": mean_se(same_top),
        "rms_dp": _root(mean_se((np.exp(recipe) - np.exp(base)) ** 2)),
    }


def _root(square: Estimate) -> Estimate:
    """The square root of an estimate; standard error by the delta method."""
    root = math.sqrt(square.value)
    if square.se is None:
        return Estimate(root)
    return Estimate(root, square.se / (2 * root) if root else 0.0)
