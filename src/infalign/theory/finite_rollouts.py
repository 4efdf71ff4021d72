"""What calibration on a finite number of rollouts costs."""

from dataclasses import dataclass, field

import numpy as np

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array
from infalign.method.procedures import RankProcedure, looks_at_ranks
from infalign.method.procedures.base import cumulated
from infalign.method.roots import find_log_beta
from infalign.method.transforms import Transformation, at_ranks
from infalign.theory.law import law_at_kl

LOG_BETAS = (-60.0, 40.0)  # log β for the normalized Φ: from all mass on the best interval to a KL below 1e-30
ROUGH = 1e-6  # share of the loss that an interval may be uncertain by without nodes of its own
QUADRATURE = 1e-6  # change of the mean loss, as a share of it, at which there are enough nodes: far below Monte Carlo's
MAX_NODES = 256  # nodes an interval; where h′ jumps, the error is then far below the Monte-Carlo error
PILOT = 32  # prompts from which the number of nodes and the price of KL are found
CHUNK = 2**17  # nodes in memory at a time


@dataclass(frozen=True, slots=True)
class FiniteRollouts:
    """What calibration on K reference rollouts per prompt costs at one KL budget.

    ``win_rates`` has one entry a prompt, W_p − (dW/dKL)·(KL_p − ``kl``): a prompt that spends more of the shared budget
    is charged for it. With the same seed, prompts and K the prompts are the same, so that the difference of two
    transformations has the standard error of the difference of their ``win_rates``.
    """

    transform: Transformation
    procedure: RankProcedure
    base: RankProcedure
    beta: float  # the weight of the KL for the paper's raw Φ
    kl: float  # nats, the mean over prompts
    win_rates: Array = field(repr=False)  # (P,)

    @property
    def win_rate(self) -> float:
        return float(self.win_rates.mean())

    @property
    def standard_error(self) -> float:
        """The standard error of ``win_rate`` and of ``lost``, over the simulated prompts."""
        return float(self.win_rates.std(ddof=1) / np.sqrt(len(self.win_rates)))

    @property
    def limit(self) -> float:
        """The win rate with exact calibration at the same KL."""
        return law_at_kl(self.transform, kl=self.kl).win_rate(self.procedure, self.base)

    @property
    def lost(self) -> float:
        """The win rate that exact calibration would add."""
        return self.limit - self.win_rate


def simulated_gaps(rollouts: int, *, prompts: int = 1000, seed: int = 0) -> Array:
    """Return the lengths D ~ Dirichlet(1, …, 1) into which the ranks of K references cut [0, 1], (prompts, K + 1).

    Raises ConfigError for fewer than 1 rollout or 2 prompts.
    """
    if rollouts < 1 or prompts < 2:
        raise ConfigError(f"needs at least 1 rollout and 2 prompts, found {rollouts} and {prompts}")
    return np.random.default_rng(seed).dirichlet(np.ones(rollouts + 1), prompts)


