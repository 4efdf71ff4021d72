"""Every key of a recipe says what it means, on the command line and on a page that cannot go stale."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infalign.recipe.built_in import BuiltIn, built_in
from infalign.recipe.reading import dump_recipe, load_recipe, read_yaml
from infalign.recipe.schema import all_keys, explained, json_schema, reference

DOCS = Path(__file__).parents[2] / "docs"


def test_page_and_schema_are_what_the_settings_say() -> None:
    """If this fails, run ``python -m infalign.recipe.schema docs``."""
    assert (DOCS / "recipe.md").read_text(encoding="utf-8") == reference()
    assert json.loads((DOCS / "recipe.schema.json").read_text(encoding="utf-8")) == json_schema()


def test_every_key_has_a_meaning_and_a_type_in_words() -> None:
    """No key is without explanation, and no Python shows through."""
    for key in all_keys():
        assert key.meaning, key.name
        assert not any(sign in key.type for sign in ("[", "<class", "typing", "Optional")), key


@pytest.mark.parametrize("recipe", built_in(), ids=lambda recipe: recipe.name)
def test_every_key_of_a_recorded_recipe_is_explained(recipe: BuiltIn) -> None:
    """Whatever a run records once all defaults are spelled out, down to each value, has exactly one explanation."""
    recorded = read_yaml(dump_recipe(load_recipe(recipe.name)))
    found = list(values(recorded))
    assert "policies.aware.fit.learning_rate" in found
    for key in found:
        within, _, last = key.rpartition(".")
        meant = explained(key)[0]
        assert meant.name.endswith(within.rpartition(".")[2] if meant.type == "mapping" else last)


def values(settings: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values."""
    parts = settings.items() if isinstance(settings, dict) else enumerate(settings)
    for name, value in parts:
        here = f"{path}{name}"
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(part, dict) for part in value)):
            yield from values(value, f"{here}.")
        else:
            yield here


def test_explain_says_type_default_and_meaning_and_a_prefix_its_children(main: Any) -> None:
    """One key is three lines; a section comes with the keys that it holds."""
    code, out, _ = main("recipes", "--explain", "policies.aware.kl_budget")
    assert code == 0
    assert out == (
        "policies.NAME.kl_budget\n"
        "  number ≥ 1e-20; default none; of qrpo, resample, ipo, rloo, ppo, grpo, maxk, bond\n"
        "  nats per response; β follows from theory\n"
    )
    _, out, _ = main("recipes", "--explain", "data.sources.3")
    assert [line for line in out.splitlines() if not line.startswith(" ")][:2] == [
        "data.sources.N.path",
        "data.sources.N.hub",
    ]
    _, out, _ = main("recipes", "--explain", "rollout")
    assert [line for line in out.splitlines() if not line.startswith(" ")] == [
        "rollout",
        *(f"rollout.{name}" for name in ("prompts", "minutes", "k", "max_new_tokens", "engine")),
    ]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("policies.aware.kl_budgt", "did you mean policies.NAME.kl_budget?"),
        ("learning_rate", "did you mean policy.fit.learning_rate?"),
        ("policies.aware.fit.lr", "recipe key policies.aware.fit.lr; did you mean policies.NAME.fit.learning_rate?"),
        ("fit.lr", "did you mean policy.fit.learning_rate?"),
        ("rollout.kk", "did you mean rollout.k?"),
        ("absent.nothing", "a recipe has run_dir, seed, procedure"),
        ("zzz", "a recipe has run_dir, seed, procedure"),
    ],
)
def test_a_key_that_no_recipe_has_is_answered_with_the_nearest(main: Any, key: str, said: str) -> None:
    """A misspelled key is exit code 2 and one sentence."""
    code, out, err = main("recipes", "--explain", key)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert said in err
