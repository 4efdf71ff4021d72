"""A finite model: one prompt with finitely many responses, so with atoms, ties or binary rewards.

The formulas are in docs/derivations.md, optimum of a finite model.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import xlogy

from infalign import ConfigError, DataError, RewindAndRepeat, parse_procedure
from infalign.theory.contest import TILTS, settle, tilt_to_kl  # the iteration, here on finitely many responses

ROUNDING = 1e-9  # the largest error of a sum of probabilities


@dataclass(frozen=True, slots=True)
class FiniteOptimum:
    """The policy with the largest ``value`` at its KL; it solves log π/π_ref = R/β − log Z with R = ∂value/∂π.

    ``residual`` is the largest violation of that equation, in nats.
    """

    policy: np.ndarray  # (Y,)
    beta: float
    kl: float  # nats
    value: float  # what is maximized: the win rate, or what answers are worth
    residual: float


@dataclass(frozen=True, eq=False)
class FiniteModel:
    """One prompt with finitely many responses: the ``reference`` probability and the reward of each, both (Y,).

    Raises DataError unless the probabilities are positive and sum to 1 and the rewards are finite.
    """

    reference: np.ndarray
    rewards: np.ndarray

    def __post_init__(self) -> None:
        reference, rewards = checked_responses(self.reference, self.rewards, "reward")
        object.__setattr__(self, "reference", reference)
        object.__setattr__(self, "rewards", rewards)

    def calibrated(self) -> np.ndarray:
        """Return C(y) = P(r < r(y)) + P(r = r(y))/2 under the reference policy, shape (Y,)."""
        return self.win_rates_of_groups(parse_procedure("standard"))[self.group]

    def served(self, policy: ArrayLike, procedure: Any) -> np.ndarray:
        """Return T_π, the probability with which each response is served, shape (Y,).

        A reward group that takes the policy's CDF from p to p′ is served with h(p′) − h(p), shared among its responses
        in proportion to the policy. The threshold of Rewind-and-Repeat is the smallest reward whose reference CDF
        reaches the quantile. Raises ConfigError if ``policy`` is no distribution over the responses.
        """
        policy = self._checked(policy)
        mass_G = self.masses(policy)
        edges = _edges(mass_G)
        served_G = np.diff(self._distortion(procedure, edges).distortion(edges))
        share = np.divide(served_G, mass_G, out=np.zeros_like(mass_G), where=mass_G > 0)
        return policy * share[self.group]

    def win_rate(self, policy: ArrayLike, procedure: Any, base: Any = None) -> float:
        """Return W = Σ_yz T_π(y) T⁰_ref(z) w(y, z); ``base`` serves the reference policy, by default ``procedure``.

        Raises ConfigError if ``policy`` is no distribution over the responses.
        """
        return float(self.served(policy, procedure) @ self.win_rates_of_groups(base or procedure)[self.group])

    def kl(self, policy: ArrayLike) -> float:
        """Return KL(π‖π_ref) in nats. Raises ConfigError if ``policy`` is no distribution over the responses."""
        policy = self._checked(policy)
        return float(np.sum(xlogy(policy, policy / self.reference)))

    def gradient(self, policy: ArrayLike, procedure: Any, base: Any = None) -> np.ndarray:
        """Return R(y) = ∂W/∂π(y), shape (Y,), up to a constant: the best responses get 0.

        The constant is free because probabilities keep their sum. W = C⁰_G − Σ_g h(P_g)·(C⁰_{g+1} − C⁰_g), so from each
        reward group to the next R rises by h′(P_g)·(C⁰_{g+1} − C⁰_g). Under Rewind-and-Repeat h also depends on s, the
        CDF at the last failing group, and that group's rise collects ∂h/∂s. Raises ConfigError if ``policy`` is no
        distribution over the responses.
        """
        edges = _edges(self.masses(self._checked(policy)))
        steps, p = np.diff(self.win_rates_of_groups(base or procedure)), edges[1:-1]
        if isinstance(procedure, RewindAndRepeat) and self._failing(procedure) > 0:
            rises = _rises_of_rewind(procedure, self._failing(procedure) - 1, p, steps)
        else:
            rises = self._distortion(procedure, edges).density(p) * steps
        reward_G = np.append(0.0, np.cumsum(rises))
        return np.asarray((reward_G - reward_G[-1])[self.group])

    def optimum(self, procedure: Any, *, kl: float, base: Any = None) -> FiniteOptimum:
        """Return the policy with the largest win rate at ``kl`` nats. Raises ConfigError for a budget out of reach."""
        worse = 1.0 - self.calibrated()
        return best_at_kl(
            self.reference,
            lambda policy: self.win_rate(policy, procedure, base),
            lambda policy: self.gradient(policy, procedure, base),
            (np.sign(rate) * np.expm1(-rate * worse) for rate in TILTS),
            kl,
        )

    @cached_property
    def group(self) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        """The number of each response's reward group, responses of equal reward, in ascending order of the reward."""
        return np.unique(self.rewards, return_inverse=True)[1]

    def masses(self, policy: np.ndarray) -> np.ndarray:
        """Return the probability of each reward group, (G,)."""
        return np.asarray(np.bincount(self.group, weights=policy), float)

    def win_rates_of_groups(self, base: Any) -> np.ndarray:
        """Return the chance of each reward group to win against the reference policy served by ``base``, (G,)."""
        edges = _edges(self.masses(self.reference))
        served = self._distortion(base, edges).distortion(edges)
        return np.asarray(0.5 * (served[1:] + served[:-1]))

    def _checked(self, policy: ArrayLike) -> np.ndarray:
        policy = np.asarray(policy, float)
        if policy.shape != self.reference.shape:
            raise ConfigError(f"the policy has shape {policy.shape}, the model {self.reference.shape}")
        if not (policy >= 0).all():
            first = int(np.argmin(policy >= 0))
            raise ConfigError(f"policy probability {first} is {policy[first]}, not a probability")
        if not abs(policy.sum() - 1.0) <= ROUNDING:
            raise ConfigError(f"the policy's probabilities sum to {policy.sum():.12g}, not to 1")
        return policy

    def _failing(self, procedure: RewindAndRepeat) -> int:
        """Return how many reward groups lie below the threshold."""
        return int(np.searchsorted(_edges(self.masses(self.reference))[1:], procedure.quantile - ROUNDING))

    def _distortion(self, procedure: Any, edges: np.ndarray) -> Any:
        if isinstance(procedure, RewindAndRepeat):
            return procedure.given(float(edges[self._failing(procedure)]))
        return procedure