def finite_rollouts(
    transform: Transformation,
    procedure: RankProcedure,
    lengths_PC: Array,
    *,
    kl: float,
    base: RankProcedure | None = None,
) -> FiniteRollouts:
    """Return the win rate of the policy that is optimal for Φ(Ĉ), with Ĉ from K references per prompt.

    The references of a prompt cut [0, 1] into K + 1 intervals of ``lengths_PC``, see `simulated_gaps`, inside which
    Ĉ = c/K cannot tell responses apart: the policy has density e_c/Σ_c D_c e_c with e_c = exp(Φ(c/K)/β). One β serves
    all prompts and spends ``kl`` nats on average. The win rate is the true one, for continuous rewards, against the
    base served by ``base``, by default as the policy. Raises ConfigError for a budget that K rollouts cannot spend and
    for a procedure that does not only look at ranks.
    """
    base = base or procedure
    prompts, rollouts = lengths_PC.shape[0], lengths_PC.shape[1] - 1
    for given in (procedure, base):
        if not looks_at_ranks(given):
            raise ConfigError(f"the loss from finite rollouts is known for procedures by rank, not for {given.name}")
    phi_C = at_ranks(transform, np.arange(rollouts + 1) / rollouts, rollouts)
    phi_C -= phi_C.max()

    def kls(log_beta: float) -> Array:
        exponent = phi_C * np.exp(-log_beta)
        tilt = np.exp(exponent)
        total, mean = (lengths_PC @ np.stack([tilt, tilt * exponent], axis=1)).T
        return np.asarray(mean / total - np.log(total))

    root = find_log_beta(lambda x: float(kls(x).mean()), kl, within=LOG_BETAS) if kl > 0 else None
    if root is None or not root.found:
        raise ConfigError(
            f"{rollouts} rollouts cannot spend a KL of {kl} nats; the budget must be positive and below "
            f"{float(kls(LOG_BETAS[0]).mean()):.4g}, and not so small that it is rounding"
        )
    log_beta, kls_P = root.log_beta, kls(root.log_beta)

    def win_rates(lengths: Array, log_beta: float, nodes: int) -> Array:
        masses = lengths * np.exp(phi_C * np.exp(-log_beta))
        masses /= masses.sum(axis=1, keepdims=True)
        return _step_win_rates(lengths, masses, procedure, base, nodes)

    pilot, nodes = lengths_PC[:PILOT], 2
    now, finer = win_rates(pilot, log_beta, nodes), win_rates(pilot, log_beta, 2 * nodes)
    while abs((now - finer).mean()) > QUADRATURE * (1.0 - finer).mean() and nodes < MAX_NODES:
        nodes *= 2
        now, finer = finer, win_rates(pilot, log_beta, 2 * nodes)
    nearby = log_beta + 1e-4
    price = (win_rates(pilot, nearby, nodes) - now).mean() / (kls(nearby) - kls_P)[:PILOT].mean()
    rows = max(1, CHUNK // (rollouts + 1))
    parts = (lengths_PC[start : start + rows] for start in range(0, prompts, rows))
    win_rates_P = np.concatenate([win_rates(part, log_beta, nodes) for part in parts])
    beta = float(np.exp(log_beta)) * transform.scale
    priced_P = win_rates_P - price * (kls_P - kl)
    return FiniteRollouts(transform, procedure, base, beta, float(kls_P.mean()), priced_P)


def _step_win_rates(
    lengths_PC: Array, masses_PC: Array, procedure: RankProcedure, base: RankProcedure, nodes: int
) -> Array:
    """Return W = 1 − ∫ h(F) h₀′(u) du, (P,), of policies whose density is constant on intervals of [0, 1].

    On an interval the integral lies between the two ends' h(F) times the rise of h₀. Where these are as good as equal
    their mean is taken, elsewhere Gauss's rule with ``nodes``.
    """
    u_PE, cdf_PE = cumulated(lengths_PC), cumulated(masses_PC)
    served_PE, rise_PC = procedure.distortion(cdf_PE), np.diff(base.distortion(u_PE), axis=1)
    lost_PC = (served_PE[:, 1:] + served_PE[:, :-1]) / 2.0 * rise_PC
    unsure_PC = np.diff(served_PE, axis=1) * rise_PC
    rough_PC = unsure_PC > ROUGH * lost_PC.sum(axis=1, keepdims=True)
    x, weight = np.polynomial.legendre.leggauss(nodes)
    x, weight = (x + 1.0) / 2.0, weight / 2.0
    p, c = np.nonzero(rough_PC)
    for start in range(0, p.size, CHUNK // nodes):
        at = p[start : start + CHUNK // nodes], c[start : start + CHUNK // nodes]
        u, cdf = (
            np.minimum(edges_PE[at][:, None] + steps_PC[at][:, None] * x, 1.0)  # at Gauss's nodes of each interval
            for edges_PE, steps_PC in ((u_PE, lengths_PC), (cdf_PE, masses_PC))
        )
        lost_PC[at] = lengths_PC[at] * ((procedure.distortion(cdf) * base.density(u)) @ weight)
    return np.asarray(1.0 - lost_PC.sum(axis=1))
