"""A hub id as a local folder. The hub itself is not asked here: its cache is laid out by hand."""

from __future__ import annotations

import shutil

import pytest

import featherweight as fw
from featherweight.errors import ModelError
from featherweight.hub import snapshot

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(tiny_llama, tmp_path, monkeypatch):
    """The tiny Llama as the hub's cache would hold it under `somebody/tiny`."""
    import huggingface_hub.constants as constants

    home = tmp_path / "models--somebody--tiny"
    shutil.copytree(tiny_llama, home / "snapshots" / COMMIT)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return home / "snapshots" / COMMIT


def test_a_cached_id_is_its_snapshot_folder(cached):
    assert snapshot("somebody/tiny", None, code=False) == cached
    assert snapshot("somebody/tiny", COMMIT, code=False) == cached


def test_load_reads_the_snapshot_and_names_it(cached):
    provenance = fw.load("somebody/tiny").provenance
    assert provenance.name == "somebody/tiny"
    assert provenance.source == str(cached)
    assert provenance.kind == "decoder"


@pytest.mark.parametrize(("name", "revision"), [("somebody/other", None), ("somebody/tiny", "no")])
def test_what_is_not_cached_is_one_line_offline(cached, name, revision):
    with pytest.raises(ModelError, match=f"no model '{name}': not a folder") as caught:
        snapshot(name, revision, code=False)
    assert "\n" not in str(caught.value)
    assert "give a folder" in str(caught.value)
