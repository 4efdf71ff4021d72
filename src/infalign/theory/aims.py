"""Aims: what is wanted of a policy before there are rewards, and the laws that this becomes on rewards.

An aim has a KL budget in nats, or the paper's β, or is Best-of-n itself. Its law of continuous ranks depends on nothing
else; its law over stored rollouts takes their rewards.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array, reward_table, tied_prompts
from infalign.method.laws import Law
from infalign.method.shapings import (
    Shaping,
    as_shaping,
    budget_beta,
    log_ratios,
    mean_kl,
    parse_shaping,
    rank_transform,
    shape_rollouts,
)
from infalign.method.transforms import Transformation
from infalign.theory.law import aligned_law, law_at_kl


def tilted(
    rewards_PK: ArrayLike,
    shaping: Shaping | Transformation | str,
    *,
    kl: float | None = None,
    beta: float | None = None,
) -> Law:
    """Return the law π_ref·e^{s/β}/Z of shaped rewards s over K stored rollouts of each of P prompts.

    ``shaping`` may be a spelling, such as ``"exp:10"`` or ``"raw"``. Give ``kl``, the mean KL in nats, or ``beta``, the
    weight of the KL beside the shaped rewards. Where rewards of a prompt tie, or the shaping is not of the rank, the KL
    is over the K rollouts; otherwise it is of continuous ranks, which K rollouts tell apart only to 1/K.

    Raises ConfigError for a budget that cannot be spent, DataError for rewards that are not finite.

    >>> law = tilted([[0, 0, 0, 1], [0, 1, 1, 1]], "raw", kl=0.2)
    >>> np.exp(law.log_ratios_PK).round(2)  # the probability of each rollout × K
    array([[0.52, 0.52, 0.52, 2.43],
           [0.27, 1.24, 1.24, 1.24]])
    """
    shaped_by = parse_shaping(shaping) if isinstance(shaping, str) else as_shaping(shaping)
    rewards = reward_table(rewards_PK)
    if (kl is None) == (beta is None):
        raise ConfigError("give exactly one of kl and beta")
    if beta is not None and not 0 < beta < np.inf:
        raise ConfigError(f"beta must be positive and finite, found {beta}")
    sorted_PK = np.sort(rewards, axis=1)
    found = float(beta) if beta is not None else stored_beta(shaped_by, sorted_PK, float(kl or 0.0)) / shaped_by.scale
    by_ranks = rank_transform(shaped_by) is not None and not tied_prompts(sorted_PK).any()
    spent = kl if kl is not None else _spending(shaped_by, sorted_PK)(found * shaped_by.scale)
    log_ratios_PK = log_ratios(shape_rollouts(shaped_by, rewards), found)
    return Law(log_ratios_PK, rewards, shaped_by, found, spent, "ranks" if by_ranks else "rollouts")


def stored_beta(shaping: Shaping, sorted_PK: Array, kl: float) -> float:
    """Return the β of raw Φ at which π_ref·e^{Φ/β}/Z spends ``kl`` nats, a mean over prompts with sorted rewards.

    Where rewards of a prompt tie, or Φ does not shape the rank, the law is that over its K rollouts; otherwise ranks
    are continuous, which K rollouts tell apart only to 1/K. Raises ConfigError for a budget that cannot be spent.
    """
    transform, tied_P = rank_transform(shaping), tied_prompts(sorted_PK)
    if transform is None or tied_P.all():
        return budget_beta(shape_rollouts(shaping, sorted_PK), kl) * shaping.scale
    start = law_at_kl(transform, kl=kl).beta
    if not tied_P.any():
        return start
    spending = _spending(shaping, sorted_PK)

    def excess(log_beta: float) -> float:
        return spending(float(np.exp(log_beta))) - kl

    low = high = float(np.log(start))
    while excess(high) > 0:
        high += 0.5
    while excess(low) < 0:
        low -= 0.5
    return float(np.exp(brentq(excess, low, high, xtol=1e-12))) if low < high else start


def _spending(shaping: Shaping, sorted_PK: Array) -> Callable[[float], float]:
    """Return the mean KL of these laws as a function of the β of raw Φ."""
    transform, tied_P = rank_transform(shaping), tied_prompts(sorted_PK)
    if transform is None or tied_P.all():
        shaped_PK = shape_rollouts(shaping, sorted_PK)
        return lambda beta: mean_kl(shaped_PK, beta / shaping.scale)
    if not tied_P.any():
        return lambda beta: aligned_law(transform, beta=beta).kl
    shaped_PK, share = shape_rollouts(shaping, sorted_PK[tied_P]), float(tied_P.mean())

    def spent(beta: float) -> float:
        return share * mean_kl(shaped_PK, beta / shaping.scale) + (1.0 - share) * aligned_law(transform, beta=beta).kl

    return spent
