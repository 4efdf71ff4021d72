"""The optimal transformation: the Φ of the policy that wins most at its KL for a given inference-time procedure."""

from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import brentq

from infalign.core.errors import ConfigError
from infalign.method.procedures import Served, as_procedure
from infalign.method.roots import check_strength
from infalign.method.transforms import Tabulated
from infalign.theory.contest import Contest, RankPolicy
from infalign.theory.law import MIN_KL, RankLaw, aligned_law, check_kl

KNOTS = np.arange(48) / 48  # of the table, in each panel of the solution
LAST_PIECE = 1e-12  # of the table, next to u = 0, where 1 − u has no digits for a steep Φ
MAX_ERROR = 1e-4  # of KL and win rate
FIRST_KL = 1e-3  # from which the search for a β starts


@dataclass(frozen=True, slots=True)
class RankOptimum:
    """The best policy for a procedure at its KL, and the transformation that makes any RLHF solver find it.

    ``residual`` is the largest |log f − (Φ[F]/β − log Z)| where f ≥ 1, in nats (smaller f weigh it by f), with Φ[F]
    computed anew from ``law``, the law of ``transform``, by quadrature; ``self_check`` is the largest difference of KL
    and win rate from that law.
    """

    procedure: Served
    transform: Tabulated
    beta: float  # the weight of the KL for the paper's raw Φ
    kl: float  # nats
    win_rate: float
    residual: float
    self_check: float
    law: RankLaw = field(repr=False)


def rank_optimum(
    procedure: Served | str, *, beta: float | None = None, kl: float | None = None, base: Served | str | None = None
) -> RankOptimum:
    """Return the policy with the largest W − ``beta``·KL, or with the largest W at a KL budget, in nats.

    ``base`` serves the base policy, by default ``procedure``. Φ'(u) = h'(F(u))·h₀'(u) (docs/derivations.md, optimum of
    a rank procedure). Raises ConfigError unless one is given, positive and finite, for a budget out of reach, and where
    1 − W is rounding, so that the table, by an independent quadrature, does not have the policy's KL and win rate.

    >>> round(rank_optimum("best-of-4", kl=1.0).win_rate, 4)
    0.9411
    """
    check_strength(kl, beta)
    if kl is not None:
        check_kl(kl)
    procedure = as_procedure(procedure)
    contest = Contest(procedure, as_procedure(base or procedure))
    policy = contest.best(kl) if kl is not None else _best_at_beta(contest, beta or 0.0)
    table = _table(contest, policy)
    law = aligned_law(table, beta=policy.beta)
    residual, wins = stationarity(contest, law)
    won = contest.win_rate(policy)
    self_check = max(abs(law.kl - policy.kl), abs(wins - won))
    if self_check > MAX_ERROR:
        raise contest.not_found(policy.kl)
    return RankOptimum(procedure, table, policy.beta, policy.kl, won, residual, self_check, law)


def stationarity(contest: Contest, law: RankLaw) -> tuple[float, float]:
    """Return the ``residual`` (see `RankOptimum`) and the win rate of any law."""
    panels, shape = law.panels, law.panels.weight.shape
    log_density, cdf = law.log_density.reshape(shape), law.cdf.reshape(shape)
    policy = RankPolicy(panels, log_density, cdf, float(law.cdf_at(contest.quantile)), law.beta)
    misfit = log_density - contest.gradient(panels, cdf, policy.below)[0] / law.beta
    misfit -= np.sum(panels.weight * np.exp(log_density) * misfit)
    misfit[np.abs(panels.u - contest.quantile) < 1e-15] = 0.0  # inside the jump
    return float(np.max(np.minimum(np.exp(log_density), 1.0) * np.abs(misfit))), contest.win_rate(policy)


def _table(contest: Contest, policy: RankPolicy) -> Tabulated:
    """Return Φ of a policy as a table, with two knots where it jumps."""
    _, slope, jump = contest.gradient(policy.panels, policy.cdf, policy.below)
    v, slopes, rest = policy.panels.between(slope, np.append(KNOTS, 1.0))
    at_edge = np.isin(v[:, -1], contest.edges)
    v[at_edge, -1] = np.nextafter(v[at_edge, -1], 1.0)
    chosen = np.ones(v.shape, bool)
    chosen[:-1, -1] = at_edge[:-1]  # elsewhere the next panel begins there
    chosen &= (v <= 1.0 - LAST_PIECE) | (v == 1.0)
    v, phi, slopes = (x[chosen][::-1] for x in (v, -rest - np.where(v > 1.0 - contest.quantile, jump, 0.0), -slopes))
    if (v[v < 1.0] > 1.0 - 2.0 * LAST_PIECE).any():
        slopes[v == 1.0] = 0.0
    kept = np.append(True, np.diff(v) > 0)  # rounding may move knots onto their neighbors
    kept[np.flatnonzero(kept)[-1]] = False
    kept[-1] = True
    return Tabulated(f"optimal:{contest.procedure.name}", v[kept], phi[kept], slopes[kept])


def _best_at_beta(contest: Contest, beta: float) -> RankPolicy:
    """Return the policy with the largest W − β·KL, one of those that win most at a KL and have this β.

    At the best policy of a KL budget β falls as the budget grows, but where W is not concave in the KL. So all budgets
    are tried, from one whose β is larger, as long as a certain win there could be better than the best that was found.
    """
    start = contest.best(FIRST_KL)
    while start.beta <= beta:
        if start.kl < MIN_KL:
            raise ConfigError(f"beta = {beta:g} leaves the base policy unchanged; lower it")
        start = contest.near(start, start.kl / 8.0)
    path = [start]
    at_beta: list[RankPolicy] = []
    while 1.0 - beta * path[-1].kl > max(contest.win_rate(one) - beta * one.kl for one in path):
        last = path[-1]
        try:
            path.append(contest.near(last, 2.0 * last.kl))
        except ConfigError:  # the largest KL is near
            break
        if last.beta > beta >= path[-1].beta:
            root = brentq(_excess, np.log(last.kl), np.log(path[-1].kl), (contest, last, beta), xtol=1e-12)
            at_beta.append(contest.near(last, float(np.exp(root))))
    if not at_beta:
        raise ConfigError(f"beta = {beta:g} is too small: the optimum is known up to a KL of {path[-1].kl:.4g} nats")
    return max(at_beta, key=lambda one: contest.win_rate(one) - beta * one.kl)


def _excess(log_kl: float, contest: Contest, near: RankPolicy, beta: float) -> float:
    return float(np.log(contest.near(near, float(np.exp(log_kl))).beta / beta))
