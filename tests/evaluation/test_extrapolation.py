"""pass@k beyond the samples of a prompt, and intervals where prompts are variants of one problem."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import betabinom, binom

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.extrapolation import RATES, Counts
from infalign.evaluation.intervals import estimate, of_clusters
from infalign.evaluation.measures import measure

CORRECT, SAMPLES = [0, 0, 1, 3, 4, 8, 2, 5, 0, 7], [4, 8, 8, 8, 4, 8, 16, 16, 16, 16]


@pytest.mark.parametrize("k", [1, 2, 4])
def test_up_to_the_fewest_samples_it_is_the_unbiased_pass_rate(k: int) -> None:
    """With its interval."""
    rewards = [np.arange(n) < c for c, n in zip(CORRECT, SAMPLES, strict=True)]
    measured = Counts(CORRECT, SAMPLES).pass_at(k)
    assert measured.pop("claim") == "unbiased"
    (expected,) = measure(rewards, [f"pass@{k}"])
    known = {name: expected[name] for name in ("mean", "low", "high")}
    assert measured | known == pytest.approx(measured)


@pytest.mark.parametrize(("a", "b", "n"), [(1.0, 1.0, 4), (0.5, 2.0, 16), (5.0, 1.0, 16)])
def test_of_a_beta_law_pass_at_2n_is_the_next_moment(a: float, b: float, n: int) -> None:
    """1 − E(1 − p)^2n = 1 − B(a, b + 2n)/B(a, b), by 2,000 prompts whose counts have the exact law."""
    counts = betabinom.ppf((np.arange(2000) + 0.5) / 2000, n, a, b)
    exact = 1.0 - betabinom.pmf(0, 2 * n, a, b)
    measured = Counts(counts, n).pass_at(2 * n)
    assert measured["mean"] == pytest.approx(exact, abs=0.005)
    assert measured["low"] < exact < measured["high"] < measured["low"] + 0.08


@pytest.mark.parametrize("n", [4, 16])
def test_a_fifth_that_nothing_solves_stays_unsolved(n: int) -> None:
    """Where the others are right nine times of ten; a beta law would say 86 % for n = 4."""
    counts = np.concatenate([np.zeros(200), binom.ppf((np.arange(800) + 0.5) / 800, n, 0.9)])
    model, bounds = map(Counts(counts, n).pass_at, (2 * n, 100 * n))
    assert model["mean"] == pytest.approx(0.8, abs=0.005)
    assert (model["claim"], bounds["claim"], bounds["mean"]) == ("model", "bounds", None)
    assert bounds["low"] < 0.8 < bounds["high"]


@pytest.mark.parametrize(("n", "k"), [(1, 2), (4, 8), (16, 32), (16, 128), (100, 200)])
def test_values_below_and_above_are_so_at_every_rate(n: int, k: int) -> None:
    """Also between the rates at which that is imposed, to within 0.2 points."""
    counts = Counts(np.arange(n + 1), n)
    exact = (np.arange(n + 1) > 0).astype(float)
    _, low, high = counts._values(0, exact, 1.0 - (1.0 - RATES) ** k)
    rates = np.linspace(0.0, 1.0, 3001)
    chances = binom.pmf(np.arange(n + 1)[:, None], n, rates)
    solved = 1.0 - (1.0 - rates) ** k
    assert (low @ chances - solved).max() < 0.002
    assert (solved - high @ chances).max() < 0.002


def test_copies_of_a_prompt_in_its_cluster_add_nothing() -> None:
    """So the interval is that of the prompts, where copies taken for prompts would halve it."""
    correct, problems = np.array([0, 1, 4, 2, 0, 0, 3, 4, 1, 0, 2, 4]), np.arange(12)
    copies = Counts(np.repeat(correct, 5), 4, np.repeat(problems, 5))
    for k in (1, 8):
        one, many = ([own.pass_at(k)[end] for end in ("mean", "low", "high")] for own in (Counts(correct, 4), copies))
        assert many == pytest.approx(one, abs=1e-6)
    assert estimate(of_clusters(np.repeat(correct, 5), np.repeat(problems, 5))) == estimate(correct)


@pytest.mark.parametrize(
    ("correct", "samples", "k", "labels", "error"),
    [
        ([1, 5], 4, 1, None, DataError),
        ([1, 0.5], 4, 1, None, DataError),
        ([1, np.nan], 4, 1, None, DataError),
        ([-1, 2], 4, 1, None, DataError),
        ([0, 0], [4, 0], 1, None, DataError),
        ([1], 4, 1, None, DataError),
        ([1, 2], 4, 1, ["a", "a"], DataError),
        ([1, 2], 4, 1, ["a"], DataError),
        ([1, 2], 4, 0, None, ConfigError),
        ([1, 2], 4, 1.5, None, ConfigError),
    ],
)
def test_what_is_no_count_is_refused(correct: Any, samples: Any, k: Any, labels: Any, error: type[Exception]) -> None:
    """With the prompt."""
    with pytest.raises(error):
        Counts(correct, samples, labels).pass_at(k)
