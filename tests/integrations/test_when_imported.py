"""Extensions that wait for another library."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from featherweight.integrations.when_imported import when_imported


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of modules `waited_for` and `extension`; what is imported from it is forgotten."""
    (tmp_path / "waited_for.py").write_text("value = [1]\n")
    (tmp_path / "extension.py").write_text(
        "import waited_for\n\ndef enable():\n    waited_for.value.append(2)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("waited_for", "extension"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("waited_for", "extension"):
        sys.modules.pop(name, None)


def test_after_the_import(library: Path):
    finders = list(sys.meta_path)
    when_imported("waited_for", "extension")
    assert "extension" not in sys.modules
    import waited_for

    assert waited_for.value == [1, 2]
    assert sys.meta_path == finders


def test_before_it(library: Path):
    finders = list(sys.meta_path)
    import waited_for

    when_imported("waited_for", "extension")
    assert waited_for.value == [1, 2]
    assert sys.meta_path == finders


def test_a_look_for_the_module_is_no_import(library: Path):
    when_imported("waited_for", "extension")
    assert importlib.util.find_spec("waited_for").origin == str(library / "waited_for.py")
    assert "extension" not in sys.modules
    import waited_for

    assert waited_for.value == [1, 2]
    importlib.reload(waited_for)
    assert waited_for.value == [1]  # as a reload leaves it


def test_an_import_that_fails_may_be_tried_again(library: Path):
    when_imported("waited_for", "extension")
    good = (library / "waited_for.py").read_text()
    (library / "waited_for.py").write_text("raise ValueError('not today')\n")
    with pytest.raises(ValueError, match="not today"):
        import waited_for
    (library / "waited_for.py").write_text(good + "# again\n")
    importlib.invalidate_caches()
    import waited_for

    assert waited_for.value == [1, 2]


def test_a_module_that_is_not_there_is_missed_as_ever(library: Path):
    when_imported("missing_one", "extension")
    with pytest.raises(ModuleNotFoundError, match="No module named 'missing_one'"):
        import missing_one  # noqa: F401


def test_a_broken_extension_is_a_warning(library: Path):
    (library / "extension.py").write_text("def enable():\n    raise KeyError('gone')\n")
    when_imported("waited_for", "extension")
    with pytest.warns(UserWarning, match=r"do not work with this 'waited_for': KeyError\('gone'\)"):
        import waited_for
    assert waited_for.value == [1]


def run(code: str) -> list[str]:
    """What Python prints, with warnings as errors."""
    code = textwrap.dedent(code)
    command = [sys.executable, "-W", "error:Featherweight", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


FIT = """
from torch import nn
from peft import LoraConfig, inject_adapter_in_model
model = inject_adapter_in_model(
    LoraConfig(target_modules=["0"]), nn.Sequential(FourBitLinear(64, 64))
)
print(type(model[0]).__name__)
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import peft\nfrom featherweight.nn import FourBitLinear",
        "from featherweight.nn import FourBitLinear\nimport peft",
        "from featherweight.nn import FourBitLinear\nimport peft.tuners.lora.model",
        "from featherweight.nn import FourBitLinear\nfrom transformers.integrations import peft",
    ],
)
def test_either_may_come_first(imports: str):
    assert run(imports + FIT) == ["FrozenLoraLinear"]


def test_our_layers_do_not_import_peft():
    code = "import sys, featherweight.nn; print('peft' in sys.modules)"
    assert run(code) == ["False"]


def test_a_peft_that_is_not_installed_is_not_missed():
    code = """
    import sys
    sys.modules["peft"] = None
    import featherweight.nn
    try:
        import peft
    except ImportError as error:
        print("missing")
    """
    assert run(code) == ["missing"]
