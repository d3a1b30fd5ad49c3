"""What is cut, and in which order, to fit into the time that is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from featherweight.measure.plan import (
    FEW_ROUNDS,
    LEAST_NEW,
    LEAST_PROMPT,
    PART,
    plan,
    round_seconds,
)
from featherweight.measure.workload import Workload

SECONDS = st.floats(1e-4, 10)
WORK = st.builds(
    Workload,
    st.integers(1, 4096),
    st.integers(2, 512),
    st.lists(st.integers(1, 64), min_size=1, max_size=3, unique=True).map(tuple),
)


@st.composite
def decoders(draw: st.DrawFn) -> tuple[Workload, list[dict[str, dict[str, float]]]]:
    work = draw(WORK)
    part = st.fixed_dictionaries({"prefill": SECONDS, "token": SECONDS})
    side = st.fixed_dictionaries({str(batch): part for batch in work.batch_sizes})
    return work, draw(st.lists(side, min_size=1, max_size=2))


@given(decoders(), st.integers(1, 30), st.floats(-10, 1e5))
def test_a_plan_fits_where_it_can_and_asks_for_no_more(asked, runs, seconds) -> None:
    work, sides = asked
    found = plan(work, runs, sides, seconds)
    assert 1 <= found.rounds <= runs
    assert found.workload.prompt_tokens <= work.prompt_tokens
    assert found.workload.new_tokens <= work.new_tokens
    assert found.workload.batch_sizes == work.batch_sizes
    cost = sum(round_seconds(found.workload, side, work) for side in sides)
    assert found.seconds == pytest.approx(found.rounds * cost)
    if found.rounds > 1:
        assert found.seconds <= PART * seconds * (1 + 1e-9)


@given(decoders(), st.integers(1, 30), st.floats(-10, 1e5))
def test_rounds_are_cut_first_then_new_tokens_then_the_prompt(asked, runs, seconds) -> None:
    work, sides = asked
    found = plan(work, runs, sides, seconds)
    least_new = min(work.new_tokens, LEAST_NEW)
    least_prompt = min(work.prompt_tokens, LEAST_PROMPT)
    if found.workload != work:
        fewest = min(runs, FEW_ROUNDS)
        assert fewest * sum(round_seconds(work, side, work) for side in sides) > PART * seconds
    if found.workload.prompt_tokens < work.prompt_tokens:
        assert found.workload.new_tokens == least_new
    if found.rounds < min(runs, FEW_ROUNDS):
        assert found.workload.new_tokens == least_new
        assert found.workload.prompt_tokens == least_prompt


@given(decoders(), st.integers(1, 30))
def test_without_a_limit_nothing_is_cut(asked, runs) -> None:
    work, sides = asked
    found = plan(work, runs, sides, None)
    assert (found.rounds, found.workload) == (runs, work)
    assert plan(work, runs, sides, found.seconds / PART * 1.001) == found


def test_each_part_is_run_alone_and_in_generate() -> None:
    work = Workload(100, 10, (1, 4))
    costs = {"1": {"prefill": 1.0, "token": 0.1}, "4": {"prefill": 3.0, "token": 0.2}}
    assert round_seconds(work, costs, work) == pytest.approx(2 * (1 + 1) + 2 * (3 + 2))
    half = work.shorter(50, 10)
    assert round_seconds(half, costs, work) == pytest.approx(2 * (0.5 + 1) + 2 * (1.5 + 2))


@pytest.mark.parametrize(("seconds", "rounds"), [(None, 9), (100, 9), (6, 5), (0.1, 1), (-3, 1)])
def test_an_encoder_has_only_rounds_to_cut(seconds: float | None, rounds: int) -> None:
    work = Workload(batch_sizes=(16,))
    found = plan(work, 9, [{"16": {"encode": 1.0}}], seconds)
    assert (found.rounds, found.workload) == (rounds, work)
