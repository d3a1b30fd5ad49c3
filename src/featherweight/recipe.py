"""Recipes: techniques in order. String ⇄ object ⇄ JSON, and the registry of techniques.

recipe    := technique ("+" technique)*
technique := name (":" option)*
option    := flag | key "=" value ("," value)*

fp32+flash        bnb-nf4:double:skip=lm_head,score        bnb-int8:threshold=6
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from featherweight import techniques
from featherweight.errors import RecipeError
from featherweight.techniques.base import Technique


@cache
def registry() -> dict[str, type[Technique]]:
    """Every technique by name, found from the file names of `featherweight.techniques`."""
    found = {}
    for info in pkgutil.iter_modules(techniques.__path__):
        module = importlib.import_module(f"{techniques.__name__}.{info.name}")
        if hasattr(module, "TECHNIQUE"):
            found[info.name.replace("_", "-")] = module.TECHNIQUE
    return found


@cache
def _names() -> dict[type[Technique], str]:
    return {technique: name for name, technique in registry().items()}


def name_of(technique: Technique) -> str:
    """The technique's name in a recipe."""
    return _names()[type(technique)]


@dataclass(frozen=True)
class Recipe:
    """Techniques in the order in which they are applied; at most one for each slot."""

    techniques: tuple[Technique, ...]

    def __post_init__(self) -> None:
        if not self.techniques:
            raise RecipeError("the recipe is empty", hint=f"techniques: {', '.join(registry())}")
        taken: dict[str, Technique] = {}
        for technique in self.techniques:
            if technique.slot in taken:
                raise RecipeError(
                    f"'{name_of(taken[technique.slot])}' and '{name_of(technique)}' both decide the"
                    f" {technique.slot}",
                    hint="keep one of them",
                )
            taken[technique.slot] = technique

    @classmethod
    def parse(cls, text: str | Recipe) -> Recipe:
        """Read a recipe such as `bnb-nf4:double+flash`; raises RecipeError naming what is wrong."""
        if isinstance(text, Recipe):
            return text
        if not isinstance(text, str):
            raise RecipeError(
                f"a recipe is a string such as 'bf16+flash', not {type(text).__name__}"
            )
        if not text.strip():
            return cls(())
        return cls(tuple(_parse_technique(part.strip(), text) for part in text.split("+")))

    def __str__(self) -> str:
        return "+".join(_print_technique(technique) for technique in self.techniques)

    def to_json(self) -> list[dict[str, Any]]:
        """A list of `{"technique": name, option: value, …}`, defaults left out."""
        return [
            {"technique": name_of(technique)}
            | {
                key: list(value) if isinstance(value, tuple) else value
                for key, value in _given(technique)
            }
            for technique in self.techniques
        ]

    @classmethod
    def from_json(cls, data: Sequence[dict[str, Any]]) -> Recipe:
        """The inverse of `to_json`; raises RecipeError for anything else."""
        if not isinstance(data, Sequence) or not all(
            isinstance(item, dict) and isinstance(item.get("technique"), str) for item in data
        ):
            raise RecipeError(
                f"not a recipe in JSON: {data!r}",
                hint='write a list such as [{"technique": "bnb-nf4", "double": true}]',
            )
        built = []
        for item in data:
            name = item["technique"]
            kind = _lookup(name)
            options = {
                key: _check(name, kind, key, value)
                for key, value in item.items()
                if key != "technique"
            }
            built.append(kind(**options))
        return cls(tuple(built))

    def __iter__(self) -> Iterator[Technique]:
        return iter(self.techniques)


def _nearest(given: str, allowed: Iterable[str]) -> str:
    allowed = list(allowed)
    close = difflib.get_close_matches(given, allowed, n=3, cutoff=0.5)
    listed = f"allowed: {', '.join(allowed)}" if allowed else "it takes none"
    return f"nearest: {', '.join(close)}; {listed}" if close else listed


