"""Originals on disk: freed meanwhile, back bit for bit, nothing left behind."""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import featherweight as fw
from featherweight import ledger as ledgers
from featherweight import spill as spills
from featherweight.errors import FeatherweightError, UnsupportedError
from featherweight.recipe import registry
from featherweight.spill import IN_MEMORY, Spill
from featherweight.tensors import held

MB = 1_000_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty folder that is not in memory, also where /tmp is."""
    in_memory = spills._file_system(tmp_path) in IN_MEMORY
    with tempfile.TemporaryDirectory(dir="/var/tmp" if in_memory else tmp_path) as folder:
        yield Path(folder)


def anonymous(folder: Path, read: Any) -> Any:
    """A model in memory of its own, as after training."""
    model = read(folder)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


@pytest.mark.parametrize("recipe", ["fp16", "bf16+bnb-nf4:double+flash", "bnb-int8"])
def test_spilled_originals_come_back(
    tiny: Path, recipe: str, disk: Path, read: Any, answer: Any, state: Any
):
    model = anonymous(tiny, read)
    before = state(model)
    with fw.apply(model, recipe, spill_dir=disk):
        (folder,) = disk.iterdir()
        assert {file.suffix for file in folder.iterdir()} == {".safetensors"}
        answer(model)
    assert state(model) == before
    assert list(disk.iterdir()) == []


def test_memory_is_kept_spilled_or_dropped(disk: Path, resident: Any):
    sizes: dict[str, int] = {}
    for name, options in {
        "kept": {},
        "spilled": {"spill_dir": disk},
        "dropped": {"reversible": False},
    }.items():
        model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(12)])  # 201 MB
        before = resident("RssAnon")
        applied = fw.apply(model, "bf16", **options)
        sizes[name] = resident("RssAnon") - before
        if name == "spilled":
            (folder,) = disk.iterdir()
            assert sum(file.stat().st_size for file in folder.iterdir()) > 201 * MB
        del model, applied
        gc.collect()
    assert sizes["kept"] > 80 * MB  # both are there
    assert sizes["spilled"] < -80 * MB
    assert sizes["dropped"] < -80 * MB


def test_originals_are_spilled_while_the_rest_is_converted(
    disk: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ledgers, "SPILL_BATCH", 1)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    expected = [p.clone() for p in model.parameters()]
    puts: list[int] = []
    put = Spill.put

    def spy(self: Spill, storage: torch.UntypedStorage) -> None:
        puts.append(sum(p.dtype is torch.float32 for p in model.parameters()))
        put(self, storage)

    monkeypatch.setattr(Spill, "put", spy)
    with fw.apply(model, "bf16", spill_dir=disk):
        assert puts == [5, 4, 3, 2, 1, 0]  # still to be converted, at each original written
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), expected, strict=True))


def test_tied_weights_are_spilled_once(tiny_llama: Path, disk: Path, read: Any, state: Any):
    model = anonymous(tiny_llama, read)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # Two parameters over one storage are tied as well.
    model.model.norm.weight.data = model.model.layers[0].input_layernorm.weight.data
    before = state(model)
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with fw.apply(model, "bf16", spill_dir=disk):
        (folder,) = disk.iterdir()
        assert len(list(folder.iterdir())) == len(storages)
    assert state(model) == before
    norm = model.model.norm.weight.untyped_storage().data_ptr()
    assert norm == model.model.layers[0].input_layernorm.weight.untyped_storage().data_ptr()


def test_a_weight_that_is_still_in_use_is_not_spilled(
    tiny_llama: Path, disk: Path, read: Any, state: Any
):
    model = anonymous(tiny_llama, read)
    layers = model.model.layers
    # An embedding that is the same memory as a linear layer: only the latter is quantised.
    layers[0].mlp.up_proj.weight.data = model.model.embed_tokens.weight.data[:128]
    before = state(model)
    with fw.apply(model, "bnb-nf4", spill_dir=disk):
        assert model.model.embed_tokens.weight.untyped_storage().nbytes() > 0
        assert torch.equal(model.model.embed_tokens.weight, before.tensors["lm_head.weight"][1])
    assert state(model) == before


def test_mapped_originals_are_not_written_again(tiny_llama: Path, disk: Path, read: Any):
    model = read(tiny_llama)
    with fw.apply(model, "bf16", spill_dir=disk):
        (folder,) = disk.iterdir()
        assert list(folder.iterdir()) == []
    assert list(disk.iterdir()) == []


def test_memory_that_torch_does_not_own_stays_and_is_noted(disk: Path):
    model = nn.Linear(4, 4, bias=False)
    numbers = torch.arange(16.0).reshape(4, 4).numpy()
    model.weight.data = torch.from_numpy(numbers)
    with fw.apply(model, "bf16", spill_dir=disk) as applied:
        assert applied.receipt.notes == ["an original that torch does not own stays in memory"]
    assert torch.equal(model.weight, torch.arange(16.0).reshape(4, 4))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm here")
def test_a_folder_in_memory_is_refused():
    with pytest.raises(FeatherweightError, match=r"'/dev/shm' is on a tmpfs, which is memory"):
        fw.apply(nn.Linear(2, 2), "bf16", spill_dir="/dev/shm")


def test_a_folder_that_is_not_there_is_refused(disk: Path, read: Any, tiny_llama: Path):
    model = read(tiny_llama)
    with pytest.raises(FeatherweightError, match="missing' cannot be used: No such file"):
        fw.apply(model, "bf16", spill_dir=disk / "missing")
    (disk / "file").touch()
    with pytest.raises(FeatherweightError, match="name an existing folder that can be written to"):
        fw.apply(model, "bf16", spill_dir=disk / "file")
    assert model.dtype is torch.float32


Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_is_seen_before_writing(
    tiny_llama: Path, disk: Path, read: Any, state: Any, monkeypatch: pytest.MonkeyPatch
):
    model = anonymous(tiny_llama, read)
    before = state(model)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(FeatherweightError, match=r"cannot be spilled to .* are needed and 1,048,"):
        fw.apply(model, "bf16", spill_dir=disk)
    assert state(model) == before
    assert list(disk.iterdir()) == []


def test_a_disk_that_fills_while_writing_loses_nothing(
    tiny_llama: Path, disk: Path, read: Any, state: Any, monkeypatch: pytest.MonkeyPatch
):
    model = anonymous(tiny_llama, read)
    before = state(model)
    save, calls = spills.save_file, []

    def failing(tensors: Any, path: Path) -> None:
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(tensors, path)

    monkeypatch.setattr(spills, "save_file", failing)
    with pytest.raises(FeatherweightError, match="No space left on device; free some space"):
        fw.apply(model, "bf16", spill_dir=disk)
    assert len(calls) == 3
    assert state(model) == before
    assert list(disk.iterdir()) == []


def test_a_model_given_up_leaves_no_files(tiny_llama: Path, disk: Path, read: Any):
    applied = fw.apply(anonymous(tiny_llama, read), "bf16", spill_dir=disk)
    assert len(list(disk.iterdir())) == 1
    del applied
    gc.collect()
    assert list(disk.iterdir()) == []


def test_a_storage_is_empty_until_it_is_restored(disk: Path):
    tensor = torch.arange(1000, dtype=torch.int16)
    view = tensor[10:20]
    spill = Spill(disk)
    spill.put(tensor.untyped_storage())
    assert held([tensor, view]).total == 0
    spill.restore()
    assert torch.equal(tensor, torch.arange(1000, dtype=torch.int16))
    assert view.tolist() == list(range(10, 20))
    assert list(spill.folder.iterdir()) == []
    spill.put(tensor.untyped_storage())  # the folder is there to be used again
    spill.restore()
    assert view.tolist() == list(range(10, 20))
    spill.close()
    assert list(disk.iterdir()) == []


def test_a_technique_left_out_after_another_spilled_keeps_the_model_whole(
    tiny_llama: Path,
    disk: Path,
    read: Any,
    answer: Any,
    state: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    pytest.importorskip("bitsandbytes")
    quantiser = registry()["bnb-nf4"]
    convert, calls = quantiser.convert, []

    def failing(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise UnsupportedError("not this layer")
        return convert(self, *args)

    monkeypatch.setattr(quantiser, "convert", failing)
    monkeypatch.setattr(ledgers, "SPILL_BATCH", 1)  # what bf16 replaced is gone by then
    model = anonymous(tiny_llama, read)
    before = state(model)
    with fw.apply(model, "bf16+bnb-nf4", spill_dir=disk, on_fallback="warn") as applied:
        assert applied.receipt.notes == ["bnb-nf4 left out: not this layer"]
        assert torch.equal(answer(model), answer(read(tiny_llama, dtype=torch.bfloat16)))
    assert state(model) == before
    assert list(disk.iterdir()) == []
