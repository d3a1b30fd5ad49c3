"""Time left, with a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from featherweight.measure import pace


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def said() -> list[tuple[str, float | None]]:
    return []


def test_without_a_budget_nothing_is_known_until_a_plan_is(clock, said):
    timer = pace.Pace(None, lambda doing, left: said.append((doing, left)))
    timer.begin("1/3 fp32", 2)
    timer.say("loading")
    clock.now += 10
    timer.expect(20)  # done at 130, 30 s after it began; two more like it
    timer.say("round 1 of 5")
    assert said == [("1/3 fp32: loading", None), ("1/3 fp32: round 1 of 5", 20 + 2 * 30)]
    assert timer.left() is None
    assert timer.share() is None


def test_recipes_that_are_done_tell_what_others_will_take(clock, said):
    timer = pace.Pace(None, lambda doing, left: said.append((doing, left)))
    for seconds in (40, 20):
        timer.begin("done", 2)
        clock.now += seconds
        timer.finish()
    timer.begin("3/4 bf16", 1)
    clock.now += 5
    timer.say("memory")
    clock.now += 100  # later than thought
    timer.say("memory")
    assert [left for _, left in said] == [(30 - 5) + 30, 0 + 30]


def test_the_estimate_never_exceeds_the_budget(clock, said):
    timer = pace.Pace(50, lambda doing, left: said.append((doing, left)))
    timer.begin("1/5 fp32", 4)
    timer.say("loading")
    assert timer.share() == 10
    timer.expect(20)
    timer.say("round 1 of 5")
    clock.now += 60
    timer.say("round 2 of 5")
    assert [left for _, left in said] == [50, 50, 0]
    assert timer.left() == -10
