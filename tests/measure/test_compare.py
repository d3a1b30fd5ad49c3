"""`compare` on the tiny Llama: what a report holds, and what is refused before anything runs."""

from __future__ import annotations

import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from featherweight import machine
from featherweight.errors import FeatherweightError, RecipeError
from featherweight.measure.compare import _first_difference, compare, default_recipes
from featherweight.measure.result import SCHEMA, Report
from featherweight.measure.side import Request
from featherweight.models import Loaded
from featherweight.rates import Rate, Rates

pytestmark = pytest.mark.timeout(400)  # a child process takes seconds to import its libraries

P, N, RUNS = 16, 4, 2
PROMPTS = ['"The assert statement is"', '{"prompt": "A class is"}']
RATE = Rate.of([10.0, 10.0], "GB/s")
RATES = Rates("torch", "none", 1, {1: RATE}, RATE, None, 1 << 28)
bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")


@pytest.fixture(scope="module")
def report(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """fp32 against itself and others, the last of which leaves nothing to convert."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    prompts.write_text("\n".join(PROMPTS))
    return compare(
        str(tiny_llama),
        ["fp32", "fp32", "bf16", "bnb-int8", "bnb-nf4:skip=*"],
        prompt_tokens=P,
        new_tokens=N,
        runs=RUNS,
        threads=1,
        quality_tokens=512,
        prompts=prompts,
        max_kld=1e-6,
        max_ppl_ratio=100,
    )


@pytest.fixture
def rows(report: Report) -> dict[str, Any]:
    """JSON rows of the recipes, the second fp32 as "again"."""
    data = json.loads(json.dumps(report.to_json()))["rows"]
    names = ["fp32", "again", "bf16", "int8", "nothing"]
    return dict(zip(names, data, strict=True))


def test_the_report_says_what_was_measured_and_on_what(report: Report, tiny_llama: Path) -> None:
    data = report.to_json()
    assert data["schema"] == SCHEMA
    assert data["model"]["name"] == str(tiny_llama)
    assert data["model"]["architecture"] == "LlamaForCausalLM"
    assert data["settings"]["threads"] == 1
    assert data["settings"]["batch_sizes"] == [1]
    assert data["settings"]["quality"] == {"windows": 2, "context": 256, "scored_tokens": 256}
    assert data["settings"]["text"]["sha256"]
    assert data["machine"]["rates"]["bandwidth"]
    assert {"featherweight", "python", "torch", "transformers"} <= set(data["versions"])
    assert data["elapsed_s"] > 0
    assert not data["interrupted"]


def test_every_row_has_its_figures(rows: dict[str, Any]) -> None:
    for name in ("fp32", "again", "bf16"):
        row = rows[name]
        assert row["status"] == "ok"
        for key, tokens in (("pp16", P), ("tg4", N), ("gen", N), ("ttft", P)):
            assert row[key]["value"] > 0
            assert row[key]["tokens"] == row[key]["asked"] == tokens
            assert row["baseline"] or len(row[key]["samples"]) == RUNS
            assert row["baseline"] == (row[key]["ratio"] is None)
        assert row["load_s"] > 0
        assert row["load_memory"]["total"] > 0
        assert row["run_memory"]["total"] > 0
        assert row["bandwidth_share"] > 0
        assert row["verdict"]
    assert len(rows["fp32"]["tg4"]["samples"]) >= 2 * RUNS  # beside each of the others


def test_weights_are_exact_and_a_tied_head_counts_once(rows: dict[str, Any], llama: Loaded) -> None:
    weights = sum(p.numel() for p in llama.model.parameters())
    rotary = sum(b.nbytes for b in llama.model.buffers())
    assert weights == 384 * 64 + 2 * (64 * 64 * 3 + 3 * 64 * 128 + 2 * 64) + 64
    assert rows["fp32"]["weights"] == 4 * weights + rotary
    assert rows["bf16"]["weights"] == 2 * weights + rotary
    assert rows["fp32"]["weights_mapped"] == 4 * weights
    assert rows["bf16"]["weights_mapped"] == 0


def test_the_cache_is_exact(rows: dict[str, Any]) -> None:
    layers, heads, size = 2, 2, 16
    elements = 2 * layers * heads * size * (P + N)
    assert rows["fp32"]["kv_cache"] == 4 * elements
    assert rows["bf16"]["kv_cache"] == 2 * elements


def test_a_step_reads_the_weights_and_half_of_what_it_writes(rows: dict[str, Any]) -> None:
    row = rows["fp32"]
    cache = row["kv_cache"] / (P + N) * N / 2
    assert row["bytes_per_token"] == int(row["weights"] + cache)


def test_receipts_say_what_was_done_and_that_it_holds(rows: dict[str, Any]) -> None:
    receipt = rows["bf16"]["receipt"]
    assert receipt["actual"]["dtype"] == "bfloat16"
    assert set(receipt["verified"]) == {"left", "right"}
    assert max(receipt["verified"].values()) < 0.1
    assert rows["fp32"]["receipt"]["verified"] is None


def test_a_model_against_itself_is_no_different(rows: dict[str, Any]) -> None:
    again = rows["again"]
    assert 0 <= again["kld"]["value"] < 1e-6
    assert again["same_top"]["value"] == 1
    assert again["ppl_ratio"]["value"] == 1
    assert again["ppl"] == rows["fp32"]["ppl"]
    assert again["receipt"]["verified"] == {"left": 0, "right": 0}


def test_another_dtype_is_a_little_off(rows: dict[str, Any]) -> None:
    keys = {"ppl", "ppl_ratio", "kld", "kld_p99", "same_top", "rms_dp"}
    assert keys <= set(rows["bf16"])
    assert 1e-5 < rows["bf16"]["kld"]["value"] < 1e-2


@bitsandbytes
def test_int8_is_smaller_and_a_little_off(rows: dict[str, Any]) -> None:
    assert rows["int8"]["status"] == "ok"
    assert rows["int8"]["weights"] < rows["bf16"]["weights"]
    assert rows["int8"]["kld"]["value"] > rows["bf16"]["kld"]["value"]
    assert rows["int8"]["notes"]


def test_a_recipe_that_fails_is_a_row_with_a_reason(rows: dict[str, Any]) -> None:
    row = rows["nothing"]
    assert row["status"] == "failed"
    assert row["reason"]
    assert "\n" not in row["reason"]
    assert row["weights"] is None
    assert "pp16" not in row


def test_outputs_stand_side_by_side(report: Report, rows: dict[str, Any]) -> None:
    assert report.prompts == ["The assert statement is", "A class is"]
    for name in ("fp32", "again"):
        assert len(rows[name]["outputs"]) == 2
        assert all(out["first_difference"] is None for out in rows[name]["outputs"])
        assert all(0 < out["tokens"] <= N for out in rows[name]["outputs"])
    assert rows["again"]["outputs"] == rows["fp32"]["outputs"]
    assert rows["nothing"]["outputs"] is None


def test_gates_name_what_broke_them(report: Report) -> None:
    assert len(report.gates) >= 2
    assert all("KLD" in gate or "PPL ratio was not" in gate for gate in report.gates)
    assert any(gate.startswith("bf16: KLD") and "--max-kld 1e-06" in gate for gate in report.gates)
    assert any("nf4" in gate and "was not measured" in gate for gate in report.gates)
    assert not any(gate.startswith("fp32") for gate in report.gates)


def test_the_report_prints_itself(report: Report) -> None:
    assert "bf16" in str(report)


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([], [1], 0), ([], [], None)],
)
def test_first_difference_counts_the_tokens_before_it(mine, theirs, expected) -> None:
    assert _first_difference(mine, theirs) == expected


def test_default_recipes_are_other_than_the_checkpoint() -> None:
    assert default_recipes("float32")[0] == "bf16"
    assert default_recipes("bfloat16")[0] == "fp32"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"recipes": ["fp33"]}, "unknown technique 'fp33'"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0; give 1 or more"),
        ({"new_tokens": 1}, "new_tokens is 1; give 2 or more"),
        ({"runs": 0}, "runs is 0"),
        ({"batch_sizes": (1, 0)}, "batch_sizes"),
        ({"threads": 0}, "threads is 0"),
        ({"quality_tokens": -1}, "quality_tokens is -1"),
        ({"budget_s": 0}, "the budget is 0"),
        ({"text": "no-such-file"}, "cannot be read"),
        ({"prompts": "no-such-file"}, "cannot be read"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(settings: dict[str, Any], says: str) -> None:
    steps: list[str] = []
    with pytest.raises(FeatherweightError, match=says):
        compare("no-such-model", **settings, progress=lambda doing, left: steps.append(doing))
    assert steps == []


@pytest.mark.parametrize("recipes", [["fp32"], "fp32"], ids=["list", "string"])
@pytest.mark.parametrize("gate", ["max_kld", "max_ppl_ratio"])
def test_a_gate_without_a_recipe_to_hold_is_refused(recipes: Any, gate: str) -> None:
    steps: list[str] = []
    says = "a gate compares recipes with a baseline, and only 'fp32' is named; name the baseline"
    with pytest.raises(FeatherweightError, match=says):
        compare(
            "no-such-model",
            recipes,
            **{gate: 1.0},
            progress=lambda doing, left: steps.append(doing),
        )
    assert steps == []


def test_finding_the_model_costs_no_budget(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    asked: list[Request] = []

    def runner(request: Request, *rest: Any) -> Any:
        asked.append(request)
        raise Stop

    said: list[tuple[str, float | None]] = []
    module = importlib.import_module("featherweight.measure.compare")
    monkeypatch.setattr(module, "Runner", runner)
    monkeypatch.setattr(module, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(machine, "probe", lambda: RATES)
    with pytest.raises(Stop):
        compare(str(tiny_llama), "bf16", budget_s=5, progress=lambda *step: said.append(step))
    assert asked[0].seconds == 5
    assert [left for _, left in said] == [None, None]


def test_bad_recipes_are_named_as_such() -> None:
    with pytest.raises(RecipeError):
        compare("no-such-model", ["fp32", "nothing"])
