"""The value of a beginning: where nothing or all is known, by simulation, and that e^V is a martingale."""

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from infalign.method.shapings import parse_shaping
from infalign.method.values import log_values, token_targets
from infalign.training.solvers.qrpo import regression_targets

K = 64
BETAS = {"identity": 0.25, "exp:10": 7000.0, "exp:-10": 0.3}  # about half a nat each
SHAPINGS = pytest.mark.parametrize("shaping", BETAS)


def targets(shaping: str) -> np.ndarray:
    """Return the T of K rollouts with distinct rewards, in random order."""
    rewards = np.random.default_rng(0).permutation(K).astype(float)
    return regression_targets(rewards[None], parse_shaping(shaping), BETAS[shaping])[0]


@SHAPINGS
def test_what_nothing_is_known_of_is_worth_nothing(shaping: str) -> None:
    """E[e^T] = 1, up to what the quantile function between K ranks leaves."""
    assert log_values(np.array([-1.0, 0.0, 2.0]), np.zeros(3), targets(shaping)) == pytest.approx(0.0, abs=0.02)


@SHAPINGS
def test_what_is_known_is_worth_its_target(shaping: str) -> None:
    """With the rank itself as the reading, V = T there."""
    found = np.sort(targets(shaping))
    read = ndtri((np.arange(K) + 0.5) / K)
    assert log_values(read, np.full(K, 0.9999), found) == pytest.approx(found, abs=0.02)


@SHAPINGS
@pytest.mark.parametrize("rho", [0.2, 0.5, 0.8])
def test_values_are_those_of_simulated_ranks(shaping: str, rho: float) -> None:
    """By brute force: the mean of e^T over ranks drawn given the reading; and e^V is 1 in the mean over readings."""
    rng, found = np.random.default_rng(1), targets(shaping)
    read = np.array([-1.5, 0.0, 1.0])
    scores = rho * read + np.sqrt(1 - rho**2) * rng.standard_normal((400_000, 1))
    drawn = np.interp(ndtr(scores), (np.arange(K) + 0.5) / K, np.sort(found))
    assert log_values(read, np.full(3, rho), found) == pytest.approx(np.log(np.exp(drawn).mean(0)), abs=0.02)
    many = rng.standard_normal(100_000)
    assert np.exp(log_values(many, np.full(many.size, rho), found)).mean() == pytest.approx(1.0, abs=0.03)


def test_tokens_add_up_to_what_is_read_at_the_end() -> None:
    """Whatever is read on the way; where the end tells the rank, that is T."""
    rng, found = np.random.default_rng(2), targets("exp:10")
    read, rho = np.append(rng.standard_normal(8), ndtri((40 + 0.5) / K)), np.append(np.linspace(0.1, 0.9, 8), 0.9999)
    added = token_targets(read, rho, found)
    assert (added.shape, added.sum()) == ((9,), pytest.approx(np.sort(found)[40], abs=0.02))
    assert token_targets(read[:4], rho[:4], found).sum() == pytest.approx(log_values(read[3:4], rho[3:4], found)[0])
