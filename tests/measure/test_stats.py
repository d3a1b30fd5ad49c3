"""Worked values, properties that must hold for any samples, and simulated coverage."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from featherweight.measure import stats
from featherweight.measure.result import Estimate

rates = st.floats(min_value=0.01, max_value=1e5)
rounds = st.lists(st.tuples(rates, rates), min_size=1, max_size=12)
few_examples = settings(max_examples=40, deadline=None)  # each draws 10,000 resamples


def test_figure_is_median_and_sample_deviation():
    figure = stats.figure([10, 14, 12], "t/s", tokens=64, asked=64)
    assert (figure.value, figure.sd, figure.samples) == (12, 2, [10.0, 14.0, 12.0])
    assert (figure.unit, figure.tokens, figure.asked, figure.ratio) == ("t/s", 64, 64, None)


def test_figure_of_one_sample_has_no_deviation():
    assert math.isnan(stats.figure([3.0], "s", 1, 1).sd)


def test_noise_beyond_a_tenth():
    quiet = {"a": stats.figure([100, 105, 95], "t/s", 1, 1), "b": stats.figure([100], "t/s", 1, 1)}
    assert stats.noise(quiet) == []
    (line,) = stats.noise(quiet | {"tg64": stats.figure([80, 100, 120], "t/s", 1, 1)})
    assert line.startswith("noisy: tg64 by 20% (one standard deviation)")


# Printed tables of Student's t: (p, degrees of freedom, quantile).
@pytest.mark.parametrize(
    ("p", "df", "expected"),
    [
        (0.975, 1, 12.706),
        (0.975, 2, 4.303),
        (0.975, 3, 3.182),
        (0.975, 4, 2.776),
        (0.975, 9, 2.262),
        (0.975, 30, 2.042),
        (0.95, 4, 2.132),
        (0.995, 1, 63.657),
        (0.975, 1000, 1.962),
    ],
)
def test_t_quantile_as_tabulated(p, df, expected):
    assert stats._t_quantile(p, df) == pytest.approx(expected, abs=6e-4)


def test_ratio_pairs_rounds():
    # The second round was half as fast for both: no spread is left in the ratios.
    interval = stats.paired_ratio([20, 10, 20, 20, 20, 20], [10, 5, 10, 10, 10, 10])
    assert (interval.value, interval.low, interval.high) == (2, 2, 2)


def test_ratio_of_six_rounds_spans_the_range():
    # Level Φ(−√(6/5) · 2.571) ≈ 0.0024: fewer of the resamples have a smaller median than this.
    interval = stats.paired_ratio([1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [1] * 6)
    assert interval.value == pytest.approx(1.25)
    assert (interval.low, interval.high) == (1.0, 1.5)


def test_ratio_of_five_rounds_is_students():
    interval = stats.paired_ratio([math.exp(log) for log in (-2, -1, 0, 1, 2)], [1] * 5)
    # Mean log 0, standard error √(2.5 / 5), t 2.776.
    assert interval.value == 1
    assert math.log(interval.low) == pytest.approx(-2.776 * math.sqrt(0.5), abs=1e-3)
    assert math.log(interval.high) == pytest.approx(2.776 * math.sqrt(0.5), abs=1e-3)


def test_ratio_of_two_rounds_is_wider_than_its_samples():
    interval = stats.paired_ratio([1.0, math.e], [1, 1])
    # Mean log ½, standard error ½, t 12.706.
    assert math.log(interval.low) == pytest.approx(0.5 - 6.353, abs=1e-3)
    assert math.log(interval.high) == pytest.approx(0.5 + 6.353, abs=1e-3)


def test_ratio_of_one_round_is_open():
    interval = stats.paired_ratio([3.0], [2.0])
    assert (interval.value, interval.low, interval.high) == (1.5, 0.0, math.inf)


def test_ratio_leaves_out_an_outlier_when_rounds_are_many():
    noisy = [1.0, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07, 1.08, 50.0, 1.02, 1.04]
    assert stats.paired_ratio(noisy, [1.0] * 12).high < 1.1


@pytest.mark.parametrize(
    ("recipe", "baseline"), [([], []), ([0.0], [1.0]), ([1.0], [0.0]), ([math.inf], [1.0])]
)
def test_ratio_refuses_what_it_cannot_pair(recipe, baseline):
    with pytest.raises(ValueError, match="positive, finite samples"):
        stats.paired_ratio(recipe, baseline)


def test_ratio_refuses_rounds_without_a_partner():
    with pytest.raises(ValueError, match="shorter"):
        stats.paired_ratio([1.0, 2.0], [1.0])


@few_examples
@given(rounds, st.sampled_from([0.5, 0.8, 0.95, 0.99]))
def test_interval_contains_its_point(pairs, confidence):
    interval = stats.paired_ratio(*zip(*pairs, strict=True), confidence=confidence)
    assert 0 <= interval.low <= interval.value <= interval.high


@few_examples
@given(rounds)
def test_interval_widens_with_confidence_and_repeats_with_the_seed(pairs):
    recipe, baseline = zip(*pairs, strict=True)
    narrow = stats.paired_ratio(recipe, baseline, confidence=0.8)
    wide = stats.paired_ratio(recipe, baseline)
    assert wide == stats.paired_ratio(recipe, baseline)
    assert wide.low <= narrow.low
    assert narrow.high <= wide.high


@few_examples
@given(rounds, st.sampled_from([0.25, 2.0, 1024.0]))
def test_scaling_the_recipe_scales_the_interval(pairs, factor):
    recipe, baseline = zip(*pairs, strict=True)
    plain = stats.paired_ratio(recipe, baseline)
    scaled = stats.paired_ratio([factor * rate for rate in recipe], baseline)
    for name in ("value", "low", "high"):
        assert getattr(scaled, name) == pytest.approx(factor * getattr(plain, name), rel=1e-9)


@few_examples
@given(rounds, st.data())
def test_a_faster_recipe_has_no_smaller_ratio(pairs, data):
    recipe, baseline = zip(*pairs, strict=True)
    gains = data.draw(
        st.lists(st.floats(1, 4), min_size=len(pairs), max_size=len(pairs)), label="gains"
    )
    faster = [rate * gain for rate, gain in zip(recipe, gains, strict=True)]
    assert stats.paired_ratio(faster, baseline).value >= stats.paired_ratio(recipe, baseline).value


@pytest.mark.parametrize("count", [3, 5, 8])
def test_interval_covers_the_true_ratio(count):
    """Log-normal noise: 5 % of each sample, 20 % shared by a round; true median ratio 1.3."""
    rng = np.random.default_rng(20)
    trials, covered = 400, 0
    for _ in range(trials):
        shared = rng.lognormal(0, 0.2, count)
        baseline = 10 * shared * rng.lognormal(0, 0.05, count)
        recipe = 13 * shared * rng.lognormal(0, 0.05, count)
        interval = stats.paired_ratio(recipe.tolist(), baseline.tolist())
        covered += interval.low <= 1.3 <= interval.high
    assert covered / trials >= 0.90


def test_mean_and_its_standard_error():
    assert stats.mean_se([1, 2, 3, 4]) == Estimate(2.5, pytest.approx(math.sqrt(5 / 3 / 4)))
    assert stats.mean_se([7.0]) == Estimate(7.0, None)


def test_perplexity_by_hand():
    estimate = stats.perplexity([math.log(2), math.log(8)])
    assert estimate.value == pytest.approx(4)
    # The mean's standard error is ln 2 (sample deviation ln 8 − ln 4 times √2, over √2).
    assert estimate.se == pytest.approx(4 * math.log(2))


def test_perplexity_of_broken_logits_is_infinite_without_a_warning():
    assert stats.perplexity([1000.0, 1000.0]).value == math.inf
    assert stats.perplexity([math.inf, 1.0]).value == math.inf


def test_perplexity_ratio_is_paired():
    base = np.array([0.1, 5.0, 2.0, 9.0])
    estimate = stats.perplexity_ratio(base + math.log(1.1), base)
    assert estimate.value == pytest.approx(1.1)
    assert estimate.se == pytest.approx(0, abs=1e-12)


def test_token_quality_by_hand():
    quality = stats.token_quality(
        logp_base=np.log([0.5, 0.5, 0.5, 0.5]),
        logp_recipe=np.log([0.4, 0.6, 0.5, 0.5]),
        kld=[0.0, 0.1, 0.2, 0.3],
        same_top=[True, True, False, True],
    )
    assert list(quality) == ["ppl", "ppl_ratio", "kld", "kld_p99", "same_top", "rms_dp"]
    assert quality["ppl"].value == pytest.approx((0.4 * 0.6 * 0.25) ** -0.25)
    assert quality["ppl_ratio"].value == pytest.approx((0.0625 / 0.06) ** 0.25)
    assert quality["kld"].value == pytest.approx(0.15)
    assert quality["kld_p99"] == Estimate(pytest.approx(0.297), None)
    # llama-perplexity: √(p (1 − p) / (n − 1)).
    assert quality["same_top"] == Estimate(0.75, pytest.approx(math.sqrt(0.75 * 0.25 / 3)))
    # Squares 0.01, 0.01, 0, 0: mean 0.005, standard error 0.005 / √3.
    assert quality["rms_dp"].value == pytest.approx(math.sqrt(0.005))
    assert quality["rms_dp"].se == pytest.approx(0.005 / math.sqrt(3) / (2 * math.sqrt(0.005)))


def test_token_quality_of_the_baseline_itself():
    logp = np.log([0.2, 0.9])
    quality = stats.token_quality(logp, logp, [0, 0], [True, True])
    assert quality["ppl_ratio"] == Estimate(1.0, 0.0)
    assert quality["kld"] == quality["rms_dp"] == Estimate(0.0, 0.0)
    assert quality["same_top"] == Estimate(1.0, 0.0)


def test_delta_method_agrees_with_repeated_draws():
    rng = np.random.default_rng(3)
    draws = [stats.perplexity(rng.gamma(2.0, 1.0, 400)) for _ in range(300)]
    spread = np.std([draw.value for draw in draws])
    assert np.mean([draw.se for draw in draws]) == pytest.approx(spread, rel=0.15)
