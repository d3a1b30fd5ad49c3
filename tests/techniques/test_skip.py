"""What `skip=` matches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from featherweight.errors import RecipeError
from featherweight.techniques.skip import matches, skipped


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("lm_head", "lm_head", True),
        ("down_proj", "model.layers.3.mlp.down_proj", True),
        ("mlp.down_proj", "model.layers.3.mlp.down_proj", True),
        ("model.layers.0", "model.layers.0.mlp.down_proj", True),
        ("layers.0", "model.layers.0.mlp.down_proj", True),
        ("layers.1", "model.layers.11.mlp.down_proj", False),
        ("layers.[01]", "model.layers.1.self_attn.q_proj", True),
        ("layers.[01]", "model.layers.2.self_attn.q_proj", False),
        ("*.layers.[01].*", "model.layers.1.self_attn.q_proj", True),
        ("self_attn.?_proj", "model.layers.1.self_attn.q_proj", True),
        ("self_attn.?_proj", "model.layers.1.mlp.up_proj", False),
        ("proj", "model.layers.1.mlp.up_proj", False),
        ("*_proj", "model.layers.1.mlp.up_proj", True),
        ("head", "lm_head", False),
        ("LM_HEAD", "lm_head", False),
    ],
)
def test_patterns_fit_names_ends_and_what_is_around(pattern: str, name: str, fits: bool):
    assert matches(name, pattern) is fits


def test_skipped_is_the_union(tiny_llama: Path, read: Any):
    model = read(tiny_llama)
    found = skipped(model, ["mlp.up_proj", "layers.1.self_attn"])
    assert found == {
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.up_proj",
        *(f"model.layers.1.self_attn{leaf}" for leaf in ("", ".q_proj", ".k_proj", ".v_proj")),
        "model.layers.1.self_attn.o_proj",
    }
    assert skipped(model, []) == set()


def test_a_pattern_that_fits_nothing_lists_the_names(tiny_llama: Path, read: Any):
    with pytest.raises(RecipeError, match=r"skip=fc1 fits no module of the model; .*down_proj"):
        skipped(read(tiny_llama), ["mlp", "fc1"])
