"""A finite model: one prompt with finitely many responses, so with atoms, ties or binary rewards.

The formulas are in docs/theory.md, optimum of a finite model.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import xlogy

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN, Distortion, RewindAndRepeat, Served, Standard, rewinds

ROUNDING = 1e-9  # the largest error of a sum of probabilities
STARTS = 256  # points of each kind in the scan for stationary points
SECTIONS = 64  # parts into which a bracket is cut
ULP = 2.0 * float(np.finfo(float).eps)


@dataclass(frozen=True, slots=True)
class FiniteOptimum:
    """The policy that maximises W − β·KL, with how well it solves log π/π_ref = R/β − log Z.

    ``residual`` is the largest violation of that equation; ``stationary_points`` is how many policies fulfil it.
    """

    policy: Array  # (Y,)
    beta: float
    kl: float  # nats
    win_rate: float
    residual: float
    stationary_points: int


@dataclass(frozen=True, eq=False)
class FiniteModel:
    """One prompt with finitely many responses: the ``reference`` probability and the reward of each, both (Y,).

    Raises DataError unless the probabilities are positive and sum to 1 and the rewards are finite.
    """

    reference: Array
    rewards: Array

    def __post_init__(self) -> None:
        reference, rewards = np.array(self.reference, float), np.array(self.rewards, float)
        if reference.ndim != 1 or reference.size == 0 or reference.shape != rewards.shape:
            raise DataError(
                f"a finite model needs one probability and one reward a response, "
                f"found shapes {reference.shape} and {rewards.shape}"
            )
        for name, values, good in (
            ("reference probability", reference, reference > 0),
            ("reward", rewards, np.isfinite(rewards)),
        ):
            if not good.all():
                first = int(np.argmin(good))
                raise DataError(f"{name} {first} is {values[first]}; probabilities are positive and rewards finite")
        if not abs(reference.sum() - 1.0) <= ROUNDING:
            raise DataError(f"the reference probabilities sum to {reference.sum():.12g}, not to 1")
        object.__setattr__(self, "reference", reference)
        object.__setattr__(self, "rewards", rewards)

    def calibrated(self) -> Array:
        """Return C(y) = P(r < r(y)) + P(r = r(y))/2 under the reference policy, shape (Y,)."""
        return self._ranks(Standard())[self._groups]

    def served(self, policy: ArrayLike, procedure: Served) -> Array:
        """Return T_π, the probability with which each response is served, shape (Y,).

        A reward group that takes the policy's CDF from p to p′ is served with h(p′) − h(p), shared among its responses
        in proportion to the policy. The threshold of Rewind-and-Repeat is the smallest reward whose reference CDF
        reaches the quantile. Raises ConfigError if ``policy`` is no distribution over the responses.
        """
        policy = self._checked(policy)
        mass_G = self._masses(policy)
        edges = _edges(mass_G)
        served_G = np.diff(self._distortion(procedure, edges).distortion(edges))
        share = np.divide(served_G, mass_G, out=np.zeros_like(mass_G), where=mass_G > 0)
        return policy * share[self._groups]

    def win_rate(self, policy: ArrayLike, procedure: Served, base: Served | None = None) -> float:
        """Return W = Σ_yz T_π(y) T⁰_ref(z) w(y, z); ``base`` serves the reference policy, by default ``procedure``.

        Raises ConfigError if ``policy`` is no distribution over the responses.
        """
        edges = _edges(self._masses(self._checked(policy)))
        return self._win_rate(edges, procedure, self._ranks(base or procedure))

    def kl(self, policy: ArrayLike) -> float:
        """Return KL(π‖π_ref) in nats. Raises ConfigError if ``policy`` is no distribution over the responses."""
        policy = self._checked(policy)
        return float(np.sum(xlogy(policy, policy / self.reference)))

    def gradient(self, policy: ArrayLike, procedure: Served, base: Served | None = None) -> Array:
        """Return R(y) = ∂W/∂π(y), shape (Y,), up to a constant: the best responses get 0.

        The constant is free because probabilities keep their sum. Raises ConfigError if ``policy`` is no distribution
        over the responses.
        """
        edges = _edges(self._masses(self._checked(policy)))
        reward_G = np.append(0.0, np.cumsum(self._rises(edges, procedure, self._ranks(base or procedure))))
        gradient_Y: Array = (reward_G - reward_G[-1])[self._groups]
        return gradient_Y

    def optimum(
        self, procedure: Served, *, beta: float | None = None, kl: float | None = None, base: Served | None = None
    ) -> FiniteOptimum:
        """Return the policy that maximises W − ``beta``·KL, or the one of these that spends ``kl`` nats.

        A scan in one dimension finds all stationary points, and the best is returned. Raises ConfigError unless
        exactly one of ``beta`` and ``kl`` is given, positive and finite, and if no β spends ``kl``.
        """
        ranks_G = self._ranks(base or procedure)
        if beta is None and kl is not None:
            return self._optimum_at_kl(procedure, ranks_G, kl)
        if beta is None or kl is not None:
            raise ConfigError(f"the optimum needs either beta or kl, found beta={beta} and kl={kl}")
        if not (beta > 0 and np.isfinite(beta)):
            raise ConfigError(f"the KL weight beta must be positive and finite, found {beta}")
        return self._optimum(procedure, ranks_G, beta)

    @cached_property
    def _groups(self) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        return np.unique(self.rewards, return_inverse=True)[1]

    @cached_property
    def _mass(self) -> Array:
        return self._masses(self.reference)

    def _masses(self, policy: Array) -> Array:
        return np.asarray(np.bincount(self._groups, weights=policy), float)

    def _checked(self, policy: ArrayLike) -> Array:
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
        return int(np.searchsorted(_edges(self._mass)[1:], procedure.quantile - ROUNDING))

    def _distortion(self, procedure: Served, edges: Array) -> Distortion:
        return procedure.given(float(edges[self._failing(procedure)])) if rewinds(procedure) else procedure

    def _ranks(self, base: Served) -> Array:
        """Return the chance of each reward group to win against the reference policy served by ``base``."""
        edges = _edges(self._mass)
        served = self._distortion(base, edges).distortion(edges)
        ranks_G: Array = 0.5 * (served[1:] + served[:-1])
        return ranks_G

    def _win_rate(self, edges: Array, procedure: Served, ranks_G: Array) -> float:
        return float(np.diff(self._distortion(procedure, edges).distortion(edges)) @ ranks_G)

    def _rises(self, edges: Array, procedure: Served, ranks_G: Array) -> Array:
        """Return by how much R rises from each reward group to the next, shape (G − 1,): h′(P_g)·(C⁰_{g+1} − C⁰_g).

        W = C⁰_G − Σ_g h(P_g)·(C⁰_{g+1} − C⁰_g). Under Rewind-and-Repeat h also depends on s, the CDF at the last
        failing group, and that group's rise collects ∂h/∂s.
        """
        steps, p = np.diff(ranks_G), edges[1:-1]
        if not rewinds(procedure) or self._failing(procedure) == 0:
            return np.asarray(self._distortion(procedure, edges).density(p) * steps)
        last, n = self._failing(procedure) - 1, procedure.n
        s, draws = p[last], float(procedure.expected_draws(p[last]))
        power = n if procedure.serve == "best" else 1  # below the threshold h = s^{n−power}·p^power
        fails = np.arange(len(p)) < last
        slope = np.where(fails, power * s ** (n - power) * p ** (power - 1), draws)
        below = (n - power) * s ** max(n - power - 1, 0) * p**power
        above = (n * s ** (n - 1) - draws) * np.divide(
            1.0 - p, 1.0 - s, out=np.zeros_like(p), where=(p >= s) & (p < 1.0)
        )
        rises: Array = slope * steps
        rises[last] += np.where(fails, below, above) @ steps
        return rises

    def _step(self, log_ratio_G: Array, procedure: Served, beta: float, ranks_G: Array) -> Array:
        """Return log π′/π_ref of π′ = π_ref e^{R(π)/β}/Z; the optimum is a fixed point."""
        edges = _edges(self._mass * np.exp(log_ratio_G))
        exponent = np.append(0.0, np.cumsum(self._rises(edges, procedure, ranks_G))) / beta
        return self._normalised(exponent)

    def _normalised(self, exponent: Array) -> Array:
        """Return the exponents (…, G) minus their log Σ_g m⁰_g e^{exponent}."""
        top = exponent.max(axis=-1, keepdims=True)
        normalised: Array = exponent - top - np.log(np.exp(exponent - top) @ self._mass)[..., None]
        return normalised

    def _optimum(self, procedure: Served, ranks_G: Array, beta: float) -> FiniteOptimum:
        stationary = self._stationary(procedure, ranks_G, beta)
        best, objective = None, -np.inf
        for log_ratio_G in stationary:
            mass_G = self._mass * np.exp(log_ratio_G)
            win_rate, kl = self._win_rate(_edges(mass_G), procedure, ranks_G), float(mass_G @ log_ratio_G)
            if win_rate - beta * kl > objective:
                objective = win_rate - beta * kl
                residual = float(np.abs(log_ratio_G - self._step(log_ratio_G, procedure, beta, ranks_G)).max())
                policy = self.reference * np.exp(log_ratio_G)[self._groups]
                best = FiniteOptimum(policy, beta, kl, win_rate, residual, len(stationary))
        assert best is not None
        return best

    def _optimum_at_kl(self, procedure: Served, ranks_G: Array, kl: float) -> FiniteOptimum:
        largest = -float(np.log(self._mass[-1]))
        if not 0 < kl < largest:
            raise ConfigError(
                f"a KL of {kl} nats is out of reach; the budget must be positive and below {largest:.6g}, "
                f"where every response has the best reward"
            )

        def excess(log_beta: float) -> float:
            return self._optimum(procedure, ranks_G, float(np.exp(log_beta))).kl - kl

        low = high = 0.0
        while excess(high) > 0:
            high += 2.0
        while (short := -excess(low)) > 0:
            if low < -40.0:
                raise ConfigError(
                    f"a KL of {kl} nats is out of reach: at beta = {np.exp(low):.1g} only {kl - short:.6g} are spent"
                )
            low -= 2.0
        found = self._optimum(procedure, ranks_G, float(np.exp(brentq(excess, low, high, xtol=1e-12))))
        if abs(found.kl - kl) > 1e-6:
            raise ConfigError(
                f"no beta spends {kl} nats: at beta = {found.beta:.6g} the optimum jumps across it, "
                f"to {found.kl:.6g} on one side"
            )
        return found

    def _stationary(self, procedure: Served, ranks_G: Array, beta: float) -> Array:
        """Return log π/π_ref of all stationary points of W − β·KL, shape (points, G)."""
        if rewinds(procedure):
            return self._rewound(procedure, ranks_G, beta)
        if isinstance(procedure, Standard):
            return self._normalised(ranks_G / beta)[None]
        return self._shot(procedure, ranks_G, beta)

    def _shot(self, procedure: Distortion, ranks_G: Array, beta: float) -> Array:
        """Return the stationary points under a rank procedure.

        They obey a recursion, log q_{g+1} − log q_g = h′(P_g)(C⁰_{g+1} − C⁰_g)/β with q = m/m⁰, so that everything
        follows from log q_1, which must make P_G = 1. At log q_1 = 0 all q ≥ 1; at minus the largest rise all q ≤ 1.
        Where h′ is larger at 0 than at 1 it goes down from log q_G instead: upwards, rounding would grow.
        """
        rises = np.diff(ranks_G) / beta
        span = float(procedure.density(np.linspace(0.0, 1.0, 1026)[1:-1]).max() * rises.sum())
        if span < ULP:
            return np.zeros((1, len(ranks_G)))  # what can be gained is below rounding
        lowest, highest = procedure.density([0.0, 1.0])
        down = bool(lowest > highest)
        side = 1.0 if down else -1.0
        graded = np.geomspace(1e-6 * min(span, 1.0), span, STARTS)
        starts = np.unique(np.concatenate([[0.0], side * graded, side * np.linspace(0.0, span, STARTS)]))
        over = self._shoot(starts, procedure, rises, down)[1] >= 1.0
        over[0], over[-1] = False, True  # this holds up to rounding
        crossings = np.flatnonzero(over[1:] != over[:-1])
        low, high, over_low = starts[crossings], starts[crossings + 1], over[crossings]
        while (high - low > ULP * np.maximum(np.abs(low), 1.0)).any():
            inside = np.linspace(low, high, SECTIONS)
            over = self._shoot(inside, procedure, rises, down)[1] >= 1.0
            over[0], over[-1] = over_low, ~over_low
            crossing = np.argmax(over != over_low, axis=0)
            points = np.arange(len(crossing))
            low, high = inside[crossing - 1, points], inside[crossing, points]
        return self._normalised(self._shoot(low, procedure, rises, down)[0].T)

    def _shoot(self, start: Array, procedure: Distortion, rises: Array, down: bool) -> tuple[Array, Array]:
        """Return log q_g, shape (G, *start.shape), and the whole mass, of the recursion from log q_1 or q_G."""
        order = slice(None, None, -1) if down else slice(None)
        first, *others = self._mass[order]
        log_q = [np.minimum(start, 600.0)]
        seen = first * np.exp(log_q[0])
        for mass, rise in zip(others, -rises[order] if down else rises, strict=True):
            cdf = np.maximum(1.0 - seen, 0.0) if down else np.minimum(seen, 1.0)
            log_q.append(np.minimum(log_q[-1] + procedure.density(cdf) * rise, 600.0))
            seen = seen + mass * np.exp(log_q[-1])
        return np.stack(log_q[order]), seen

    def _rewound(self, procedure: RewindAndRepeat, ranks_G: Array, beta: float) -> Array:
        """Return the stationary points under Rewind-and-Repeat.

        With mass s below the threshold, W = s^N·W_below + (1 − s^N)·W_above, where each side is served by a rank
        procedure of its own; so each has its optimum given s, and a scan over logit s finds where R fits between them.
        """
        fails, n = self._failing(procedure), procedure.n
        if fails == 0:
            return self._stationary(Standard(), ranks_G, beta)
        mass_below, mass_above = float(self._mass[:fails].sum()), float(self._mass[fails:].sum())
        below = FiniteModel(self._mass[:fails] / mass_below, np.arange(fails, dtype=float))
        above = FiniteModel(self._mass[fails:] / mass_above, np.arange(fails, len(ranks_G), dtype=float))
        failing = BestOfN(n) if procedure.serve == "best" else Standard()

        def log_ratio(logit: float) -> Array:
            log_s, log_pass = -np.logaddexp(0.0, -logit), -np.logaddexp(0.0, logit)
            beta_below = beta * np.exp(min((1 - n) * log_s, 300.0))  # βs/s^N, kept finite
            beta_above = beta / float(procedure.expected_draws(np.exp(log_s)))  # β(1 − s)/(1 − s^N)
            lower = below._stationary(failing, ranks_G[:fails], beta_below)[0]  # W is concave: there is one
            upper = above._stationary(Standard(), ranks_G[fails:], beta_above)[0]
            return np.concatenate([lower + log_s - np.log(mass_below), upper + log_pass - np.log(mass_above)])

        def misfit(logit: float) -> float:
            current = log_ratio(logit)
            error_G = current - self._step(current, procedure, beta, ranks_G)
            return float(error_G[fails] - error_G[fails - 1])

        middle = float(np.log(mass_below / mass_above))
        least, most = (float(np.log(part._mass[-1])) for part in (below, above))  # KL ≤ −log of the best group's mass

        def slack(logit: float) -> float:  # R rises by N·s^{N−1} at most from one side to the other
            return float(middle + least - n * np.exp((1 - n) * np.logaddexp(0.0, -logit)) / beta - logit)

        bottom = float(brentq(slack, middle + least - n / beta - 1.0, middle + 1.0))
        logits = [float(logit) for logit in np.linspace(bottom - 1.0, middle - most + 1.0, SECTIONS)]
        rising = [misfit(logit) > 0 for logit in logits]
        roots = [
            float(brentq(misfit, logits[i], logits[i + 1], xtol=1e-14))
            for i in range(SECTIONS - 1)
            if rising[i] != rising[i + 1]
        ]
        points: Array = np.stack([log_ratio(root) for root in roots])
        return points


def _edges(mass_G: Array) -> Array:
    """Return the CDF before the first reward group and after each, (G + 1,), from exactly 0 to exactly 1."""
    edges: Array = np.minimum(np.append(0.0, np.cumsum(mass_G)), 1.0)
    edges[-1] = 1.0
    return edges
