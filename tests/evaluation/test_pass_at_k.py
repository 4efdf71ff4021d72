"""pass@k and its relatives are the means over all sets of k responses."""

from itertools import combinations

import numpy as np
import pytest

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.pass_at_k import Metric

CORRECT = np.array([[0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 1]], float)
ANSWERS = np.array([[3, 1, 2, 2, 1, 4], [5, 6, 5, 6, 7, 8], [1] * 6, [1, 2, 1, 1, 2, 1]])


def voted(correct: np.ndarray, answers: np.ndarray) -> float:
    """Return how often the answer that most give is right; of those with as many votes one at random."""
    given, votes = np.unique(answers, return_counts=True)
    return float(np.mean([correct[answers == answer].mean() for answer in given[votes == votes.max()]]))


@pytest.mark.parametrize("k", [1, 2, 4, 6])
@pytest.mark.parametrize(
    ("kind", "of_set"),
    [
        ("pass@", lambda correct, _: correct.max()),
        ("pass^", lambda correct, _: correct.min()),
        ("avg@", lambda correct, _: correct.mean()),
        ("maj@", voted),
        ("best-of-", lambda correct, _: correct.max()),
        ("worst-of-", lambda correct, _: correct.min()),
    ],
)
def test_a_metric_is_the_mean_over_all_sets_of_k(kind: str, of_set: object, k: int) -> None:
    """By enumeration."""
    sets = [list(chosen) for chosen in combinations(range(6), k)]
    expected = [
        np.mean([of_set(correct[one], answers[one]) for one in sets])  # type: ignore[operator]
        for correct, answers in zip(CORRECT, ANSWERS, strict=True)
    ]
    assert Metric.parse(f"{kind}{k}").of_prompts(CORRECT, ANSWERS) == pytest.approx(expected)


def test_what_cannot_be_measured_is_named() -> None:
    """Too few responses, an unknown metric, and votes without answers."""
    with pytest.raises(DataError, match="pass@8 needs 8 responses per prompt, found 6"):
        Metric.parse("pass@8").of_prompts(CORRECT)
    with pytest.raises(ConfigError, match=r"unknown metric 'best@8'; known: pass@K, pass\^K"):
        Metric.parse("best@8")
    with pytest.raises(DataError, match="maj@2 needs a column answer"):
        Metric.parse("maj@2").of_prompts(CORRECT)
