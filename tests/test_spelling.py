"""Misspelled words: what they are taken to mean, and when nothing is guessed."""

from collections.abc import Callable
from typing import Any

import pytest

from infalign.core.errors import ConfigError
from infalign.method.procedures import parse_procedure
from infalign.method.shapings import parse_shaping

EXP = "exp:T (for example exp:10 or exp:-10)"


@pytest.mark.parametrize(
    ("parse", "word", "meant"),
    [
        *[(parse_procedure, n, "best-of-N") for n in ("best-of-n", "bestof4", "best_of_4", "Best-of-4", "bo4", "BoN")],
        (parse_procedure, "worst-of4", "worst-of-N"),
        (parse_procedure, "standart", "standard"),
        (parse_procedure, "rewind:0.85", "rewind:QUANTILE:N[:best]"),
        (parse_procedure, "top-2", "top-K-of-N"),
        *[(parse_shaping, name, EXP) for name in ("exp10", "exp", "expp:3", "exponential:10")],
        (parse_shaping, "Identity", "identity"),
        (parse_shaping, "lcs:0.8", "lsc:Q (for example lsc:0.85)"),
    ],
)
def test_a_misspelled_name_is_answered_with_the_nearest(parse: Callable[[str], Any], word: str, meant: str) -> None:
    """However the number is said, by the initials of the field, and also a shaping that is not of the rank."""
    with pytest.raises(ConfigError, match=f"unknown (procedure|transformation) '{word}'") as refused:
        parse(word)
    assert str(refused.value).endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize("word", ["majority", "mode", "vote"])
def test_nothing_is_guessed_for_what_is_like_nothing(word: str) -> None:
    """All that is known is listed, and no question asked."""
    with pytest.raises(ConfigError, match="known: standard, best-of-N") as refused:
        parse_procedure(word)
    assert "did you mean" not in str(refused.value)
