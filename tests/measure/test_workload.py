"""What is measured, and what its figures are called."""

from __future__ import annotations

import json

from featherweight.measure.workload import Workload


def test_json_round_trip() -> None:
    work = Workload(16, 4, (1, 8), 3)
    assert Workload.from_json(json.loads(json.dumps(work.to_json()))) == work


def test_figures_have_the_names_of_llama_bench_and_other_batches_than_one_a_mark() -> None:
    work = Workload(512, 64, (8, 1))
    one = {"prefill": "pp512", "decode": "tg64", "generate": "gen", "first": "ttft"}
    one["encode"] = "encode"
    assert work.keys(1) == one
    assert work.keys(8) == {part: f"{name}@b8" for part, name in one.items()}


def test_shorter_changes_tokens_alone() -> None:
    assert Workload(512, 64, (2,), 5).shorter(32, 8) == Workload(32, 8, (2,), 5)
