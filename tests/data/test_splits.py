"""Splits by group: no group is in two parts, and parts do not depend on the other rows."""

import numpy as np
import pytest
from rows import assistant, examples_of, user

from infalign.data.examples import Example
from infalign.data.sources import drop_groups, split_by_group


def test_no_group_is_in_two_parts():
    """Every part holds whole groups, the parts hold every example once, and their sizes are near the fractions."""
    short = examples_of(*[f"Question {n}" for n in range(3000)])
    longer = [Example((*e.prompt, assistant("Hm."), user("So?")), "Yes", "No", f"{e.where}, longer") for e in short]
    examples = short + longer
    parts = split_by_group(examples, {"train": 0.7, "valid": 0.1, "test": 0.2}, seed=3)
    assert sorted(e.where for part in parts.values() for e in part) == sorted(e.where for e in examples)
    groups = {name: {example.group for example in part} for name, part in parts.items()}
    assert sum(map(len, groups.values())) == len(set.union(*groups.values())) == 3000
    for name, fraction in {"train": 0.7, "valid": 0.1, "test": 0.2}.items():
        assert abs(len(groups[name]) - 3000 * fraction) < 4 * np.sqrt(3000 * fraction * (1 - fraction))


def test_a_group_stays_in_its_part():
    """The part of a group does not depend on the other rows, and does depend on the seed."""
    examples = examples_of(*[f"Question {n}" for n in range(200)])
    fractions = {"train": 0.5, "test": 0.5}
    whole = split_by_group(examples, fractions, seed=0)
    some = split_by_group(reversed(examples[50:90]), fractions, seed=0)
    assert {e.group for e in some["test"]} == {e.group for e in whole["test"]} & {e.group for e in examples[50:90]}
    assert split_by_group(examples, fractions, seed=1) != whole


@pytest.mark.parametrize(
    "other", ["  Say\u00a0caf\u00e9,\n  twice. \n", "Say cafe\u0301, twice.", "Say  ca\ufb01, twice."]
)
def test_prompts_that_look_alike_are_one_group(other):
    """Blanks and Unicode normalization make other prompts, which stay as they are, and no other group."""
    same = other.replace("ca\ufb01", "caf\u00e9")  # a ligature is another word
    one, two = examples_of("Say caf\u00e9, twice.", same)
    assert one.group == two.group
    assert one.prompt_id != two.prompt_id
    assert two.prompt[0]["content"] == same


def test_a_part_may_be_empty():
    """A fraction of zero gives an empty part, and a fraction of one gives everything."""
    examples = examples_of(*[f"Question {n}" for n in range(100)])
    parts = split_by_group(examples, {"none": 0.0, "all": 1.0, "last": 0.0}, seed=0)
    assert parts == {"none": [], "all": examples, "last": []}


def test_without_groups_of_drops_the_leak():
    """Train rows that start like a test row go, and their number is told."""
    train, test = examples_of("a", "b", "a", "c"), examples_of("a", "d")
    assert drop_groups(train, test) == ([train[1], train[3]], 2)
