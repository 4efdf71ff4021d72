"""A law says log π*/π_ref of every rollout, spends what it says, and refuses what is none."""

import numpy as np
import pytest
from scipy.special import rel_entr, softmax

from infalign import Law, best_of, tilted
from infalign.core.errors import ConfigError, DataError
from infalign.method.procedures import BestOfN
from infalign.method.shapings import Raw, parse_shaping, shape_rollouts

TIED_PK = np.random.default_rng(0).integers(0, 5, size=(6, 16)).astype(float)


@pytest.mark.parametrize("name", ["exp:10", "identity", "raw", "par"])
def test_a_tilted_law_spends_its_budget_over_the_rollouts(name: str) -> None:
    """Rewards tie, so that π* ∝ e^{s/β} over the K rollouts has the KL; the paper's β is the other times the scale."""
    law, shaping = tilted(TIED_PK, name, kl=0.3), parse_shaping(name)
    probabilities = softmax(shape_rollouts(shaping, TIED_PK) / law.beta, axis=1)
    assert np.exp(law.log_ratios_PK) / 16 == pytest.approx(probabilities)
    assert (probabilities * np.log(16 * probabilities)).sum(axis=1).mean() == pytest.approx(0.3)
    assert (law.kl, law.kl_over, law.paper_beta) == (0.3, "rollouts", law.beta * shaping.scale)
    assert tilted(TIED_PK, name, beta=law.beta).kl == pytest.approx(0.3)


def test_best_of_n_has_exact_zeros() -> None:
    """The two lowest of five are never the best of three; the KL is that of ranks unless rewards tie."""
    law = best_of([[3.0, 1.0, 5.0, 4.0, 2.0]], 3)
    assert np.exp(law.log_ratios_PK) / 5 == pytest.approx(BestOfN(3).weights(law.rewards_PK))
    assert np.isneginf(law.log_ratios_PK).sum() == 2
    assert (law.kl, law.kl_over) == (pytest.approx(np.log(3) - 2 / 3), "ranks")
    tied, served = best_of(TIED_PK, 3), BestOfN(3).weights(TIED_PK)
    assert (tied.kl, tied.kl_over) == (pytest.approx(rel_entr(served, 1 / 16).sum(axis=1).mean()), "rollouts")


def test_what_is_no_law_is_refused() -> None:
    """Rewards of a wrong shape or not finite, a budget out of reach, both strengths or none, fewer rollouts than n."""
    for rewards in ([0.0, 1.0], [0.0, np.nan], [[0.0], [1.0]], [[0.0, np.nan]], []):
        for make in (lambda found: tilted(found, "raw", kl=0.1), lambda found: best_of(found, 2)):
            with pytest.raises(DataError, match="prompts × 2 rollouts or more, found"):
                make(rewards)
            with pytest.raises(DataError, match="inf for prompt 2"):
                make([[np.nan, np.nan], [0.0, 1.0], [0.0, np.inf]])
    with pytest.raises(DataError, match="prompts have 2 to 3 rewards"):
        tilted([[0, 1], [0, 1, 2]], "raw", kl=0.1)
    with pytest.raises(ConfigError, match="cannot spend a KL of 9 nats"):
        tilted(TIED_PK, "raw", kl=9.0)
    for given in ({}, {"kl": 0.1, "beta": 0.1}):
        with pytest.raises(ConfigError, match="exactly one of kl and beta"):
            tilted(TIED_PK, "raw", **given)
    with pytest.raises(ConfigError, match="n of at least 2, found 1"):
        best_of(TIED_PK, 1)
    with pytest.raises(DataError, match="best-of-20 cannot be estimated from 16 samples"):
        best_of(TIED_PK, 20)
    with pytest.raises(DataError, match=r"a log-ratio for each reward, found shapes \(2,\) and \(3,\)"):
        Law(np.zeros(2), np.zeros(3), Raw(), 1.0, 0.1, "rollouts")
