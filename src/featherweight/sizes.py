"""Sizes as people write them: `1343MiB`, `12GiB`, `8GB`."""

from __future__ import annotations

import re

from featherweight.errors import FeatherweightError

_UNITS = {
    **{letter: 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("kmgt", 1)},
}


def parse_size(text: str) -> int:
    """Bytes of `1343MiB`, `12GiB`, `8GB` or a plain number; FeatherweightError for the rest."""
    found = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?) ?([kmgt]i?)b", text.strip(), re.IGNORECASE)
    if not found:
        raise FeatherweightError(f"'{text}' is no size", hint="write 1343MiB, 12GiB, 8GB or bytes")
    whole, amount, unit = found.groups(default="")
    return int(whole) if whole else round(float(amount) * _UNITS[unit.lower()])
