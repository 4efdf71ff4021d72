"""Corrupted responses."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from infalign.evaluation.corruptions import CORRUPTIONS

WORDS = ["Let", "the", "dough", "rise", "until", "it", "doubles", "in", "size", "and", "bake", "it", "well"]


@pytest.mark.parametrize("kind", CORRUPTIONS)
@given(response=st.text())
@example(response="\0 \0")
def test_it_is_as_many_words_long_and_the_same_again_from_the_same_seed(kind: str, response: str) -> None:
    """For any text, the empty one too: a model that prefers it does not prefer its length."""
    made = [CORRUPTIONS[kind](response, np.random.default_rng(3)) for _ in range(2)]
    assert made[0] == made[1]
    assert len(made[0].split()) == len(response.split())


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_sentence_is_spoiled(kind: str) -> None:
    """No kind returns what it was given, and only signs are new words."""
    made = CORRUPTIONS[kind](" ".join(WORDS), np.random.default_rng(0)).split()
    assert made != WORDS
    assert (set(made) <= set(WORDS)) == (kind != "signs for words")


def test_order_is_all_that_disorder_changes() -> None:
    """The words are the same ones, as often."""
    made = CORRUPTIONS["words in disorder"](" ".join(WORDS), np.random.default_rng(0)).split()
    assert sorted(made) == sorted(WORDS)
