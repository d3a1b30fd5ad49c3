"""`featherweight compare` as a user runs it."""

from __future__ import annotations

import csv
import io
import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from featherweight.cli import compare as cli
from featherweight.measure.result import Report

pytestmark = pytest.mark.timeout(400)  # a child process takes seconds to import its libraries

SHORT = ("-p", 16, "-n", 4, "-r", 2, "--quality-tokens", 512, "--threads", 1)


@pytest.fixture(scope="module")
def done(
    tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path, tiny_bert: Path, run_all: Any
) -> dict[str, Any]:
    """Comparisons in every format, and everything that a user may get wrong."""
    folder = tmp_path_factory.mktemp("cli")
    silent = shutil.copytree(
        tiny_llama, folder / "silent", ignore=shutil.ignore_patterns("*token*")
    )
    cut = shutil.copytree(tiny_llama, folder / "cut")
    weights = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for name, content in {"empty": "", "bad.jsonl": "no json", "short": "too short"}.items():
        (folder / name).write_text(content)
    no_cache = {"FEATHERWEIGHT_CACHE": str(folder / "empty" / "cache")}
    debug = {"FEATHERWEIGHT_DEBUG": "1"}
    made = run_all(
        {
            "human": ("compare", tiny_llama, "fp32", "bf16", *SHORT, "--max-kld", "1e-9"),
            "csv": ("compare", tiny_bert, "fp32", "bf16", *SHORT, "--format", "csv"),
            "json": (
                *("compare", silent, *SHORT, "fp32", "--format", "json"),
                *("-o", folder / "made.json"),
            ),
            "md": ("compare", tiny_llama, "bnb-nf4:skip=*", *SHORT, "--format", "md"),
            "missing model": ("compare", folder / "none"),
            "debug": ("compare", cut, "fp32", debug),
            "truncated": ("compare", cut, "fp32"),
            "short text": ("compare", tiny_llama, *SHORT, "--text", folder / "short"),
            "cache": ("compare", tiny_llama, "fp32", no_cache),
            "recipe": ("compare", tiny_llama, "fp33"),
            "gate": ("compare", tiny_llama, "fp32", "--max-kld", 0),
            "text": ("compare", tiny_llama, "--text", folder / "empty"),
            "prompts": ("compare", tiny_llama, "--prompts", folder / "bad.jsonl"),
        }
    )
    return made | {"folder": folder}


def test_the_table_and_a_broken_gate(done: dict[str, Any]) -> None:
    human = done["human"]
    assert human.status == 1
    for word in ("fp32", "bf16", "pp16", "tg4", "KLD", "is above --max-kld 1e-09"):
        assert word in human.out
    assert "[0:0" in human.errors
    assert "2/2 bf16: round 2 of 2" in human.errors
    assert "\x1b" not in human.out + human.errors


def test_an_encoder_as_csv(done: dict[str, Any]) -> None:
    table = list(csv.DictReader(io.StringIO(done["csv"].out)))
    assert done["csv"].status == 0
    assert [row["recipe"] for row in table] == ["fp32", "bf16"]
    assert float(table[1]["encode@b16_ratio"]) > 0
    assert 0.99 < float(table[1]["cosine"]) < 1
    assert 0.5 < float(table[1]["neighbours"]) <= 1
    assert table[0]["cosine"] == table[0]["kv_cache"] == ""
    assert int(table[1]["weights"]) < int(table[0]["weights"])


def test_json_into_a_file_of_a_baseline_alone_without_tokenizer(done: dict[str, Any]) -> None:
    made, path = done["json"], done["folder"] / "made.json"
    assert (made.status, made.out) == (0, "")
    assert made.errors.splitlines()[-1] == f"written to {path}"
    row = json.loads(path.read_text())["rows"][0]
    assert row["pp16"]["value"] > 0
    assert row["notes"][0] == "the checkpoint has no tokenizer: quality was not measured"
    assert "ppl" not in row
    assert not list(path.parent.glob(".made*"))


def test_markdown_and_a_status_if_every_recipe_failed(done: dict[str, Any]) -> None:
    assert done["md"].status == 1
    assert "| recipe" in done["md"].out
    assert "(failed)" in done["md"].out


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing model", "no file or folder"),
        ("truncated", "truncated or damaged"),
        ("short text", "quality is measured on windows of 256"),
        ("cache", "set FEATHERWEIGHT_CACHE"),
        ("recipe", "unknown technique 'fp33'"),
        ("gate", "a gate compares recipes with a baseline"),
        ("text", "is empty"),
        ("prompts", "line 1 of"),
    ],
)
def test_what_cannot_be_measured_is_one_line(done: dict[str, Any], name: str, says: str) -> None:
    assert done[name].status == 2
    assert done[name].out == ""
    assert done[name].complaint.startswith("featherweight: ")
    assert says in done[name].complaint


def test_debug_gives_the_traceback_of_the_child_too(done: dict[str, Any]) -> None:
    assert done["debug"].status == 2
    assert "Traceback" in done["debug"].errors
    assert "read_checkpoint" in done["debug"].errors


@pytest.mark.parametrize("name", ["", "none/file", "file/below"])
def test_an_output_that_cannot_be_written_is_refused_up_front(
    name: str, tmp_path: Path, run: Callable[..., Any]
) -> None:
    (tmp_path / "file").touch()
    made = run("compare", "no-such-model", "-o", tmp_path / name)
    assert made.status == 2
    assert "cannot write to" in made.complaint


def test_an_output_that_fails_late_is_printed_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("featherweight.paths.write_atomic", fail)
    report = Report({"name": "m"}, {}, {}, {})
    monkeypatch.setattr("featherweight.measure.compare.compare", lambda *a, **k: report)
    made = CliRunner().invoke(cli.command, ["m", "--format", "json", "-o", str(tmp_path / "f")])
    assert json.loads(made.stdout)["model"] == {"name": "m"}
    assert "No space left on device" in made.stderr


def test_ctrl_c_prints_what_was_measured(tiny_llama: Path, start: Callable[..., Any]) -> None:
    process = start("compare", tiny_llama, "fp32", "bf16", *SHORT)
    for line in process.stderr:
        if "2/2 bf16: loading" in line:
            process.send_signal(signal.SIGINT)
            break
    out, errors = process.communicate()
    assert process.returncode == 130
    assert "fp32" in out
    assert "interrupted" in out
    assert "Traceback" not in errors


def test_smollm2_end_to_end(smollm2: str, run: Callable[..., Any]) -> None:
    made = run(
        *("compare", smollm2, "fp32", "bf16", "-p", 16, "-n", 4, "-r", 1),
        *("--quality-tokens", 512, "--format", "json"),
    )
    assert made.status == 0, made.errors
    report = json.loads(made.out)
    assert report["complete"]
    assert 130e6 < report["model"]["parameters"] < 140e6
    fp32, bf16 = report["rows"]
    assert 5 < fp32["ppl"]["value"] < 60
    assert 0 < bf16["kld"]["value"] < 0.01
    assert bf16["same_top"]["value"] > 0.95
    assert bf16["ppl_ratio"]["value"] == pytest.approx(1, abs=0.02)
    assert bf16["weights"] == pytest.approx(fp32["weights"] / 2, rel=1e-4)
    assert fp32["load_memory"]["total"] > 0
    assert fp32["run_memory"]["total"] > 0.9 * fp32["weights"]
    assert 0.01 < fp32["bandwidth_share"] < 2
