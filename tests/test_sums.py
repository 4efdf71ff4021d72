"""The built-in arithmetic: its author is as right as stated, and its checker agrees with brute force."""

from itertools import permutations

import pytest

from infalign import sums

EXERCISES = sums.exercises(6000, seed=0)


@pytest.mark.parametrize(("size", "rate"), sums.RIGHT.items())
def test_the_author_is_right_as_often_as_stated(size: int, rate: float) -> None:
    """Within four standard errors, by exercises of 4, 6 and 9 numbers."""
    some = [e for e in EXERCISES if len(e.prompt.split()) == 3 + size]
    rewards = sums.check([[{"role": "user", "content": e.prompt}] for e in some], [e.response for e in some])
    assert abs(sum(rewards) / len(some) - rate) < 4 * (rate * (1 - rate) / len(some)) ** 0.5


def test_an_answer_is_right_if_two_given_numbers_make_the_total() -> None:
    """All pairs of digits are tried on a hundred exercises: no other is right, and each exercise has a right one."""
    for e in EXERCISES[:100]:
        _, total, _, *numbers = e.prompt.split()
        right = {f"Take {a} {b}" for a, b in permutations(numbers, 2) if int(a) + int(b) == int(total)}
        tried = [f"Take {a} {b}" for a in range(11) for b in range(11)] + ["", "Take", "Take 1", f"take {total}"]
        found = sums.check([[{"role": "user", "content": e.prompt}]] * len(tried), tried)
        assert {answer for answer, reward in zip(tried, found, strict=True) if reward} == right != set()