def checked_responses(reference: ArrayLike, values: ArrayLike, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the probabilities of responses and their ``values``, each of which is a ``name``, as arrays (Y,).

    Raises DataError unless the probabilities are positive and sum to 1 and the values are finite.
    """
    reference, values = np.array(reference, float), np.array(values, float)
    if reference.ndim != 1 or reference.size == 0 or reference.shape != values.shape:
        raise DataError(
            f"a finite model needs one probability and one {name} per response, "
            f"found shapes {reference.shape} and {values.shape}"
        )
    for what, found, good in (
        ("reference probability", reference, reference > 0),
        (name, values, np.isfinite(values)),
    ):
        if not good.all():
            first = int(np.argmin(good))
            raise DataError(f"{what} {first} is {found[first]}; probabilities are positive and {name}s finite")
    if not abs(reference.sum() - 1.0) <= ROUNDING:
        raise DataError(f"the reference probabilities sum to {reference.sum():.12g}, not to 1")
    return reference, values


def best_at_kl(
    reference: np.ndarray,
    value: Callable[[np.ndarray], float],
    gradient: Callable[[np.ndarray], np.ndarray],
    starts: Iterable[np.ndarray],
    kl: float,
) -> FiniteOptimum:
    """Return the best of the fixed points of π ← π_ref·e^{R(π)/β}/Z at ``kl`` nats, reached from tilts by ``starts``.

    ``gradient`` is R, that of ``value``. Raises ConfigError for a budget out of reach.
    """
    if not (kl > 0 and np.isfinite(kl)):
        raise ConfigError(f"the KL budget must be positive and finite, found {kl}")
    found, refusal = [], ConfigError()
    for start in starts:
        try:
            found.append(_fixed_point(reference, value, gradient, start, kl))
        except ConfigError as error:  # the start, or the R of a trial step, cannot spend the budget
            refusal = error
    if not found:
        raise refusal
    return max(found, key=lambda one: one.value)


def _fixed_point(
    reference: np.ndarray,
    value: Callable[[np.ndarray], float],
    gradient: Callable[[np.ndarray], np.ndarray],
    start: np.ndarray,
    kl: float,
) -> FiniteOptimum:
    beta, log_ratio = tilt_to_kl(start, reference, kl)

    def step(policy: np.ndarray) -> np.ndarray:
        nonlocal beta, log_ratio
        policy = np.maximum(policy, 0.0)  # a trial step may leave the simplex
        beta, log_ratio = tilt_to_kl(gradient(policy / policy.sum()), reference, kl, beta)
        return np.asarray(reference * np.exp(log_ratio))

    settle(step, reference * np.exp(log_ratio))
    policy = reference * np.exp(log_ratio)
    policy /= policy.sum()
    misfit = log_ratio - gradient(policy) / beta
    misfit -= policy @ misfit
    return FiniteOptimum(policy, beta, kl, value(policy), float(np.abs(misfit).max()))


def _rises_of_rewind(procedure: RewindAndRepeat, last: int, p: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return by how much R rises after each reward group, the ``last`` failing one given, (G − 1,)."""
    n, s, draws = procedure.n, p[last], float(procedure.expected_draws(p[last]))
    power = n if procedure.serve == "best" else 1  # below the threshold h = s^{n−power}·p^power
    fails = np.arange(len(p)) < last
    slope = np.where(fails, power * s ** (n - power) * p ** (power - 1), draws)
    below = (n - power) * s ** max(n - power - 1, 0) * p**power
    above = (n * s ** (n - 1) - draws) * np.divide(1.0 - p, 1.0 - s, out=np.zeros_like(p), where=(p >= s) & (p < 1.0))
    rises: np.ndarray = slope * steps
    rises[last] += np.where(fails, below, above) @ steps
    return rises


def _edges(mass_G: np.ndarray) -> np.ndarray:
    """Return the CDF before the first reward group and after each, (G + 1,), from exactly 0 to exactly 1."""
    edges: np.ndarray = np.minimum(np.append(0.0, np.cumsum(mass_G)), 1.0)
    edges[-1] = 1.0
    return edges
