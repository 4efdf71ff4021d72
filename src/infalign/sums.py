"""The task of the demo: which two numbers add up to a total? A checker knows, a small model has to hedge.

The prompt ``Make 10 from 9 3 7 1`` asks for ``Take 9 1`` or ``Take 3 7``, in any order. Models learn from an author who
is right the less often the more numbers there are (`RIGHT`), so difficulty differs between prompts, and shows.
"""

import random
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

NUMBERS = range(1, 10)
RIGHT = {4: 0.9, 6: 0.4, 9: 0.05}  # the share of the author's answers that are right, by how many numbers are given


class Exercise(NamedTuple):
    """A prompt and the author's answer."""

    prompt: str
    response: str


def exercises(n: int, *, seed: int) -> list[Exercise]:
    """Return ``n`` exercises: of 4, 6 or 9 distinct numbers two make the total.

    >>> exercises(1, seed=0)
    [Exercise(prompt='Make 10 from 7 1 3 5 4 6', response='Take 1 3')]
    """
    rng = random.Random(seed)
    sizes = list(RIGHT)
    found = []
    for _ in range(n):
        numbers = rng.sample(NUMBERS, rng.choice(sizes))
        pairs = list(combinations(numbers, 2))
        total = sum(rng.choice(pairs))
        is_right = rng.random() < RIGHT[len(numbers)]
        first, second = rng.choice([pair for pair in pairs if (sum(pair) == total) == is_right])
        found.append(Exercise(f"Make {total} from {' '.join(map(str, numbers))}", f"Take {first} {second}"))
    return found


def check(prompts: Sequence[Sequence[Mapping[str, str]]], responses: Sequence[str]) -> list[float]:
    """Return 1 for each response that takes two of the prompt's numbers which add up to its total, 0 for all others.

    >>> prompt = [{"role": "user", "content": "Make 10 from 9 3 7 1"}]
    >>> check([prompt] * 3, ["Take 7 3", "Take 9 3", "Take 5 5"])
    [1.0, 0.0, 0.0]
    """
    pairs = zip(prompts, responses, strict=True)
    return [float(response in right_responses(prompt[-1]["content"])) for prompt, response in pairs]


def right_responses(prompt: str) -> set[str]:
    """Return all right responses to a prompt of `exercises`, in both orders."""
    total, *numbers = map(int, re.findall(r"\d+", prompt))
    return {f"Take {a} {b}" for a in numbers for b in numbers if a != b and a + b == total}
