"""A folder is replaced whole or not at all, whatever happens on the way."""

from __future__ import annotations

import os
import random
import shutil
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from featherweight.errors import FeatherweightError
from featherweight.folder import replacing, stale
from featherweight.residency import Mappings, give_back

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, /dev/full or seccomp")

# A kernel that answers a system call with an error: a seccomp filter on this process, as a stand-in
# for file systems that lack it. (load the call's number; equal? errno : allow)
REFUSING = """
import ctypes, platform, struct, sys, warnings
from pathlib import Path
from featherweight.errors import FeatherweightError
from featherweight.folder import replacing

def refuse(call, error):
    numbers = {"renameat2": (316, 276), "linkat": (265, 37)}[call]
    number = numbers[platform.machine() == "aarch64"]
    steps = ((0x20, 0, 0, 0), (0x15, 0, 1, number), (6, 0, 0, 0x50000 | error), (6, 0, 0, 0x7FFF0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None).prctl
    assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert prctl(22, 2, ctypes.c_void_p(ctypes.addressof(program)), 0, 0) == 0  # PR_SET_SECCOMP
"""  # noqa: E501


def run(code: str, *arguments: object) -> str:
    """What Python prints for a piece of code, in a process of its own."""
    words = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read(folder: Path) -> dict[str, str]:
    """Every file below a folder, by its path in it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def save(target: Path, files: dict[str, str], then: BaseException | None = None) -> None:
    """Save, or fail when all is written."""
    with replacing(target) as folder:
        write(folder, files)
        if then:
            raise then


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder with a checkpoint in it, alone in its parent."""
    folder = tmp_path / "parent" / "model"
    write(folder, {"config.json": "old", "model.safetensors": "old", "README.md": "mine"})
    return folder


NEW = {"config.json": "new", "model.safetensors": "new"}


def test_a_new_target_is_made_with_its_parents(tmp_path: Path):
    target = tmp_path / "a" / "b" / "model"
    with replacing(target) as folder:
        assert folder.parent == target.parent
        assert folder.name.startswith(".")
        assert "model" in folder.name
        assert str(os.getpid()) in folder.name
        write(folder, NEW)
        assert not target.exists()
    assert read(target) == NEW
    assert os.listdir(target.parent) == ["model"]
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE(target.parent.stat().st_mode)


def test_what_only_the_old_folder_has_is_kept(target: Path):
    write(target, {"figures/loss.txt": "1.5", "figures/both.txt": "old", "log/deep/a.txt": "a"})
    (target / "link").symlink_to("README.md")
    (target / "empty").mkdir()
    readme = (target / "README.md").stat().st_ino
    with replacing(target) as folder:
        write(folder, {**NEW, "figures/both.txt": "new"})
    assert read(target) == {
        **NEW,
        "README.md": "mine",
        "link": "mine",
        "figures/loss.txt": "1.5",
        "figures/both.txt": "new",
        "log/deep/a.txt": "a",
    }
    assert os.readlink(target / "link") == "README.md"
    assert (target / "empty").is_dir()
    assert (target / "README.md").stat().st_ino == readme  # a hard link, not a copy
    assert os.listdir(target.parent) == ["model"]


def test_weights_of_an_earlier_save_do_not_survive(target: Path):
    read_too = ["model-00001-of-00002.safetensors", "model.safetensors.index.json",
                "pytorch_model.bin", "pytorch_model.bin.index.json"]  # fmt: skip
    kept = ["adapter_model.safetensors", "onnx/model.safetensors", "tokenizer.model", "model.py",
            "model_ema.safetensors", "model.fp16.safetensors", "model.safetensors.index.fp16.json",
            "model.fp16-00001-of-00002.safetensors", "pytorch_model.bin.md"]  # fmt: skip
    write(target, dict.fromkeys([*read_too, *kept], "old"))
    with replacing(target) as folder:
        write(folder, {"config.json": "new", "model-00001-of-00003.safetensors": "new"})
    assert read(target) == {
        "config.json": "new",
        "model-00001-of-00003.safetensors": "new",
        "README.md": "mine",
        **dict.fromkeys(kept, "old"),
    }


def test_a_variant_replaces_its_own_weights_alone(target: Path):
    of_it = ["model.a[1]-00001-of-00002.safetensors", "model.safetensors.index.a[1].json",
             "pytorch_model.a[1].bin", "model.a[1].safetensors"]  # fmt: skip
    kept = ["model.a1.safetensors", "model.safetensors", "pytorch_model.bin", "config.json"]
    write(target, dict.fromkeys([*of_it, *kept], "old"))
    with replacing(target, stale("a[1]")) as folder:
        write(folder, {of_it[0]: "new"})
    assert read(target) == {of_it[0]: "new", "README.md": "mine", **dict.fromkeys(kept, "old")}


