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


@pytest.mark.parametrize(
    ("answers", "right"),
    [
        (["", None, float("nan"), "7", "  "], [0, 0, 0, 1, 0]),  # no answer is no vote and agrees with nobody
        (["1", "1.0", "2", "02", "1e0"], [1, 1, 0, 0, 1]),  # numbers compare as numbers
        (["1", "1.0", "1", "x", ""], [1, 0, 1, 0, 0]),  # among text they are text
        ([" a", "a ", "b", "B", None], [1, 1, 0, 0, 0]),
    ],
)
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_a_majority_counts_answers_only(answers: list[object], right: list[int], k: int) -> None:
    """Against all sets of k: those without any answer are not right."""
    text = [None if a is None or a != a else str(a).strip() for a in answers]
    numeric = "x" not in text and "a" not in text
    keys = np.array([np.nan if not t else float(t) if numeric else hash(t) for t in text])
    expected = []
    for one in map(list, combinations(range(5), k)):
        said = [i for i in one if not np.isnan(keys[i])]
        expected.append(voted(np.array(right)[said], keys[said]) if said else 0.0)
    found = pass_rates([right, right], [f"maj@{k}"], answers=[answers, answers])[0]
    assert found["mean"] == pytest.approx(np.mean(expected), abs=1e-12)


@pytest.mark.parametrize("metric", ["pass@2048", "pass^2048", "avg@4096", "pass@4096"])
def test_large_numbers_of_responses_are_exact(metric: str) -> None:
    """Of 4,096 responses all but one are right: C(4095, k)/C(4096, k) = 1 − k/4096 of all sets are right as a whole."""
    k = int(metric[5:])
    share = 1.0 - k / 4096 if metric.startswith("pass^") else 1.0 - (metric.startswith("avg")) / 4096
    found = pass_rates([np.arange(4096) > 0] * 2, [metric])[0]
    assert found["mean"] == pytest.approx(share, rel=1e-9)


@pytest.mark.parametrize(
    ("rewards", "more", "said"),
    [
        ([[1.0, np.nan], [0, 1]], {}, "prompt 0 has a reward that is not finite"),
        ([[1, 0], [np.nan, 1]], {"threshold": 0.5}, "prompt 1 has a reward that is not finite"),
        ([[1, 0], [np.inf, 1]], {"threshold": 0.5}, "prompt 1 has a reward that is not finite"),
        (CORRECT, {"threshold": np.nan}, "the threshold must be finite, found nan"),
        (CORRECT, {"threshold": np.inf}, "the threshold must be finite, found inf"),
        (CORRECT, {"answers": ANSWERS[:, :3]}, "answers and rewards differ in shape"),
        ([], {}, "at least 2 prompts, found 0"),
        ([[], []], {}, "needs 1 responses per prompt, found 0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(rewards: object, more: dict[str, object], said: str) -> None:
    """NaN and infinity pass no comparison silently, and nothing there is an error."""
    with pytest.raises((ConfigError, DataError), match=said):
        pass_rates(rewards, ["avg@1"], **more)  # type: ignore[arg-type]


def test_prompts_that_are_all_solved_have_an_interval() -> None:
    """As pass@1 has it: rounding of pass@64 is no difference between prompts."""
    low = [pass_rates(np.ones((20, 96)), [metric])[0]["low"] for metric in ("pass@1", "pass@64", "pass^64")]
    assert low == pytest.approx([low[0]] * 3, abs=1e-9)
    assert low[0] < 0.85
