"""What a policy wins, how that changes with the policy, and the policy that wins most at a KL budget.

W = ∫ h₀ dh(F), where h₀(u) is the chance that rank u beats what the base serves. The policy with the largest W at its
KL has f ∝ e^{Φ/β} with Φ = ∂W/∂f at itself (docs/derivations.md, optimum of a rank procedure). At
a fixed KL the map F → Φ → f → F all but contracts, also where it cycles at a fixed β, so Anderson's acceleration (J.
ACM 12, 1965) takes it to rounding in about 15 steps.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.procedures import Served, distortion, rewinds
from infalign.method.quadrature import Panels, graded
from infalign.method.roots import LOWEST_LOG_BETA, find_log_beta
from infalign.theory.law import information, normalized

INSIDE = 1e-15  # densities are evaluated from here to 1 − here: a user's density may be infinite at an end
MAX_STEPS, PATIENCE = 300, 60  # of them without progress
REMEMBERED_STEPS, SHARE = 5, 0.5  # SHARE of the change that a step takes: undamped, large budgets do not settle
SETTLED, NEARLY_SETTLED = 1e-13, 1e-3  # largest change of F in a step
MAX_REFINEMENTS, MAX_PANELS, ACCURACY = 40, 400, 1e-11  # of integrals
LOG_BETAS, FIRST_STEP = (LOWEST_LOG_BETA, -LOWEST_LOG_BETA), 0.1  # for a Φ of range 1
TILTS = (1.0, 20.0, -20.0)  # Φ ∝ e^{tu} of the first policies: from several, since several may solve the equation


@dataclass(frozen=True, slots=True, eq=False)
class RankPolicy:
    """The law e^{Φ/``beta``}: its CDF and log density at the nodes of ``panels``, (panels, nodes).

    ``below`` is the CDF at the base quantile that Rewind-and-Repeat compares with, 0 for other procedures.
    """

    panels: Panels
    log_density: Array
    cdf: Array
    below: float
    beta: float

    @property
    def kl(self) -> float:
        """KL to the base policy in nats."""
        return float(np.sum(self.panels.weight * information(self.log_density)))


@dataclass(frozen=True, eq=False)
class Contest:
    """A policy served by ``procedure`` against the base policy served by ``base``. ConfigError if one has no law."""

    procedure: Served
    base: Served

    def __post_init__(self) -> None:
        for served in (self.procedure, self.base):
            distortion(served)

    @property
    def edges(self) -> tuple[float, ...]:
        """The 1 − u at which the density of what the base serves, or Φ, jumps."""
        return tuple({1.0 - one.quantile for one in (self.procedure, self.base) if rewinds(one)})

    @property
    def quantile(self) -> float:
        """What Rewind-and-Repeat compares with, 0 for other procedures."""
        return self.procedure.quantile if rewinds(self.procedure) else 0.0

    def win_rate(self, policy: RankPolicy) -> float:
        panels, s = policy.panels, policy.below
        p = self._beside_threshold(panels, policy.cdf, s)
        served = distortion(self.procedure, lambda _: s).density(p) * np.exp(policy.log_density) * panels.weight
        return float(np.sum(served * distortion(self.base).distortion(panels.u)) / np.sum(served))

    def gradient(self, panels: Panels, cdf: Array, below: float) -> tuple[Array, Array, float]:
        """Return Φ = ∂W/∂f with Φ(1) = 0 and Φ′ at the nodes, and how far Φ jumps at the quantile of a threshold."""
        rival = distortion(self.base).density(np.clip(panels.u, INSIDE, 1.0 - INSIDE))
        p = self._beside_threshold(panels, cdf, below)
        if not rewinds(self.procedure):
            slope = self.procedure.density(p) * rival
            return -panels.remaining(slope), slope, 0.0
        fails, s, n = self._fails(panels), below, self.procedure.n
        slope = self.procedure.given(s).density(p) * rival
        powers = s ** np.arange(n)
        draws, more = float(powers.sum()), float(np.sum(np.arange(1, n) * powers[:-1]))
        failing = (n - 1) * s ** (n - 2) * p if self.procedure.serve == "last" and n > 1 else 0.0
        by_s = np.where(fails, failing, n * powers[-1] - draws + (p - s) * more)  # ∂h/∂s
        jump = float(np.sum(panels.weight * by_s * rival))
        return -panels.remaining(slope) - np.where(fails, jump, 0.0), slope, jump

    def best(self, kl: float) -> RankPolicy:
        """Return the policy with the largest W at ``kl`` nats. Raises ConfigError for a budget out of reach."""
        panels = graded(12 + int(min(kl, 1e3) / np.log(2.0)), edges=np.array(self.edges))
        policies: list[RankPolicy] = []
        for rate in TILTS:
            with suppress(ConfigError):  # of a steep one, which may not spend the budget
                start = self._tilted(panels, np.sign(rate) * np.expm1(-rate * panels.v), kl, None)
                policies.append(self._settled(start, kl))
        if not policies:
            raise self.not_found(kl)
        return self.near(max(policies, key=self.win_rate), kl)

    def near(self, policy: RankPolicy, kl: float) -> RankPolicy:
        """Return what the map leads to from ``policy`` at ``kl`` nats, on panels that resolve it. Raises as `best`."""
        for _ in range(MAX_REFINEMENTS):
            policy = self._settled(policy, kl)
            panels, density = policy.panels, np.exp(policy.log_density)
            rough = np.zeros(len(panels.start), bool)
            for values in (density, self.gradient(panels, policy.cdf, policy.below)[1]):
                rough |= self._tails(panels, values) > ACCURACY * np.sum(panels.weight * np.abs(values))
            if not rough.any() or len(rough) > MAX_PANELS:
                return policy
            finer = panels.split(rough)
            cdf = np.clip(panels.integral_to(density, finer.u), 0.0, 1.0)
            policy = RankPolicy(finer, cdf, cdf, policy.below, policy.beta)  # its density is settled next
        return self._settled(policy, kl)

    def _tails(self, panels: Panels, values: Array) -> Array:
        """Return what each panel's integral misses; a jump at one of the edges is none of it."""
        cuts = np.searchsorted(panels.u[:, 0], sorted(1.0 - edge for edge in self.edges)).tolist()
        ranges = [slice(*ends) for ends in pairwise([0, *cuts, len(values)])]
        pieces = [Panels(panels.start[at], panels.width[at], panels.upper[at]).tails(values[at]) for at in ranges]
        return np.concatenate(pieces)

    def _fails(self, panels: Panels) -> NDArray[np.bool_]:
        """Return which nodes lie below the `quantile`."""
        return np.where(panels.upper[:, None], panels.v > 1.0 - self.quantile, panels.u < self.quantile)

    def _beside_threshold(self, panels: Panels, cdf: Array, below: float) -> Array:
        """Return F within (0, 1) and on the side of ``below`` on which its rank is, whatever rounding says."""
        inside = np.clip(cdf, INSIDE, 1.0 - INSIDE)
        return np.where(self._fails(panels), np.minimum(inside, below * (1.0 - 1e-15)), np.maximum(inside, below))

    def _settled(self, policy: RankPolicy, kl: float) -> RankPolicy:
        """Return the fixed point that the map leads to from the CDF of ``policy``, at ``kl`` nats. Raises as `best`."""
        latest = policy

        def step(state: Array) -> Array:
            nonlocal latest
            below = float(np.clip(state[-1], 1e-300, 1.0 - INSIDE))
            phi, _, _ = self.gradient(policy.panels, state[:-1].reshape(policy.cdf.shape), below)
            latest = self._tilted(policy.panels, phi, kl, latest.beta)
            return np.append(latest.cdf, latest.below)

        try:
            settle(step, np.append(policy.cdf, policy.below))
        except ConfigError as error:  # also one of a trial step, whose Φ cannot spend the budget
            raise self.not_found(kl) from error
        return latest

    def not_found(self, kl: float) -> ConfigError:
        return ConfigError(
            f"the optimum for {self.procedure.name} at {kl:g} nats is beyond what can be computed; give a smaller KL"
        )

    def _tilted(self, panels: Panels, phi: Array, kl: float, guess: float | None) -> RankPolicy:
        """Return the policy ∝ e^{Φ/β} that spends ``kl`` nats, with β near a ``guess``."""
        beta, log_density = tilt_to_kl(phi, panels.weight, kl, guess)
        density = np.exp(log_density)
        below = float(np.sum((panels.weight * density)[self._fails(panels)]))
        cdf = np.clip(panels.cumulative(density), 0.0, 1.0)
        return RankPolicy(panels, log_density, cdf, below, beta)


