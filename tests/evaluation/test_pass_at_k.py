"""pass@k and its relatives are the means over all sets of k responses."""

from itertools import combinations
from math import comb
from pathlib import Path

import numpy as np
import pytest

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.pass_at_k import Metric, measure_table, pass_rates

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


def test_prompts_may_have_different_numbers_of_responses_and_rewards_may_be_graded() -> None:
    """1 − C(n − c, k)/C(n, k), with a threshold that says what is right."""
    (found,) = pass_rates([[0.01, 0.2, 1.0, 0.5], [1.0, 0.01]], ["pass@2"], threshold=0.5)
    assert found["mean"] == pytest.approx((1 - comb(2, 2) / comb(4, 2) + 1) / 2)
    assert found["low"] <= found["mean"] <= found["high"]
    assert found["prompts"] == 2


def test_a_table_is_measured_for_powers_of_two(tmp_path: Path) -> None:
    """Up to the fewest responses of a prompt; answers come from their column."""
    rows = [(name, int(name == "a" or n == 0), n % 2) for name in "abc" for n in range(5)]
    file = tmp_path / "samples.csv"
    file.write_text("prompt_id,reward,answer\n" + "".join(f"{p},{r},{a}\n" for p, r, a in rows))
    found = measure_table(file, None)
    assert [record["metric"] for record in found] == ["pass@1", "pass@2", "pass@4"]
    assert found[1]["mean"] == pytest.approx((1 + 2 * 2 / 5) / 3)
    assert measure_table(file, ["maj@5"])[0]["mean"] == pytest.approx((1 + 2 / 3) / 3)


def test_what_cannot_be_measured_is_named(tmp_path: Path) -> None:
    """Graded rewards, too few responses, an unknown metric, and votes without answers."""
    with pytest.raises(DataError, match="not all 0 or 1; give the threshold"):
        pass_rates([[0.5, 1.0]] * 2, ["pass@1"])
    with pytest.raises(DataError, match="pass@8 needs 8 responses per prompt, found 6"):
        pass_rates(CORRECT, ["pass@8"])
    with pytest.raises(ConfigError, match=r"unknown metric 'best@8'; known: pass@K, pass\^K"):
        pass_rates(CORRECT, ["best@8"])
    with pytest.raises(DataError, match="maj@2 needs a column answer"):
        pass_rates(CORRECT, ["maj@2"])
    file = tmp_path / "samples.csv"
    file.write_text("prompt_id,reward\na,1\na,0\nb,1\nb,0\n")
    with pytest.raises(DataError, match="4 rows have no column answer"):
        measure_table(file, ["maj@2"])


@pytest.mark.parametrize("k", [1, 4, 8, 16])
def test_all_right_has_the_exact_interval_at_every_k(k: int) -> None:
    """Clopper and Pearson's of 40 of 40, also where weights sum to 1 less rounding."""
    measured = pass_rates([[1.0] * 16] * 40, [f"pass@{k}"])[0]
    assert (measured["mean"], measured["low"]) == pytest.approx((1.0, 0.025 ** (1 / 40)), abs=0.003)
