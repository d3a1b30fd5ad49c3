"""The grammar of recipes, and what is said of those that are wrong."""

from __future__ import annotations

import json
from dataclasses import Field, fields
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from featherweight import techniques
from featherweight.errors import FeatherweightError, RecipeError
from featherweight.recipe import Recipe, name_of, registry

# What may stand in a list: no separator of the grammar, no space around it.
word = st.text(
    st.characters(exclude_characters="+:,=", exclude_categories=["Cs"]), min_size=1, max_size=8
).filter(lambda text: text == text.strip())
OPTIONS = {
    "skip": st.lists(word, max_size=3).map(tuple),
    "double": st.booleans(),
    "exact": st.booleans(),
    "threshold": st.floats(0, allow_nan=False, allow_infinity=False),
    "r": st.integers(1, 10**6),
    "alpha": st.integers(1, 10**6),
    "dropout": st.floats(0, 1, exclude_max=True),
    "target": st.lists(word, max_size=3).map(tuple),
    "rslora": st.booleans(),
}


def values(field: Field) -> st.SearchStrategy[object]:
    """What an option may be: one of its choices, or left out."""
    choices = field.metadata["choices"]
    return st.sampled_from([field.default, *choices]) if choices else OPTIONS[field.name]


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any recipe of the registry, with any of its options."""
    names = draw(st.lists(st.sampled_from(sorted(registry())), min_size=1, max_size=3))
    slots = [registry()[name].slot for name in names]
    assume(len(set(slots)) == len(slots))
    return Recipe(
        tuple(
            kind(**{f.name: draw(values(f)) for f in fields(kind)})
            for kind in (registry()[name] for name in names)
        )
    )


@given(recipes())
def test_a_recipe_is_the_same_after_printing_and_after_json(recipe: Recipe):
    assert Recipe.parse(str(recipe)) == recipe
    assert str(Recipe.parse(str(recipe))) == str(recipe)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert hash(Recipe.parse(str(recipe))) == hash(recipe)


@given(st.text() | st.text("bnf48it16dpa:+=,.0ekslor-"))
def test_any_text_is_a_recipe_or_a_recipe_error(text: str):
    try:
        recipe = Recipe.parse(text)
    except RecipeError:
        return
    assert Recipe.parse(str(recipe)) == recipe


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)
json_recipes = st.lists(
    st.fixed_dictionaries(
        {"technique": st.sampled_from(sorted(registry())) | json_values},
        optional=dict.fromkeys([*OPTIONS, "compute", "blocksize", "head", "rest"], json_values),
    ),
    max_size=2,
)


@given(json_recipes | json_values)
def test_any_json_is_a_recipe_or_a_recipe_error(data: object):
    try:
        recipe = Recipe.from_json(data)
    except RecipeError:
        return
    assert Recipe.parse(str(recipe)) == recipe


@pytest.mark.parametrize(
    ("given_", "canonical"),
    [
        (" bf16 + flash ", "bf16+flash"),
        ("bnb-nf4 : double : skip = a , b", "bnb-nf4:skip=a,b:double"),
        ("bnb-nf4:blocksize=64", "bnb-nf4"),
        ("bnb-nf4:compute=bf16:double", "bnb-nf4:double:compute=bf16"),
        ("bnb-int8:threshold=6.0", "bnb-int8"),
        ("bnb-int8:threshold=0", "bnb-int8:threshold=0"),
        ("bnb-int8:threshold=2.50", "bnb-int8:threshold=2.5"),
        ("bnb-int8:threshold=1e20", "bnb-int8:threshold=1e20"),
        ("nf4:exact:rest=bf16:double:head=int8", "nf4:head=int8:rest=bf16:double:exact"),
        ("bnb-fp4:skip=mlp.*,layers.[01],", "bnb-fp4:skip=mlp.*,layers.[01]"),
        ("nf4+lora:r=8:alpha=32:target=q_proj,v_proj", "nf4+lora:alpha=32:target=q_proj,v_proj"),
    ],
)
def test_printing_is_canonical(given_: str, canonical: str):
    assert str(Recipe.parse(given_)) == canonical
    assert str(Recipe.parse(canonical)) == canonical


def test_json_leaves_defaults_out():
    recipe = Recipe.parse("bf16+bnb-nf4:double:skip=a,b+flash")
    assert recipe.to_json() == [
        {"technique": "bf16"},
        {"technique": "bnb-nf4", "skip": ["a", "b"], "double": True},
        {"technique": "flash"},
    ]


def test_a_recipe_object_parses_to_itself():
    recipe = Recipe.parse("bf16")
    assert Recipe.parse(recipe) is recipe


def test_every_technique_file_is_found_by_its_name():
    folder = Path(techniques.__path__[0])
    stems = {
        f.stem.replace("_", "-") for f in folder.glob("*.py") if "\nTECHNIQUE" in f.read_text()
    }
    assert set(registry()) == stems
    assert stems >= {"fp32", "bf16", "fp16", "eager", "sdpa", "flash", "bnb-int8", "int8"}
    for name, kind in registry().items():
        assert name_of(kind()) == name
        assert str(Recipe.parse(name)) == name
        assert kind.slot in (
            "dtype",
            "attention",
            "weights",
            "adapter",
            "activations",
            "forward",
        )


EVERY = (
    "bf16, bnb-fp4, bnb-int8, bnb-nf4, checkpointing, eager, fastpath, flash, fp16, fp32, fp4,"
    " int8, lora, nf4, sdpa"
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", f"the recipe is empty; techniques: {EVERY}"),
        ("  ", "the recipe is empty"),
        ("bf61", "unknown technique 'bf61'; nearest: bf16, "),
        ("flsh", f"unknown technique 'flsh'; nearest: flash, fastpath; allowed: {EVERY}"),
        ("quux", f"unknown technique 'quux'; allowed: {EVERY}"),
        ("bf16++flash", "a technique is missing in 'bf16++flash'; join techniques by one '+'"),
        ("bf16+", "a technique is missing"),
        (":double", "a technique is missing"),
        ("sdpa:x", "'sdpa' has no option 'x'; it takes none"),
        ("fastpath+fastpath", "'fastpath' and 'fastpath' both decide the forward"),
        ("lora:r=0", "'lora:r' is 0; give a whole number from 1 upwards"),
        ("lora:r=eight", "'lora:r' takes a whole number, got 'eight'"),
        ("lora:alpha=-1", "'lora:alpha' is -1"),
        ("lora:dropout=1", "'lora:dropout' is 1.0; give 0 or a share below 1"),
        ("lora:dropout=nan", "'lora:dropout' is nan"),
        ("lora:target=", "'lora:target' needs a value; write target=… with names joined by ','"),
        ("lora+lora", "'lora' and 'lora' both decide the adapter"),
        ("bf16+fp16", "'bf16' and 'fp16' both decide the dtype; keep one of them"),
        ("sdpa+bf16+flash", "'sdpa' and 'flash' both decide the attention"),
        ("bnb-nf4+bnb-int8", "'bnb-nf4' and 'bnb-int8' both decide the weights"),
        ("bf16+bf16", "'bf16' and 'bf16' both decide the dtype"),
        ("fp32:double", "'fp32' has no option 'double'; it takes none"),
        ("bf16:double", "'bf16' has no option 'double'; allowed: compute"),
        ("bf16:compute=bf16", "'bf16:compute' is 'bf16'; allowed: fp32"),
        ("nf4:head=nf4", "'nf4:head' is 'nf4'; allowed: int8"),
        ("int8:compat", "'int8:compat' needs a value; write compat=… with one of bitsandbytes"),
        ("int8:threshold=nan", "'int8:threshold' is nan; give a number from 0"),
        ("int8+nf4", "'int8' and 'nf4' both decide the weights"),
        (
            "bnb-nf4:doubel",
            "'bnb-nf4' has no option 'doubel'; nearest: double;"
            " allowed: skip, double, compute, blocksize",
        ),
        ("bnb-nf4:", "'bnb-nf4' has no option ''"),
        ("bnb-nf4:double=yes", "'bnb-nf4:double' is a flag and takes no value, got 'yes'"),
        ("bnb-nf4:double=", "is a flag and takes no value"),
        ("bnb-nf4:double:double", "'bnb-nf4' gets 'double' twice in 'bnb-nf4:double:double'"),
        ("bnb-nf4:skip=a:skip=b", "'bnb-nf4' gets 'skip' twice"),
        ("bnb-nf4:skip", "'bnb-nf4:skip' needs a value; write skip=… with names joined by ','"),
        ("bnb-nf4:skip=,", "'bnb-nf4:skip' takes names joined by ','"),
        ("bnb-nf4:skip=a=b", "none of '+:,='"),
        ("bnb-nf4:compute", "needs a value; write compute=… with one of fp32, bf16, fp16"),
        ("bnb-nf4:compute=fp8", "'bnb-nf4:compute' is 'fp8'; allowed: fp32, bf16, fp16"),
        ("bnb-nf4:blocksize=big", "takes a whole number, got 'big'; allowed: 32, 64"),
        ("bnb-nf4:blocksize=64.5", "takes a whole number, got '64.5'"),
        ("bnb-nf4:blocksize=65", "'bnb-nf4:blocksize' is '65'; allowed: 32, 64"),
        ("bnb-int8:threshold=six", "'bnb-int8:threshold' takes a number, got 'six'"),
        ("bnb-int8:threshold=", "'bnb-int8:threshold' needs a value; write threshold=… with a num"),
        ("bnb-int8:threshold=nan", "'bnb-int8:threshold' is nan; give a number from 0"),
        ("bnb-int8:threshold=inf", "'bnb-int8:threshold' is inf"),
        ("bnb-int8:threshold=1e999", "'bnb-int8:threshold' is inf"),
        ("bnb-int8:threshold=-1", "'bnb-int8:threshold' is -1.0"),
    ],
)
def test_errors_say_what_is_wrong_and_what_is_allowed(text: str, says: str):
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("thing", [None, 4, ["bf16"], b"bf16"])
def test_a_recipe_is_a_string(thing: object):
    with pytest.raises(RecipeError, match="a recipe is a string .* not " + type(thing).__name__):
        Recipe.parse(thing)


def test_one_technique_object_twice_is_two_of_one_slot():
    technique = registry()["bf16"]()
    with pytest.raises(RecipeError, match="both decide the dtype"):
        Recipe((technique, technique))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"technique": "bf16"}, "not a recipe in JSON"),
        ("bf16", "not a recipe in JSON"),
        (["bf16"], "write a list such as"),
        ([{"name": "bf16"}], "not a recipe in JSON"),
        ([{"technique": ["bf16"]}], "not a recipe in JSON"),
        (None, "not a recipe in JSON"),
        ([], "the recipe is empty"),
        ([{"technique": "bf61"}], "unknown technique 'bf61'; nearest: bf16"),
        ([{"technique": "bnb-nf4", "duble": True}], "no option 'duble'; nearest: double"),
        ([{"technique": "bnb-nf4", "double": 1}], "'bnb-nf4:double' takes true or false, got 1"),
        ([{"technique": "bnb-nf4", "compute": None}], "'bnb-nf4:compute' takes a word, got None"),
        ([{"technique": "bnb-nf4", "blocksize": 64.0}], "takes a whole number, got 64.0"),
        ([{"technique": "bnb-nf4", "blocksize": True}], "takes a whole number, got True"),
        ([{"technique": "bnb-nf4", "skip": "lm_head"}], "takes names joined by ',', got 'lm_head'"),
        ([{"technique": "bnb-nf4", "skip": 5}], "takes names joined by ',', got 5"),
        ([{"technique": "bnb-nf4", "skip": {"a": 1}}], "takes names joined by ','"),
        ([{"technique": "bnb-nf4", "skip": [""]}], "a name is not empty"),
        ([{"technique": "bnb-nf4", "skip": [" a"]}], "no space around it"),
        ([{"technique": "bnb-int8", "threshold": "6"}], "takes a number, got '6'"),
        ([{"technique": "bnb-int8", "threshold": 10**400}], "takes a number, got 1000"),
    ],
)
def test_json_of_the_wrong_shape_is_refused(data: object, says: str):
    with pytest.raises(RecipeError, match=says):
        Recipe.from_json(data)


def test_recipe_errors_are_featherweight_errors():
    assert issubclass(RecipeError, FeatherweightError)
