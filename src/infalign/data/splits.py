"""Splits in which no two parts share the start of a conversation."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate

from infalign.data.examples import Example
from infalign.data.messages import digest


def split_by_group(
    examples: Iterable[Example], fractions: Mapping[str, float], *, seed: int
) -> dict[str, list[Example]]:
    """Return the examples of each named part, every group whole in the part that its hash and ``seed`` choose.

    A group's part does not depend on the other examples, so the sizes meet ``fractions``, whose sum is 1, on average.
    """
    names = list(fractions)
    bounds = list(accumulate(fractions.values()))[:-1]
    parts: dict[str, list[Example]] = {name: [] for name in names}
    for example in examples:
        position = int(digest([seed, example.group])[:12], 16) / 16**12  # uniform on [0, 1), exact in a float
        parts[names[bisect_right(bounds, position)]].append(example)
    return parts


def drop_groups(train: Iterable[Example], test: Iterable[Example]) -> tuple[list[Example], int]:
    """Return the ``train`` examples whose group is not in ``test``, and how many were dropped."""
    train = list(train)
    groups = {example.group for example in test}
    kept = [example for example in train if example.group not in groups]
    return kept, len(train) - len(kept)
