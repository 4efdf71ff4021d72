"""Corrupted responses, worse beyond doubt: a reward that does not rank them lower pays for what nobody wants."""

from collections.abc import Callable, Mapping

import numpy as np

SIGNS = tuple("#$%*+<=>@^_{|}~")
REPEATED_WORDS = 3


def replace_words(response: str, rng: np.random.Generator) -> str:
    """Replace every other word by a sign.

    >>> replace_words("Let the dough rise.", np.random.default_rng(0))
    '| the ^ rise.'
    """
    words = response.split()
    words[::2] = rng.choice(SIGNS, len(words[::2])).tolist()
    return " ".join(words)


def shuffle_words(response: str, rng: np.random.Generator) -> str:
    """Put the words in random order.

    >>> shuffle_words("Let the dough rise.", np.random.default_rng(0))
    'dough Let the rise.'
    """
    words = response.split()
    return " ".join(words[place] for place in rng.permutation(len(words)))


def repeat_first_words(response: str, rng: np.random.Generator) -> str:
    """Repeat the first words instead of going on.

    >>> repeat_first_words("Let the dough rise overnight.", np.random.default_rng(0))
    'Let the dough Let the'
    """
    words = response.split()
    return " ".join(words[place % REPEATED_WORDS] for place in range(len(words)))


CORRUPTIONS: Mapping[str, Callable[[str, np.random.Generator], str]] = {
    "signs for words": replace_words,
    "words in disorder": shuffle_words,
    "its first words again and again": repeat_first_words,
}
