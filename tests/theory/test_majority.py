"""Majority vote over answers, against all possible draws in exact fractions and other optimisers."""

import math
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from majority_optimum import optimal_answers
from scipy.optimize import minimize
from scipy.special import log_softmax, softmax

from infalign.core.errors import ConfigError, DataError
from infalign.method.procedures.majority import MajorityVote

POLICY = [Fraction(1, 2), Fraction(1, 3), Fraction(1, 12), Fraction(1, 12)]


def winners(votes: Iterable[int]) -> dict[int, Fraction]:
    """Return the chance of each answer that has the most votes."""
    counts = Counter(votes)
    first = [answer for answer, count in counts.items() if count == max(counts.values())]
    return dict.fromkeys(first, Fraction(1, len(first)))


def voted(policy: list[Fraction], n: int) -> list[Fraction]:
    """Return by enumeration of all draws the chance that each answer is served."""
    served = [Fraction(0)] * len(policy)
    for draws in product(range(len(policy)), repeat=n):
        for answer, chance in winners(draws).items():
            served[answer] += chance * math.prod(policy[draw] for draw in draws)
    return served


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_the_vote_is_that_of_all_possible_draws(n: int) -> None:
    """What is served agrees with every sequence of N draws, ties shared evenly, in exact fractions."""
    exact = [float(chance) for chance in voted(POLICY, n)]
    assert MajorityVote(n).served([float(p) for p in POLICY]) == pytest.approx(exact, abs=1e-14)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_weights_of_samples_are_those_of_all_possible_sets(n: int) -> None:
    """Each sample's weight is the share of all sets of N in which its answer wins, so the estimate is unbiased."""
    answers = [0, 2, 0, 1, 1, 0, 3]
    exact = [Fraction(0)] * len(answers)
    sets = list(combinations(range(len(answers)), n))
    for drawn in sets:
        for answer, chance in winners(answers[i] for i in drawn).items():
            samples = [i for i, given in enumerate(answers) if given == answer]
            for i in samples:
                exact[i] += chance / (len(samples) * len(sets))
    names = np.array([["a", "c", "a", "b", "b", "a", "d"]])
    for given in ([answers], names):
        assert MajorityVote(n).weights(given)[0] == pytest.approx([float(x) for x in exact], abs=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("kl", [0.05, 0.5])
def test_no_optimizer_finds_a_better_policy(n: int, kl: float) -> None:
    """A simplex search over log-odds, without derivatives, reaches the optimum's V − β·KL and not more."""
    reference, vote = np.array([0.3, 0.45, 0.15, 0.1]), MajorityVote(n)
    best = optimal_answers(reference, [1, 0, 0, 0], vote, kl=kl)
    assert best.residual < 1e-10
    assert float(best.policy @ np.log(best.policy / reference)) == pytest.approx(kl, abs=1e-12)

    def loss(log_odds: np.ndarray) -> float:
        odds = np.append(log_odds, 0.0) + np.log(reference)
        policy = softmax(odds)
        return best.beta * float(policy @ (log_softmax(odds) - np.log(reference))) - vote.served(policy)[0]

    starts = [np.array([2.0, 0.0, 0.0]), np.array([0.0, 2.0, 0.0])]
    search = {"method": "Nelder-Mead", "options": {"xatol": 1e-6, "fatol": 1e-10}}
    found = -min(minimize(loss, start, **search).fun for start in starts)
    assert best.value - best.beta * kl == pytest.approx(found, abs=1e-7)


def test_what_makes_no_sense_is_refused() -> None:
    """Worths that do not go with the answers, too few samples and a KL that cannot be spent are errors that say so."""
    with pytest.raises(DataError, match="one probability and one worth"):
        optimal_answers([0.5, 0.5], [1, 0, 0], MajorityVote(2), kl=0.1)
    with pytest.raises(DataError, match="at least 4 samples, found shape"):
        MajorityVote(4).weights([[1, 2, 3]])
    with pytest.raises(ConfigError, match=r"out of reach; the maximum is 0\.6931"):
        optimal_answers([0.5, 0.5], [1, 0], MajorityVote(2), kl=1.0)


def test_a_vote_of_many_is_exact_and_fast() -> None:
    """maj@64 of 128 with 40 answers: the chances sum to 1, and more votes are a greater chance; two answers by hand."""
    answers = np.repeat(np.arange(40), np.random.default_rng(0).multinomial(88, np.full(40, 1 / 40)) + 1)
    weights = MajorityVote(64).weights([answers])[0]
    chance = np.bincount(answers, weights)
    assert weights.sum() == pytest.approx(1.0, abs=1e-13)
    assert (np.diff(chance[np.argsort(np.bincount(answers), kind="stable")]) > -1e-13).all()
    two = MajorityVote(301).weights([[0] * 300 + [1] * 302])[0]
    sets = [math.comb(300, k) * math.comb(302, 301 - k) for k in range(301)]
    assert two[:300].sum() == pytest.approx(sum(sets[151:]) / math.comb(602, 301), abs=1e-12)
    assert MajorityVote(1000).served([0.5, 0.5]) == pytest.approx([0.5, 0.5], abs=1e-12)