NAMES = st.sets(
    st.sampled_from(
        ["config.json", "a.txt", "sub/a.txt", "sub/model.safetensors", "sub/deep/b",
         "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
         "pytorch_model.bin", "pytorch_model-1.bin", "xpytorch_model.bin", "Model.safetensors"]
    )
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(old=NAMES, new=NAMES)
def test_the_union_less_stale_weights_is_what_remains(
    tmp_path_factory: pytest.TempPathFactory, old: set[str], new: set[str]
):
    target = tmp_path_factory.mktemp("union") / "model"
    target.mkdir()
    write(target, dict.fromkeys(old, "old"))
    save(target, dict.fromkeys(new, "new"))
    weights = ("model.safetensors", "model-00001-of-00002.safetensors",
               "model.safetensors.index.json", "pytorch_model.bin")  # fmt: skip
    kept = {name for name in old - new if name not in weights}
    assert read(target) == dict.fromkeys(kept, "old") | dict.fromkeys(new, "new")
    shutil.rmtree(target.parent)


def test_a_file_takes_the_place_of_a_folder_and_the_reverse(target: Path):
    write(target, {"a/x": "old", "b": "old"})
    save(target, {"a": "new", "b/x": "new"})
    assert read(target) == {
        "a": "new", "b/x": "new", "config.json": "old", "README.md": "mine"
    }  # fmt: skip


def test_an_exception_leaves_the_target_as_it_was(target: Path):
    before = {path: path.stat() for path in [target, *target.rglob("*")]}
    with pytest.raises(ZeroDivisionError):
        save(target, NEW, then=ZeroDivisionError())
    assert {path: path.stat() for path in [target, *target.rglob("*")]} == before
    assert os.listdir(target.parent) == ["model"]


def test_an_exception_leaves_no_new_folders(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "a" / "b" / "model", NEW, then=KeyboardInterrupt())
    assert os.listdir(tmp_path) == []


def test_through_a_link_the_folder_itself_is_replaced(target: Path, tmp_path: Path):
    link = tmp_path / "latest"
    link.symlink_to("parent/model")
    save(link, NEW)
    assert os.readlink(link) == "parent/model"
    assert read(target) == {**NEW, "README.md": "mine"}
    assert sorted(os.listdir(tmp_path)) == ["latest", "parent"]
    link.unlink()
    link.symlink_to("parent/later")  # to nothing yet
    save(link, NEW)
    assert read(target.parent / "later") == NEW


@pytest.mark.parametrize("mode", [0o750, 0o2775, 0o700])
def test_the_mode_of_the_folder_stays(target: Path, mode: int):
    target.chmod(mode)
    write(target, {"kept/x": "x"})
    (target / "kept").chmod(0o711)
    save(target, NEW)
    assert stat.S_IMODE(target.stat().st_mode) == mode
    assert stat.S_IMODE((target / "kept").stat().st_mode) == 0o711


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may chown")
def test_the_owner_of_the_folder_stays(target: Path):
    os.chown(target, 1234, 2345)
    target.chmod(0o2770)
    save(target, NEW)
    was = target.stat()
    assert (was.st_uid, was.st_gid, stat.S_IMODE(was.st_mode)) == (1234, 2345, 0o2770)


def test_a_file_is_no_target(tmp_path: Path):
    (tmp_path / "model").write_text("mine")
    with pytest.raises(FeatherweightError, match="is a file, not a folder; name a folder"):
        save(tmp_path / "model", NEW)
    assert read(tmp_path) == {"model": "mine"}
    with pytest.raises(FeatherweightError, match="/model' is a file, not a folder; name a folder"):
        save(tmp_path / "model" / "below", NEW)
    assert read(tmp_path) == {"model": "mine"}


def test_the_current_directory_is_no_target(target: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(target)
    for named in (".", "..", target):
        with pytest.raises(FeatherweightError, match="current directory; name a new folder"):
            save(Path(named), NEW)
    save(Path("inside"), NEW)
    assert read(target / "inside") == NEW


@LINUX
def test_a_mount_point_is_no_target():
    for named in ("/proc", "/"):
        with pytest.raises(FeatherweightError, match="is a mount point; name a folder"):
            save(Path(named), NEW)


@LINUX
def test_a_parent_that_takes_no_folder_is_an_error():
    with pytest.raises(FeatherweightError, match="'/proc/none/model' cannot be written: "):
        save(Path("/proc/none/model"), NEW)


def test_permissions_are_asked_for_first():
    printed = run("""
import os, tempfile
from pathlib import Path
from featherweight.errors import FeatherweightError
from featherweight.folder import replacing
if os.geteuid() == 0:  # whom no mode stops
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
with tempfile.TemporaryDirectory(dir="/tmp") as parent:
    target = Path(parent, "model")
    target.mkdir()
    for place, mode in ((target, 0o555), (target.parent, 0o555), (target.parent, 0o000)):
        before = place.stat().st_mode
        place.chmod(mode)
        try:
            with replacing(target):
                print("replaced")
        except FeatherweightError as error:
            print(str(error).replace(parent, "PARENT"))
        place.chmod(before)
        assert os.listdir(parent) == ["model"]
""")
    assert printed.splitlines() == [
        "'PARENT/model' is write-protected; make it writable, or name another folder",
        *["'PARENT/model' cannot be written: Permission denied; name a new folder whose parent can"
          " be written to"] * 2,
    ]  # fmt: skip


@LINUX
def test_a_full_disk_is_one_line_and_changes_nothing(target: Path):
    before = read(target)
    with pytest.raises(FeatherweightError, match="No space left on device; free some space"):
        save(target, NEW | {"/dev/full": "weights"})
    assert read(target) == before
    assert os.listdir(target.parent) == ["model"]


def test_weights_too_large_for_the_disk_are_one_line(target: Path):
    before = read(target)
    printed = run("""
import resource, sys, torch
from safetensors.torch import save_file
from featherweight.errors import FeatherweightError
from featherweight.folder import replacing
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    with replacing(sys.argv[1]) as folder:
        save_file({"weight": torch.zeros(10_000)}, folder / "model.safetensors")
except FeatherweightError as error:
    print(error)
""", target)  # fmt: skip
    assert printed == (
        f"'{target}' cannot be written: File too large;"
        " free some space, or name a folder on another disk\n"
    )
    assert read(target) == before
    assert os.listdir(target.parent) == ["model"]


def test_other_errors_of_the_block_come_out_as_they_are(target: Path):
    with pytest.raises(FileNotFoundError), replacing(target):
        (target / "none").read_text()
    with pytest.raises(ValueError, match="not this"), replacing(target):
        raise ValueError("not this")


@LINUX
def test_mapped_weights_stay_valid_while_their_folder_is_replaced(target: Path):
    first = torch.arange(1 << 20, dtype=torch.int32)
    save_file({"weight": first}, target / "model.safetensors")
    mapped = load_file(target / "model.safetensors")["weight"]
    assert Mappings().file_of(mapped) == str(target / "model.safetensors")
    with replacing(target) as folder:
        save_file({"weight": mapped + 1}, folder / "model.safetensors")
    assert give_back(mapped) > 0  # they must come again from a file that has no name any more
    assert torch.equal(mapped, first)
    assert torch.equal(load_file(target / "model.safetensors")["weight"], first + 1)
    with replacing(target) as folder:
        save_file({"weight": mapped}, folder / "model.safetensors")
    assert torch.equal(load_file(target / "model.safetensors")["weight"], first)


def test_threads_may_save_onto_one_target(target: Path):
    """The last one wins, whole; none disturbs another's folder."""
    versions = [letter * 10_000 for letter in "abcdef"]

    def often(version: str) -> None:
        for _ in range(40):
            save(target, {"config.json": version, "model.safetensors": version})

    with ThreadPoolExecutor(len(versions)) as threads:
        list(threads.map(often, versions))
    found = read(target)
    assert found["config.json"] == found["model.safetensors"]
    assert found["config.json"] in versions
    assert os.listdir(target.parent) == ["model"]


# Two versions that share some names and not others, as a save in one file and in shards do.
COMMON = ("config.json", "tokenizer/vocab.txt")
NAMED = {
    "A": [*COMMON, "model.safetensors"],
    "B": [*COMMON, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
}
VERSIONS = {version: dict.fromkeys(names, version * 50_000) for version, names in NAMED.items()}
SAVING = f"""
import itertools, sys
from featherweight.folder import replacing
print("ready", flush=True)
for version in itertools.cycle("AB"):
    with replacing(sys.argv[1]) as folder:
        (folder / "tokenizer").mkdir()
        for name in {NAMED}[version]:
            (folder / name).write_text(version * 50_000)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="one step only where folders can be exchanged")
def test_killed_at_any_moment_the_target_is_whole(tmp_path: Path):
    target, config = tmp_path / "model", tmp_path / "model" / "config.json"
    save(target, VERSIONS["A"] | {"README.md": "mine"})
    moments = random.Random(0)
    seen, left_over, reads = set(), 0, 0
    for _ in range(60):
        child = subprocess.Popen([sys.executable, "-c", SAVING, target], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        until = time.monotonic() + moments.uniform(0, 0.08)
        while time.monotonic() < until:
            config.stat()  # never missing, not even for a moment
            reads += 1
        child.kill()
        child.communicate()
        found = read(target)
        assert found.pop("README.md") == "mine"
        version = found["config.json"][0]
        assert found == VERSIONS[version]
        seen.add(version)
        left_over += len(os.listdir(tmp_path)) > 1
    assert seen == {"A", "B"}
    assert left_over  # some were killed while they wrote
    assert reads > 1000
    save(target, VERSIONS["B"])
    assert read(target) == VERSIONS["B"] | {"README.md": "mine"}
    assert os.listdir(tmp_path) == ["model"]


def test_what_is_still_being_written_is_left_alone(target: Path):
    with replacing(target) as outer:
        write(outer, NEW)
        save(target, {"config.json": "other"})
        assert read(outer) == NEW
    assert read(target) == {**NEW, "README.md": "mine"}
    assert os.listdir(target.parent) == ["model"]


def test_only_leftovers_of_this_target_are_removed(target: Path):
    ours = ".model.123-0123abcd.tmp"
    others = [".model.v2.123-0123abcd.tmp", ".model.tmp", "model.123-0123abcd.tmp", ".x"]
    for name in (ours, *others):
        write(target.parent / name, {"x": "x"})
    save(target, NEW)
    assert sorted(os.listdir(target.parent)) == sorted([*others, "model"])


def test_a_crash_between_two_renames_is_mended(target: Path):
    """What a crash leaves: the old folder hidden, the new one not yet in place."""
    whole = read(target)
    target.rename(target.parent / ".model.123-0123abcd.old")
    write(target.parent / ".model.123-0123abcd.tmp", NEW)
    with replacing(target) as folder:
        assert read(target) == whole
        write(folder, {"config.json": "new"})
    assert read(target) == {"config.json": "new", "README.md": "mine"}
    assert os.listdir(target.parent) == ["model"]


def test_a_hidden_old_folder_beside_a_whole_target_is_removed(target: Path):
    write(target.parent / ".model.123-0123abcd.old", {"config.json": "older", "extra": "older"})
    save(target, NEW)
    assert read(target) == {**NEW, "README.md": "mine"}
    assert os.listdir(target.parent) == ["model"]


@LINUX
def test_where_folders_cannot_be_exchanged_two_renames_do_it_with_a_warning(target: Path):
    code = """
refuse("renameat2", 22)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with replacing(sys.argv[1]) as folder:
        (folder / "config.json").write_text("new")
print(*{(warning.category.__name__, warning.filename, str(warning.message)) for warning in caught})
"""
    printed = run(REFUSING + code, target)
    assert "('UserWarning', '<string>', \"this file system cannot exchange folders: " in printed
    assert read(target) == {"config.json": "new", "README.md": "mine"}
    assert os.listdir(target.parent) == ["model"]


@LINUX
def test_a_warning_made_an_error_changes_nothing(target: Path):
    before = read(target)
    code = """
refuse("renameat2", 38)
warnings.simplefilter("error")
try:
    with replacing(sys.argv[1]) as folder:
        (folder / "config.json").write_text("new")
except UserWarning:
    print("refused")
"""
    assert run(REFUSING + code, target) == "refused\n"
    assert read(target) == before
    assert os.listdir(target.parent) == ["model"]


@LINUX
def test_an_exchange_that_is_refused_for_good_changes_nothing(target: Path):
    before = read(target)
    code = """
refuse("renameat2", 16)
try:
    with replacing(sys.argv[1]) as folder:
        (folder / "config.json").write_text("new")
except FeatherweightError as error:
    print(error)
"""
    assert "cannot be written: Device or resource busy; name a new" in run(REFUSING + code, target)
    assert read(target) == before
    assert os.listdir(target.parent) == ["model"]


@LINUX
def test_without_hard_links_files_are_copied(target: Path):
    (target / "link").symlink_to("README.md")
    (target / "README.md").chmod(0o640)
    inode = (target / "README.md").stat().st_ino
    code = """
refuse("linkat", 1)
with replacing(sys.argv[1]) as folder:
    (folder / "config.json").write_text("new")
"""
    run(REFUSING + code, target)
    assert read(target) == {"config.json": "new", "README.md": "mine", "link": "mine"}
    assert os.readlink(target / "link") == "README.md"
    was = (target / "README.md").stat()
    assert (was.st_ino != inode, stat.S_IMODE(was.st_mode)) == (True, 0o640)


def test_the_second_of_two_renames_failing_undoes_the_first(target: Path):
    from featherweight.folder import _rename_both

    before = read(target)
    with pytest.raises(FileNotFoundError):
        _rename_both(target.parent / "none", target, target.parent / "hidden")
    assert read(target) == before
    assert os.listdir(target.parent) == ["model"]
