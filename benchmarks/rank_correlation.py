"""What a policy wins that knows less than the rank, and how much a measured policy knows.

The policy sees s = ρz + √(1 − ρ²)ε with z = N⁻¹(u) the normal score of the rank and ε standard normal, and is
∝ exp(E[Φ(u) | s]/β): what regression on Φ ends at with infinite data. ρ = 1 is theory's policy, which knows the rank.
Served are true ranks, so with ρ < 1 the same KL buys less (docs/derivations.md, knowledge).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

from infalign import ConfigError, Tabulated, law_at_kl

SCORES = np.linspace(-8.0, 8.0, 401)
KNOTS = slice(50, 351, 3)  # of the table of log f, between normal scores of −6 and 6
MIN_CORRELATION, MAX_CORRELATION = 0.02, 0.99  # ρ; above, the signal's noise is finer than SCORES
TABLE_CORRELATIONS = np.array([MIN_CORRELATION, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, MAX_CORRELATION])
NEARBY = 1.1  # times the KL at which win rates are known besides


def information(log_density: np.ndarray) -> np.ndarray:
    """Return f log f − f + 1, which integrates to the KL without cancellation."""
    return np.asarray(np.exp(log_density) * log_density - np.expm1(log_density))


def normal_density(score: np.ndarray) -> np.ndarray:
    """Return the density of the standard normal law."""
    return np.asarray(np.exp(-0.5 * np.square(score)) / np.sqrt(2.0 * np.pi))


@dataclass(frozen=True, slots=True)
class CorrelatedLaw:
    """The law of the true rank u under a policy that knows ranks with correlation ``rho`` and spends ``kl`` nats.

    ``law.kl`` is the KL of u alone, which is below ``kl``: the rest is spent on the noise.
    """

    rho: float
    kl: float
    beta: float  # of the paper's raw Φ
    law: Any  # as `law_at_kl` returns it


def law_at_rank_correlation(transform: Any, *, rho: float, kl: float) -> CorrelatedLaw:
    """Return the law of a policy of knowledge ``rho`` at ``kl`` nats, trained on ``transform``.

    Raises ConfigError for a ρ outside [0.02, 0.99] and other than 1, and for a budget out of reach.
    """
    if rho == 1.0:
        law = law_at_kl(transform, kl=kl)
        return CorrelatedLaw(rho, kl, law.beta, law)
    if not MIN_CORRELATION <= rho <= MAX_CORRELATION:
        raise ConfigError(f"ρ must be 1 or between {MIN_CORRELATION} and {MAX_CORRELATION}, found {rho:g}")
    if not (kl > 0 and np.isfinite(kl)):
        raise ConfigError(f"the KL budget must be positive and finite, found {kl}")
    spread = np.sqrt(1.0 - rho**2)
    distance = (SCORES - rho * SCORES[:, None]) / spread
    chance = normal_density(distance) * ((SCORES[1] - SCORES[0]) / spread)  # of z (columns) given s, or of s given z
    v = ndtr(-SCORES)
    phi = np.where(SCORES > 0, transform.drop(v), transform(ndtr(SCORES)) - transform(1.0))
    expected = chance @ (phi / np.ptp(phi))
    expected -= expected.max()
    weight = normal_density(SCORES) * (SCORES[1] - SCORES[0])

    def log_ratio(log_beta: float) -> np.ndarray:
        exponent = expected * np.exp(-log_beta)
        return np.asarray(exponent - np.log(weight @ np.exp(exponent)))

    def excess(log_beta: float) -> float:
        return float(weight @ information(log_ratio(log_beta))) - kl

    if excess(-40.0) < 0:
        raise ConfigError(f"{transform.name} cannot spend {kl:g} nats at ρ = {rho:g}")
    log_beta = float(brentq(excess, -40.0, 40.0, xtol=1e-12))
    ratio = np.exp(log_ratio(log_beta))
    density = chance @ ratio  # f(u) at u = N(z): the mean of the ratio over s given z
    slope = (chance * (distance * (rho / spread))) @ ratio / density  # of log f by z
    v, log_f, slope = v[KNOTS][::-1], np.log(density[KNOTS])[::-1], slope[KNOTS][::-1]
    by_v = -slope / normal_density(SCORES[KNOTS][::-1])
    table = Tabulated(
        f"{transform.name}, ρ = {rho:.2g}",
        np.concatenate([[0.0], v, [1.0]]),
        np.pad(log_f, 1, mode="edge"),
        np.pad(by_v, 1),
    )
    law = law_at_kl(table, kl=float(weight @ information(np.log(density))))  # with a β of 1 it is the density itself
    return CorrelatedLaw(rho, kl, float(np.exp(log_beta) * np.ptp(phi) * transform.scale), law)


def fitted_rank_correlations(
    transform: Any, procedure: Any, kls: Sequence[float] | np.ndarray, win_rates: Sequence[float] | np.ndarray
) -> np.ndarray:
    """Return the ρ at which a policy trained on ``transform`` has each pair of a KL, in nats, and a win rate.

    The first pair is the measured one, the others are near it, such as means over prompts drawn with replacement: win
    rates are interpolated in log KL around the first. A policy that wins no more than the base has ρ = 0, one that wins
    as much as theory promises ρ = 1.
    """
    kl = float(kls[0])
    near = np.array([kl, NEARBY * kl])
    nothing = 0.5  # what the base wins against itself
    known = [
        [law_at_rank_correlation(transform, rho=float(rho), kl=float(one)).law.win_rate(procedure) for one in near]
        for rho in (*TABLE_CORRELATIONS, 1.0)
    ]
    table = np.array([[nothing, nothing], *known])
    slopes = (table[:, 1] - table[:, 0]) / np.log(NEARBY)
    rising = np.maximum.accumulate(table[:, :1] + slopes[:, None] * np.log(np.asarray(kls) / kl), axis=0)
    rhos = np.array([0.0, *TABLE_CORRELATIONS, 1.0])
    return np.array([np.interp(wins, rising[:, i], rhos) for i, wins in enumerate(win_rates)])


def supported_correlation(rho: float) -> float:
    """Return the ρ nearest to a fitted one for which `law_at_rank_correlation` has a policy."""
    return 1.0 if rho > (1.0 + MAX_CORRELATION) / 2.0 else float(np.clip(rho, MIN_CORRELATION, MAX_CORRELATION))
