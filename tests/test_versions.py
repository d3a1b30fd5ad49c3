"""What is installed, in which version."""

from __future__ import annotations

import platform

import pytest

from featherweight import __version__, versions


def test_what_is_installed_has_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "EXTRAS", {"some": ("no-such-package",)})
    found = versions.versions()
    assert list(found)[:2] == ["python", "featherweight"]
    assert found["python"] == platform.python_version()
    assert found["featherweight"] == __version__
    assert {"torch", "transformers", "tokenizers", "numpy"} <= set(found)
    assert "no-such-package" not in found
    assert all(found.values())


def test_what_is_not_installed_has_none() -> None:
    assert versions.version("no-such-package") is None
    assert versions.version("torch")
