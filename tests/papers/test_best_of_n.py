"""The KL of Best-of-N: its bound, exact values and the estimate from stored samples."""

from itertools import product

import numpy as np
import pytest
from best_of_n import best_of_n_kl, best_of_n_kl_bound, best_of_n_kl_given, of_best
from finite_model import FiniteModel
from scipy.integrate import quad

from infalign.core.errors import ConfigError, DataError
from infalign.method.procedures import BestOfN, WorstOfN


@pytest.mark.parametrize("n", [1, 2, 5, 40])
@pytest.mark.parametrize("seed", range(5))
def test_best_of_n_spends_at_most_the_bound(n: int, seed: int) -> None:
    """With finitely many responses, ties or not, the exact KL of Best-of-n is at most log n − (n−1)/n."""
    rng = np.random.default_rng(seed)
    model = FiniteModel(rng.dirichlet(np.ones(12)), rng.integers(0, 8, size=12))
    assert 0.0 <= model.kl(model.served(model.reference, BestOfN(n))) + 1e-12 <= best_of_n_kl_bound(n) + 2e-12


@pytest.mark.parametrize("n", [2, 4, 16, 64])
@pytest.mark.parametrize("epsilon", [0.9, 0.25, 1e-2, 1e-5])
def test_the_kl_estimate_is_exact_with_one_atom_at_the_top(n: int, epsilon: float) -> None:
    """It is the integral of f·log f, f = n·u^{n−1}, up to the atom that is best, and the atom's own share."""

    def spent(u: float) -> float:
        density = n * u ** (n - 1)
        return float(density * np.log(density)) if density > 0 else 0.0

    below, _ = quad(spent, 0.0, 1.0 - epsilon, epsabs=1e-13, epsrel=1e-13, limit=500)
    atom = 1.0 - (1.0 - epsilon) ** n
    exact = below + atom * np.log(atom / epsilon)
    assert best_of_n_kl_given(np.log(epsilon), n) == pytest.approx(exact, abs=1e-10)


def test_limits_of_the_kl_estimate() -> None:
    """It is 0 for a certain response and for n = 1, and the bound as ε → 0, also where ε underflows."""
    rare = best_of_n_kl_given([np.log(1e-15), np.log(1e-300), -2000.0, -np.inf], 8)
    assert rare == pytest.approx(best_of_n_kl_bound(8), rel=1e-13)
    assert best_of_n_kl_given([[0.0], [-1e-12]], 8) == pytest.approx(np.array([[0.0], [1e-12]]), rel=1e-9)
    assert best_of_n_kl_given([0.0, -1.0, -900.0], 1).tolist() == [0.0, 0.0, 0.0]


def test_the_kl_from_stored_samples_is_unbiased() -> None:
    """Its mean over all possible sets of samples is the estimator's mean over what Best-of-n serves."""
    model = FiniteModel(np.array([0.2, 0.3, 0.1, 0.4]), np.array([1.0, 0.0, 2.0, 1.0]))  # two tie
    drawn = np.array(list(product(range(4), repeat=4)))
    probability = model.reference[drawn].prod(axis=1)
    logprobs = np.log(model.reference)
    expected = model.served(model.reference, BestOfN(3)) @ best_of_n_kl_given(logprobs, 3)
    assert probability @ best_of_n_kl(model.rewards[drawn], logprobs[drawn], 3) == pytest.approx(expected, abs=1e-12)


def test_the_kl_of_best_of_n_refuses_what_is_none() -> None:
    """No log-probability, other shapes, and an n that is no number of draws are errors."""
    for bad in (0.1, np.nan):
        with pytest.raises(DataError, match=f"log_probabilities has {bad:g}"):
            best_of_n_kl_given([-1.0, bad], 4)
    with pytest.raises(DataError, match=r"\(2, 3\) and log-probabilities \(2, 4\)"):
        best_of_n_kl(np.zeros((2, 3)), np.zeros((2, 4)), 2)
    with pytest.raises(DataError, match="it needs at least 4"):
        best_of_n_kl(np.zeros((2, 3)), np.zeros((2, 3)), 4)
    with pytest.raises(ConfigError, match="N = 0"):
        best_of_n_kl_bound(0)


@pytest.mark.parametrize(("n", "inner"), [(1, 5), (2, 2), (4, 6), (32, 4)])
def test_what_is_served_of_the_bests_is_their_distortion(n: int, inner: int) -> None:
    """Serving the worst or best of N of a policy that serves its best of n maps the CDF by one after the other."""
    p = np.linspace(0.0, 1.0, 11)
    for procedure in (WorstOfN(n), BestOfN(n)):
        expected = procedure.distortion(BestOfN(inner).distortion(p))
        assert of_best(procedure, inner).distortion(p) == pytest.approx(expected, abs=1e-9)
    assert BestOfN(n * inner).distortion(p) == pytest.approx(expected, abs=1e-12)
