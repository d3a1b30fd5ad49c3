"""The threshold of LLM.int8(): from which size on activations are outliers."""

from __future__ import annotations

import math

from featherweight.errors import RecipeError


def check_threshold(technique: str, threshold: float) -> None:
    """Raise RecipeError unless it is a finite number from 0 upwards."""
    if not (math.isfinite(threshold) and threshold >= 0):
        raise RecipeError(
            f"'{technique}:threshold' is {threshold}",
            hint="give a number from 0 (no outliers) upwards; the paper's is 6",
        )
