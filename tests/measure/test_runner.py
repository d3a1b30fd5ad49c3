"""Rows that fail, children that die, time that runs out: the rest goes on, and says what it is."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from featherweight import machine
from featherweight.measure import pace, runner
from featherweight.measure.compare import compare
from featherweight.measure.result import Report

pytestmark = pytest.mark.timeout(400)  # a child process takes seconds to import its libraries

SHORT = {"prompt_tokens": 16, "new_tokens": 4, "runs": 2, "quality_tokens": 512, "threads": 1}
NOTHING = "bnb-nf4:skip=*"  # leaves nothing to convert


def workers() -> list[psutil.Process]:
    """The child processes of a comparison that runs in this process, the baseline's first."""
    children = psutil.Process().children()
    found = [c for c in children if "featherweight.measure.worker" in c.cmdline()]
    return sorted(found, key=lambda child: child.create_time())


class At:
    """A progress callback that does things as certain steps begin."""

    def __init__(self, actions: dict[str, Callable[[], None]]) -> None:
        self.steps: list[str] = []
        self._actions = actions

    def __call__(self, doing: str, left: float | None) -> None:
        self.steps.append(doing)
        if action := self._actions.get(doing):
            action()


def kill(which: int) -> Callable[[], None]:
    return lambda: os.kill(workers()[which].pid, signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the budget believe that much time has passed."""
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(pace, "time", clock)
    machine.probe()  # takes its time on a new machine
    return lambda: passed.__setitem__(0, 1e6)


def samples(report: Report) -> list[int]:
    return [len(row.figures["tg4"].samples) if row.figures else 0 for row in report.rows]


def test_a_baseline_that_fails_lets_others_be_measured(tiny_llama: Path) -> None:
    alive: list[int] = []
    progress = At({"2/2 bf16: memory": lambda: alive.append(len(workers()))})
    report = compare(str(tiny_llama), [NOTHING, "bf16"], **SHORT, max_kld=1.0, progress=progress)
    assert alive == [1]
    baseline, other = report.rows
    assert baseline.status == "failed"
    assert baseline.reason
    assert other.status == "ok"
    assert samples(report) == [0, 2]
    assert other.figures["tg4"].ratio is None
    assert other.quality == {}
    assert report.gates == ["bf16: KLD was not measured, so that --max-kld 1 is not shown"]
    assert report.complete


def test_a_baseline_killed_before_its_quality_lets_others_be_measured(tiny_llama: Path) -> None:
    report = compare(
        str(tiny_llama), ["fp32", "bf16"], **SHORT, progress=At({"1/2 fp32: quality": kill(0)})
    )
    baseline, other = report.rows
    assert baseline.status == "partial"
    assert "killed by the system" in (baseline.reason or "")
    assert baseline.weights
    assert (other.status, other.reason) == ("ok", None)
    assert other.receipt
    assert "verified" in other.receipt
    assert other.quality == {}
    assert samples(report) == [0, 2]
    assert not report.complete


def test_children_that_are_killed_are_rows_with_reasons(tiny_llama: Path) -> None:
    progress = At({"2/4 bf16: quality": kill(-1), "3/4 bf16: round 2 of 2": kill(0)})
    report = compare(str(tiny_llama), ["fp32", "bf16", "bf16", "bf16"], **SHORT, progress=progress)
    baseline, killed, beside, alone = report.rows
    assert (killed.status, killed.figures) == ("partial", {})
    assert "killed by the system" in (killed.reason or "")
    assert killed.weights
    assert killed.run_memory
    assert baseline.status == "partial"
    assert "killed by the system" in (baseline.reason or "")
    assert (beside.status, alone.status) == ("ok", "ok")
    assert samples(report) == [1, 0, 2, 2]
    assert beside.figures["tg4"].rounds == 1  # the pair that was measured
    assert alone.figures["tg4"].ratio is None
    assert alone.quality == beside.quality
    assert alone.quality["kld"].value > 0
    assert not report.complete
    assert workers() == []


def test_ctrl_c_keeps_what_was_measured(tiny_llama: Path) -> None:
    report = compare(
        str(tiny_llama),
        ["fp32", "bf16", "bf16"],
        **SHORT,
        progress=At({"2/3 bf16: round 2 of 2": interrupt}),
    )
    assert report.interrupted
    assert not report.complete
    assert [row.recipe for row in report.rows] == ["fp32", "bf16"]
    assert samples(report) == [1, 1]
    baseline, stopped = report.rows
    assert baseline.status == "ok"
    assert (stopped.status, stopped.reason) == ("partial", "interrupted")
    assert stopped.figures["tg4"].ratio
    assert stopped.quality
    assert workers() == []


def test_ctrl_c_while_loading_is_not_complete(tiny_llama: Path) -> None:
    report = compare(str(tiny_llama), ["fp32"], **SHORT, progress=At({"fp32: loading": interrupt}))
    assert report.interrupted
    assert not report.complete
    assert [(row.status, row.reason) for row in report.rows] == [("failed", "interrupted")]


def test_what_does_not_fit_into_the_budget_is_cut_and_flagged(
    tiny_llama: Path, later: Callable[[], None]
) -> None:
    report = compare(
        str(tiny_llama),
        ["fp32", "bf16", "bf16"],
        prompt_tokens=64,
        new_tokens=16,
        runs=2,
        quality_tokens=1024,
        budget_s=10_000,
        progress=At({"2/3 bf16: memory": later}),
    )
    baseline, cut, late = report.rows
    for row in (baseline, cut):
        assert row.status == "ok"
        assert row.figures["pp64"].tokens == 32 < row.figures["pp64"].asked
        assert row.figures["tg16"].tokens == 8 < row.figures["tg16"].asked
        assert len(row.figures["gen"].samples) == 1
    assert "1 of 2 rounds, to keep within the budget" in cut.notes
    assert "quality on 256 of 512 tokens, to keep within the budget" in cut.notes
    assert cut.quality["kld"].value > 0
    assert late.status == "failed"
    assert "no time was left" in (late.reason or "")
    assert not report.complete


def test_a_baseline_alone_is_cut_and_flagged(tiny_llama: Path, later: Callable[[], None]) -> None:
    report = compare(
        str(tiny_llama),
        ["fp32"],
        **SHORT | {"new_tokens": 16},
        budget_s=10_000,
        progress=At({"fp32: quality": later}),
    )
    figure = report.rows[0].figures["tg16"]
    assert (figure.tokens, figure.asked, len(figure.samples)) == (8, 16, 1)
    assert not report.complete


def test_where_memory_holds_one_model_the_baseline_goes_first(
    tiny_llama: Path, later: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "memory_for_two", lambda parameters, device: False)
    alive: list[int] = []

    def hurry() -> None:
        alive.append(len(workers()))
        later()

    progress = At({"2/2 bf16: memory": hurry})
    report = compare(
        str(tiny_llama),
        ["fp32", "bf16"],
        **SHORT | {"quality_tokens": 256},
        budget_s=10_000,
        progress=progress,
    )
    baseline, other = report.rows
    assert alive == [1]
    assert any("memory does not hold two such models" in note for note in baseline.notes)
    assert samples(report) == [2, 1]
    assert other.figures["tg4"].rounds == 1
    assert other.figures["tg4"].ratio
    assert not any("quality" in note for note in other.notes)  # no more than asked for
    order = [step for step in progress.steps if "round" in step or "loading" in step]
    assert order == [
        "1/2 fp32: loading",
        "fp32: round 1 of 2",
        "fp32: round 2 of 2",
        "2/2 bf16: loading",
        "2/2 bf16: round 1 of 1",
    ]


def test_memory_for_two_asks_for_room_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(memory_available=10_000)
    monkeypatch.setattr(machine, "describe", lambda: free)
    for device in (None, "cpu"):
        assert runner.memory_for_two(2000, device)
        assert not runner.memory_for_two(2100, device)
