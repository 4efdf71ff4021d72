"""Responses made worse beyond doubt: a reward that does not rank them lower pays for what nobody wants to read."""

from collections.abc import Callable, Mapping

import numpy as np

SIGNS = tuple("#$%*+<=>@^_{|}~")
REPEATED = 3  # words


def with_signs(response: str, rng: np.random.Generator) -> str:
    """Replace every other word by a sign.

    >>> with_signs("Let the dough rise.", np.random.default_rng(0))
    '| the ^ rise.'
    """
    words = response.split()
    words[::2] = rng.choice(SIGNS, len(words[::2])).tolist()
    return " ".join(words)


def in_disorder(response: str, rng: np.random.Generator) -> str:
    """Put the words in random order.

    >>> in_disorder("Let the dough rise.", np.random.default_rng(0))
    'dough Let the rise.'
    """
    words = response.split()
    return " ".join(words[place] for place in rng.permutation(len(words)))


def repeated(response: str, rng: np.random.Generator) -> str:
    """Repeat the first words instead of going on.

    >>> repeated("Let the dough rise overnight.", np.random.default_rng(0))
    'Let the dough Let the'
    """
    words = response.split()
    return " ".join(words[place % REPEATED] for place in range(len(words)))


GARBAGE: Mapping[str, Callable[[str, np.random.Generator], str]] = {
    "signs for words": with_signs,
    "words in disorder": in_disorder,
    "its first words again and again": repeated,
}
