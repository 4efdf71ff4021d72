"""What a misspelt word probably means, and names in a sentence."""

import re
from collections.abc import Collection, Sequence
from difflib import SequenceMatcher
from typing import Any

ALIKE = 0.6  # of the letters of two words


def nearest(word: str, known: Collection[str]) -> str | None:
    """Return the known word that ``word`` probably means: by initials (lr, bo4), beginning (kl, exponential), letters.

    Any number is as good as the N of best-of-N, what a known word says after a space is a remark, and of several words
    that are as near as each other none is meant.

    >>> nearest("lr", ["learning_rate", "lora"])
    'learning_rate'
    >>> nearest("bestof4", ["standard", "best-of-N", "worst-of-N"])
    'best-of-N'
    """
    said = _plain(word)
    kind = said.partition(":")[0]
    plain = {_plain(one.partition(" ")[0]): one for one in known}
    short = [one for one in plain if re.search("[-_]", one) and said == "".join(re.findall("(?:^|[-_])([^-_])", one))]
    begun = [one for one in plain if len(kind) > 1 and one.startswith(kind)]
    alike = {one: SequenceMatcher(None, said, one).ratio() for one in plain}
    letters = [one for one, share in alike.items() if share == max([ALIKE, *alike.values()])]
    longer = [one for one in plain if len(stem := one.partition(":")[0]) > 2 and kind.startswith(stem)]
    candidates = short[:1] or begun[:1] or letters or longer[:1]
    return plain[candidates[0]] if len(candidates) == 1 else None


def did_you_mean(word: str, known: Collection[str], *, after: str = "") -> str:
    """Return the question whether the nearest known word is meant, ``after`` what was said; nothing if none is near."""
    near = nearest(word, known)
    return f"{after}did you mean {near}?" if near else ""


def spelling(value: Any) -> str:
    """Return how a value is spelled, so that it can be read again: by its name, where it has no spelling besides."""
    return str(getattr(value, "spelling", value.name))


def _plain(word: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "n", word.casefold())


def listed_names(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, at ``most`` so many, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