def tilt_to_kl(phi: Array, weight: Array, kl: float, guess: float | None = None) -> tuple[float, Array]:
    """Return β and the log density of the law ∝ e^{Φ/β} that spends ``kl`` nats.

    The ``weight`` of the values of ``phi`` sums to 1, and ``guess`` is a β nearby. Raises ConfigError if no β spends so
    much.
    """
    range_of_phi = float(np.ptp(phi))
    if not range_of_phi > 0:
        raise ConfigError(f"all ranks are worth the same, so a KL of {kl:g} nats gains nothing")
    phi = phi / range_of_phi

    def kl_at(log_beta: float) -> float:
        return float(np.sum(weight * information(normalized(phi * np.exp(-log_beta), weight))))

    start = 0.0 if guess is None else float(np.log(guess / range_of_phi))
    root = find_log_beta(kl_at, kl, start=start, step=FIRST_STEP, within=LOG_BETAS)
    if not root.found:
        raise ConfigError(f"a KL of {kl:g} nats is out of reach; the maximum is {root.kl:.4g}")
    return range_of_phi * float(np.exp(root.log_beta)), normalized(phi * np.exp(-root.log_beta), weight)


def settle(step: Callable[[Array], Array], state: Array) -> None:
    """Iterate ``step`` to a fixed point by Anderson's acceleration. Raises ConfigError if it does not settle."""
    states: list[Array] = []
    changes: list[Array] = []
    moves: list[float] = []
    for _ in range(MAX_STEPS):
        change = step(state) - state
        moves.append(float(np.abs(change).max()))
        if moves[-1] < SETTLED or min(moves[-PATIENCE:]) > min(moves[:-PATIENCE], default=np.inf):
            break
        states, changes = [*states, state][-REMEMBERED_STEPS:], [*changes, change][-REMEMBERED_STEPS:]
        state = state + SHARE * change
        if len(states) > 1:
            bend, way = np.diff(changes, axis=0).T, np.diff(states, axis=0).T
            state = state - (way + SHARE * bend) @ np.linalg.lstsq(bend, change, rcond=1e-14)[0]
    if moves[-1] > NEARLY_SETTLED:
        raise ConfigError("no policy was found at this KL; choose another budget")
