"""Every key of a recipe says what it means, on the command line and on a page that cannot go stale."""

import json
import re
from pathlib import Path

from micro import answer, refusal

from infalign.recipe.schema import all_keys, json_schema, reference

DOCS = Path(__file__).parents[2] / "docs"


def test_page_and_schema_are_what_the_settings_say() -> None:
    """If this fails, run ``python -m infalign.recipe.schema docs``."""
    assert (DOCS / "keys.md").read_text(encoding="utf-8") == reference()
    assert json.loads((DOCS / "recipe.schema.json").read_text(encoding="utf-8")) == json_schema()


def test_every_key_has_a_meaning_and_a_type_in_words() -> None:
    """No key is without explanation, and no Python shows through."""
    for key in all_keys():
        assert key.meaning, key.name
        assert not any(sign in key.type for sign in ("[", "<class", "typing", "Optional")), key


def test_explain_says_type_default_and_meaning_of_what_contains_a_word() -> None:
    """Each key is three lines; a word that no key contains is exit code 2 and one sentence with the nearest."""
    assert answer("recipes", "--explain", "kl_budget") == (
        "policies.NAME.kl_budget\n"
        "  number ≥ 1e-20; default none; of qrpo, snips, resample, ipo, rloo, ppo, grpo, maxk, bond\n"
        "  nats per response; β follows from theory\n"
    )
    out = answer("recipes", "--explain", "data.sources.N.hub.")
    names = ("id", "config", "split", "revision", "data_dir", "data_files")
    assert re.findall(r"^\S+$", out, re.MULTILINE) == [f"data.sources.N.hub.{name}" for name in names]
    assert answer("recipes", "--explain", "policies.aware.kl_budget") == answer("recipes", "--explain", "kl_budget")
    assert answer("recipes", "--explain", "data.sources.0.hub.id").startswith("data.sources.N.hub.id\n")
    for key, said in (("policies.aware.kl_budgt", "did you mean kl_budget?"), ("zzz", "docs/keys.md lists all keys")):
        assert refusal("recipes", "--explain", key) == f"infalign: no recipe key contains {key}; {said}\n"
