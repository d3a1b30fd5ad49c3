"""Importing what extends another library once that library is imported, and never before.

Importing PEFT takes seconds, and most programs never do; those that do may import it before our
layers or after.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, extension: str) -> None:
    """Enable our module `extension` once the module `name` is imported, which may be so already.

    What that raises becomes a warning: an import that works without us must not fail with us.
    """
    if sys.modules.get(name) is not None:  # None is there to keep it from being imported
        _enable(name, extension)
    else:
        sys.meta_path.insert(0, _Hook(name, extension))


class _Hook(MetaPathFinder):
    """Lets the other finders find one module, and enables the extension after its code has run."""

    def __init__(self, name: str, extension: str) -> None:
        self.name = name
        self.extension = extension

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: object) -> None:
        """`exec_module` of this one loader, which is of this one module."""
        execute = loader.exec_module  # type: ignore[attr-defined]

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # Not when it was found: a mere look for the module (`find_spec`) is no import.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _enable(self.name, self.extension)

        loader.exec_module = exec_module  # type: ignore[attr-defined]


def _enable(name: str, extension: str) -> None:
    try:
        import_module(extension).enable()
    except Exception as error:  # whatever another version of the module may bring
        warnings.warn(
            f"Featherweight's layers do not work with this '{name}': {error!r}", stacklevel=2
        )
