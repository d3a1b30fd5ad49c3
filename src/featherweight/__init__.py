"""Run Hugging Face transformers lighter and faster, and prove that they still say the same."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from featherweight.anatomy.memory import memory as memory
    from featherweight.anatomy.now import memory_now as memory_now
    from featherweight.errors import FeatherweightError as FeatherweightError
    from featherweight.fitting.fit import fit as fit
    from featherweight.integrations.trainer import FeatherweightMemory as FeatherweightMemory
    from featherweight.integrations.transformers import QuantConfig as QuantConfig
    from featherweight.ledger import apply as apply
    from featherweight.measure.compare import compare as compare
    from featherweight.models import load as load
    from featherweight.profiling.profile import profile as profile
    from featherweight.recipe import Recipe as Recipe
    from featherweight.releasing import release as release

_HOMES = {
    "FeatherweightError": "errors",
    "FeatherweightMemory": "integrations.trainer",
    "QuantConfig": "integrations.transformers",
    "Recipe": "recipe",
    "apply": "ledger",
    "compare": "measure.compare",
    "fit": "fitting.fit",
    "load": "models",
    "memory": "anatomy.memory",
    "memory_now": "anatomy.now",
    "profile": "profiling.profile",
    "release": "releasing",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: importing the package stays cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'featherweight' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"featherweight.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