def _lookup(name: str) -> type[Technique]:
    if name in registry():
        return registry()[name]
    raise RecipeError(f"unknown technique '{name}'", hint=_nearest(name, registry()))


def _options(kind: type[Technique]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: (hints[f.name], f.metadata.get("choices")) for f in fields(kind)}


def _parse_technique(text: str, recipe: str) -> Technique:
    name, *parts = [part.strip() for part in text.split(":")]
    if not name:
        raise RecipeError(
            f"a technique is missing in '{recipe}'",
            hint=f"join techniques by one '+'; allowed: {', '.join(registry())}",
        )
    kind = _lookup(name)
    options: dict[str, Any] = {}
    for part in parts:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key in options:
            raise RecipeError(f"'{name}' gets '{key}' twice in '{recipe}'", hint="give it once")
        options[key] = _check(name, kind, key, _read(name, kind, key, value if equals else None))
    return kind(**options)


def _read(name: str, kind: type[Technique], key: str, text: str | None) -> Any:
    """The text of an option as the option's type; `_check` judges the value."""
    if key not in _options(kind):
        return text  # `_check` says what is allowed
    wanted, choices = _options(kind)[key]
    if wanted is bool:
        if text is not None:
            raise RecipeError(f"'{name}:{key}' is a flag and takes no value, got '{text}'")
        return True
    if not text:
        listed = f"one of {', '.join(map(str, choices))}" if choices else _describe(wanted)
        raise RecipeError(f"'{name}:{key}' needs a value", hint=f"write {key}=… with {listed}")
    if get_origin(wanted) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        return {int: int, float: float}.get(_plain(wanted), str)(text)
    except ValueError:
        raise RecipeError(
            f"'{name}:{key}' takes {_describe(wanted)}, got '{text}'",
            hint=f"allowed: {', '.join(map(str, choices))}" if choices else None,
        ) from None


def _check(name: str, kind: type[Technique], key: str, value: Any) -> Any:
    options = _options(kind)
    if key not in options:
        raise RecipeError(f"'{name}' has no option '{key}'", hint=_nearest(key, options))
    wanted, choices = options[key]
    if get_origin(wanted) is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise RecipeError(f"'{name}:{key}' takes {_describe(wanted)}, got {value!r}")
        if not value or any(set(v) & set("+:,=") or not v or v != v.strip() for v in value):
            raise RecipeError(
                f"'{name}:{key}' takes {_describe(wanted)}, got {value!r}",
                hint="a name is not empty, has none of '+:,=' and no space around it",
            )
        return tuple(value)
    plain = _plain(wanted)
    if plain is float and type(value) is int and abs(value) < 1 << 1023:
        value = float(value)
    if type(value) is not plain:
        raise RecipeError(f"'{name}:{key}' takes {_describe(wanted)}, got {value!r}")
    if choices and value not in choices:
        raise RecipeError(
            f"'{name}:{key}' is '{value}'", hint=f"allowed: {', '.join(map(str, choices))}"
        )
    return value


def _plain(wanted: Any) -> Any:
    """`int` of `int | None`: an option left out may be None, one given may not."""
    return next((arg for arg in get_args(wanted) if arg is not type(None)), wanted)


def _describe(wanted: Any) -> str:
    if get_origin(wanted) is tuple:
        return "names joined by ','"
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(
        _plain(wanted), "a word"
    )


def _given(technique: Technique) -> Iterator[tuple[str, Any]]:
    for f in fields(technique):
        value = getattr(technique, f.name)
        if f.default is MISSING or value != f.default:
            yield f.name, value


def _print_technique(technique: Technique) -> str:
    parts = [name_of(technique)]
    for key, value in _given(technique):
        if value is True:
            parts.append(key)
        elif isinstance(value, tuple):
            parts.append(f"{key}={','.join(value)}")
        elif isinstance(value, float):
            parts.append(f"{key}={repr(value).removesuffix('.0').replace('e+', 'e')}")
        else:
            parts.append(f"{key}={value}")
    return ":".join(parts)
