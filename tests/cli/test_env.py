"""`featherweight env`: both formats, with and without the native library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from featherweight import native, rates, versions
from featherweight.cli import env
from featherweight.rates import Rate, Rates

RATE = Rate.of([9.0, 11.0, 10.0], "GB/s")


@pytest.fixture(autouse=True)
def _measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Rates("native", "avx2", 2, {1: RATE, 2: RATE}, RATE, None, 1 << 28, ("beware",))
    monkeypatch.setattr(rates, "measure", lambda machine: found)
    monkeypatch.setenv("FEATHERWEIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")


def test_json_holds_everything(tmp_path: Path) -> None:
    result = CliRunner().invoke(env.command, ["--format", "json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found) == {"versions", "missing", "machine", "native", "rates", "cache"}
    assert found["versions"]["featherweight"]
    assert found["rates"]["bandwidth"]["2"]["samples"] == [9.0, 11.0, 10.0]
    assert found["cache"] == str(tmp_path)


def test_human_shows_spread_notes_and_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "EXTRAS", {"gguf": ("no-such-package",)})
    result = CliRunner().invoke(env.command, [])
    assert result.exit_code == 0, result.output
    assert "10.0 GB/s (9.0–11.0, cv 10.0 %, n = 3)" in result.stdout
    assert "beware" in result.stdout
    assert "not installed: pip install 'featherweight[gguf]'" in result.stdout


def test_human_says_why_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = native.Status(available=False, error="not built; do this")
    monkeypatch.setattr(native, "status", lambda: missing)
    result = CliRunner().invoke(env.command, [])
    assert result.exit_code == 0, result.output
    assert "not built; do this" in result.stdout
