"""Figures from rounds made by hand."""

from __future__ import annotations

import pytest

from featherweight.measure.figures import Round, figures
from featherweight.measure.workload import Workload

WORK = Workload(100, 11, (1,))


def decoded(
    work: Workload, prefill: float, decode: float, first: float, rest: float, batch: int = 1
) -> Round:
    seconds = {"prefill": prefill, "decode": decode, "first": first, "generate": rest}
    return Round(work, {f"{batch} {part}": value for part, value in seconds.items()})


def test_values_are_medians_of_tokens_a_second() -> None:
    rounds = [decoded(WORK, t, 2 * t, 3 * t, 4 * t) for t in (1.0, 0.5, 0.1)]
    found = figures(WORK, rounds, [])
    assert list(found) == ["pp100", "tg11", "gen", "ttft"]
    assert found["pp100"].samples == [100, 200, 1000]
    assert found["pp100"].value == 200
    assert found["tg11"].value == 11
    assert found["gen"].value == 5  # ten steps after the first token, in two seconds
    assert (found["ttft"].value, found["ttft"].unit) == (1.5, "s")
    assert all(figure.ratio is None for figure in found.values())
    assert all(figure.tokens == figure.asked for figure in found.values())


def test_ratios_above_one_are_faster_also_for_the_first_token() -> None:
    ours = [decoded(WORK, 1.0, 1.0, 1.0, 1.0)] * 2
    theirs = [decoded(WORK, 2.0, 0.5, 4.0, 1.0)] * 2
    found = figures(WORK, ours, theirs)
    ratios = {name: figure.ratio.value for name, figure in found.items() if figure.ratio}
    assert ratios == pytest.approx({"pp100": 2, "tg11": 0.5, "ttft": 4, "gen": 1})
    assert {figure.rounds for figure in found.values()} == {2}


def test_only_the_longest_rounds_count_and_pair_with_equal_ones() -> None:
    short = WORK.shorter(50, 11)
    ours = [decoded(w, 1.0, 1.0, 1.0, 1.0) for w in (short, WORK, WORK)]
    theirs = [decoded(w, 2.0, 2.0, 2.0, 2.0) for w in (short, short, WORK)]
    found = figures(WORK, ours, theirs)
    assert found["pp100"].samples == [100, 100]
    assert found["pp100"].rounds == 1
    assert found["tg11"].samples == [11, 11, 11]
    assert found["tg11"].rounds == 3


def test_rounds_that_the_baseline_missed_make_no_pair() -> None:
    found = figures(WORK, [decoded(WORK, 1, 1, 1, 1)] * 3, [decoded(WORK, 2, 2, 2, 2)])
    assert found["pp100"].rounds == 1
    assert len(found["pp100"].samples) == 3


def test_what_was_cut_short_says_so() -> None:
    found = figures(WORK, [decoded(WORK.shorter(50, 8), 1, 1, 1, 1)], [])
    assert {name: (f.tokens, f.asked) for name, f in found.items()} == {
        "pp100": (50, 100),
        "ttft": (50, 100),
        "tg11": (8, 11),
        "gen": (8, 11),
    }


def test_batches_are_rates_of_all_sequences_together() -> None:
    work = Workload(100, 11, (1, 4))
    both = decoded(work, 1, 1, 1, 1).seconds | decoded(work, 1, 1, 1, 1, batch=4).seconds
    found = figures(work, [Round(work, both)], [])
    assert found["pp100@b4"].value == 400
    assert found["tg11@b4"].value == 44
    assert found["gen@b4"].value == 40
    assert found["ttft@b4"].value == 1
    assert found["pp100"].value == 100


def test_an_encoder_is_tokens_of_all_texts_a_second() -> None:
    work = Workload(batch_sizes=(16, 32))
    ours = Round(work, {"16 encode": 2.0, "16 tokens": 900, "32 encode": 1.0, "32 tokens": 900})
    theirs = Round(work, {"16 encode": 3.0, "16 tokens": 900, "32 encode": 1.0, "32 tokens": 900})
    found = figures(work, [ours], [theirs])
    assert list(found) == ["encode@b16", "encode@b32"]
    assert found["encode@b16"].value == 450
    assert found["encode@b16"].ratio
    assert found["encode@b16"].ratio.value == 1.5
    assert found["encode@b32"].value == 900


def test_no_rounds_make_no_figures() -> None:
    assert figures(WORK, [], []) == {}
