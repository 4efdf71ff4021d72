"""Inference-time win rates from samples, for every N at once, with intervals over prompts.

A prompt's win rate under a procedure is W = Σ_ij a_i·b_j·w(y_i, z_j), where a and b are the probabilities that the
procedure serves policy sample i and base sample j, and w compares their judge rewards. It averages over all subsets
that the procedure could have drawn from the samples, so it is unbiased and uses every pair.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.polynomial.polynomial import polymul, polypow, polyval
from numpy.typing import ArrayLike, NDArray

from infalign.core.errors import DataError
from infalign.evaluation.intervals import Estimate, estimate_share
from infalign.evaluation.samples import Samples, chunks
from infalign.method.calibration import Array, as_rewards, places
from infalign.method.procedures import Procedure, RewindAndRepeat, looks_at_ranks, parse_procedure, rewinds
from infalign.method.procedures.base import weights_from_counts

KINDS_OF_BEND = 4  # powers of the threshold's error that do not move an estimate
SPREAD = 9.0  # standard deviations of its rank from which thresholds are taken; from fewer the noise is larger
THRESHOLDS = 30  # about how many that are


def win_rates(
    policy_rewards_PM: ArrayLike,
    reference_rewards_PK: ArrayLike,
    procedure: Procedure | str,
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """Return the win rate of a policy over the reference, both served by ``procedure``, with its interval over prompts.

    ``policy_rewards_PM`` has M rewards of policy responses to each of P prompts, ``reference_rewards_PK`` K of
    reference responses to the same prompts, in any order. ``procedure`` may be a spelling. Every pair and every subset
    that the procedure could draw is used, and ties count one half: see `win_rates_of`. ``seed`` is that of the
    bootstrap. Raises DataError for different numbers of prompts, fewer than 2 prompts, too few samples for the
    procedure and rewards that are not finite, ConfigError for a procedure that does not exist.

    >>> policy, reference = [[0.7, 0.9, 0.4], [1.2, 0.1, 0.8]], [[0.5, 0.3, 0.6], [0.9, 0.2, 0.4]]
    >>> round(win_rates(policy, reference, "best-of-2").mean, 3)
    0.889
    """
    ours, theirs = (  # in the precision that they have, in which they tie
        values if isinstance(values, np.ndarray) and values.dtype.kind == "f" else as_rewards(values)
        for values in (policy_rewards_PM, reference_rewards_PK)
    )
    served = parse_procedure(procedure) if isinstance(procedure, str) else procedure
    (wins_P,) = win_rates_of(Samples(ours, ours), Samples(theirs, theirs), [served])
    return estimate_share(wins_P, confidence=confidence, seed=seed)


def win_rates_of(
    policy: Samples, base: Samples, procedures: Sequence[Procedure], base_procedures: Sequence[Procedure] | None = None
) -> Array:
    """Return each prompt's unbiased win rate of policy over base under every procedure, shape (procedures, P).

    The base is served by the procedure at the same place of ``base_procedures``, by default as the policy is. W =
    Σ_ij a_i·b_j·w(y_i, z_j): ties in the selection reward are shared evenly, ties of the judge count 1/2. The two may
    have different numbers of samples. Rewards of different floating-point precision are compared in the coarser one,
    so that a reward that was once stored as float32 ties with itself.

    Rewind-and-Repeat takes its thresholds from one half of the base samples and compares with the other, so that the
    base does not grade itself; the halves take turns. So the order of a prompt's base samples must not depend on their
    rewards. Several thresholds, weighed by `threshold_weights`, replace the unknown quantile, so that their noise does
    not move the mean; a prompt's win rate may then lie outside [0, 1]. Where policy and base rewind differently, the
    covariance of their two thresholds does move it, by an order of one over the number of base samples.

    Raises DataError if the prompts differ in number or the samples are fewer than a procedure needs.

    >>> policy = Samples(selected=np.array([[0.1, 0.9]]), judged=np.array([[3, 2]]))  # the judge prefers the other one
    >>> base = Samples(selected=np.array([[0.5, 0.4]]), judged=np.array([[2, 1]]))
    >>> win_rates_of(policy, base, [BestOfN(1), BestOfN(2)])
    array([[0.875],
           [0.5  ]])
    """
    if len(policy.selected) != len(base.selected):
        raise DataError(f"the policy has {len(policy.selected)} prompts, the base policy {len(base.selected)}")
    pairs = list(zip(procedures, procedures if base_procedures is None else base_procedures, strict=True))
    # A procedure that only looks at ranks has one table of weights for all prompts; others need each prompt's rewards.
    by_rank = [i for i, pair in enumerate(pairs) if all(map(looks_at_ranks, pair))]
    wins_RP = np.empty((len(pairs), len(policy.selected)))
    if by_rank:
        ours = _served_within([pairs[i][0] for i in by_rank], policy.selected.shape[1])
        theirs = _served_within([pairs[i][1] for i in by_rank], base.selected.shape[1])
        for rows in chunks(len(policy.selected), max(ours.size, theirs.size)):
            a_PMR = weights_from_counts(policy.selected[rows], ours)
            b_PBR = weights_from_counts(base.selected[rows], theirs)
            wins_RP[by_rank, rows] = _weighted_wins(policy.judged[rows], a_PMR, base.judged[rows], b_PBR)
    for i in set(range(len(pairs))).difference(by_rank):
        for rows in chunks(len(policy.selected), THRESHOLDS * max(policy.selected.shape[1], base.selected.shape[1])):
            served = ways_to_serve(policy[rows], base[rows], *pairs[i])
            parts = (_weighted_wins(policy.judged[rows], a, rest.judged, b).sum(axis=0) for a, rest, b in served)
            wins_RP[i, rows] = sum(parts)
    wins_RP[by_rank] = np.clip(wins_RP[by_rank], 0.0, 1.0)  # weights sum to 1 up to rounding
    return wins_RP


def rewind_draws(policy: Samples, base: Samples, procedure: RewindAndRepeat) -> Array:
    """Return each prompt's expected number of draws under Rewind-and-Repeat, shape (P,).

    For the base itself give ``base`` twice: the half that did not set the threshold is counted.

    >>> better, rewards_PM = np.full((300, 32), 9.0), np.random.default_rng(0).random((300, 32))
    >>> policy, base = Samples(better, better), Samples(rewards_PM, rewards_PM)
    >>> [f"{rewind_draws(one, base, RewindAndRepeat(0.5, 4)).mean():.1f}" for one in (policy, base)]
    ['1.0', '1.9']
    """
    draws_P = np.zeros(len(base.selected))
    for references, rest in halves(base, [procedure], procedure.n if policy is base else 1):
        samples = rest if policy is base else policy
        for weight, thresholds_P in thresholds(references, procedure):
            draws_P += weight / 2 * procedure.draws(samples.selected, thresholds_P)
    return draws_P


def tie_rate(policy: Samples, base: Samples) -> Array:
    """Return each prompt's share of pairs of samples that the judge finds equal, shape (P,).

    Where it is large the win rate is mostly the convention that a tie counts 1/2.
    """
    shares_P = np.empty(len(policy.judged))
    for rows in chunks(len(policy.judged), policy.judged.shape[1] + base.judged.shape[1]):
        below, at_most = beaten(policy.judged[rows], base.judged[rows])
        shares_P[rows] = (at_most - below).mean(axis=1) / base.judged.shape[1]
    return shares_P


def _served_within(procedures: Sequence[Procedure], samples: int) -> Array:
    """Return the probability that what is served is among the m = 0..M lowest of M samples, (M + 1, procedures)."""
    ranks = np.arange(samples)[None, :]
    weights = np.stack([procedure.weights(ranks)[0] for procedure in procedures], axis=1)
    return np.concatenate([np.zeros((1, len(procedures))), np.cumsum(weights, axis=0)])


def ways_to_serve(
    policy: Samples, base: Samples, procedure: Procedure, base_procedure: Procedure
) -> list[tuple[Array, Samples, Array]]:
    """Return ways to serve whose win rates sum to the estimate: policy's weights, base samples, and their weights.

    Weights are (P, M, ways) and (P, B, ways). Those of the base contain the weight of the way, which may be negative
    (`threshold_weights`).
    """
    rewinding = [p for p in (procedure, base_procedure) if rewinds(p)]
    if not rewinding:
        return [(procedure.weights(policy.selected)[..., None], base, base_procedure.weights(base.selected)[..., None])]
    draws = base_procedure.n if rewinds(base_procedure) else 1
    ways = []
    for references, rest in halves(base, rewinding, draws):
        ours_T, a_PMT = _rewound(procedure, policy, references)
        theirs_T, b_PBT = _rewound(base_procedure, rest, references)
        if procedure == base_procedure:  # both compare with the same threshold
            ways.append((a_PMT, rest, b_PBT * (ours_T / 2)))
        else:
            both = np.outer(ours_T, theirs_T).ravel() / 2
            ways.append((a_PMT.repeat(theirs_T.size, axis=2), rest, np.tile(b_PBT, ours_T.size) * both))
    return ways


def _rewound(procedure: Procedure, samples: Samples, references_PK: Array) -> tuple[Array, Array]:
    """Return the weights of thresholds, (T,), and of ``samples`` at each, (P, M, T); one if none is needed."""
    if not rewinds(procedure):
        return np.ones(1), procedure.weights(samples.selected)[..., None]
    weights, thresholds_P = zip(*thresholds(references_PK, procedure), strict=True)
    return np.array(weights), np.stack([procedure.weights(samples.selected, t) for t in thresholds_P], axis=2)


def rewind_samples(procedure: RewindAndRepeat, draws: int | None = None) -> int:
    """Return how many base samples per prompt Rewind-and-Repeat needs: each half shows the quantile and N ``draws``."""
    q = procedure.quantile
    shown = math.ceil(max(q / (1 - q), (1 - q) / q) - 1e-9)  # of K samples q lies between two if q(K + 1) ≤ K
    return 2 * max(procedure.n if draws is None else draws, shown)


def halves(base: Samples, rewinding: Sequence[RewindAndRepeat], draws: int) -> list[tuple[Array, Samples]]:
    """Return twice a half of the base's rewards to take thresholds from, and the other half as samples to compare with.

    Raises DataError if a half cannot show the quantiles or has fewer samples than ``draws``.
    """
    needed, samples = max(rewind_samples(rewind, draws) for rewind in rewinding), base.selected.shape[1]
    if samples < needed:
        raise DataError(f"{rewinding[0].name} needs {needed} base samples per prompt, found {samples}")
    first, second = base[:, : samples // 2], base[:, samples // 2 :]
    return [(first.selected, second), (second.selected, first)]


def thresholds(references_PK: Array, procedure: RewindAndRepeat) -> list[tuple[float, Array]]:
    """Return thresholds of each prompt, (P,), with their weights: order statistics around the procedure's quantile."""
    weights_K = threshold_weights(references_PK.shape[1], procedure)
    ordered_KP = np.sort(references_PK, axis=1).T
    return [(float(weights_K[k]), ordered_KP[k]) for k in np.flatnonzero(weights_K)]


@cache
def threshold_weights(references: int, procedure: RewindAndRepeat) -> Array:
    """Return weights of the order statistics of K ``references``, (K,), that act like the base's quantile itself.

    The i-th smallest has a random rank U_i ~ Beta(i, K−i+1) among all of the base's responses, and what is estimated
    with it as the threshold, T(U_i), bends: at one sample quantile E T(U_i) ≠ T(q), by a point of the win rate and a
    draw for the paper's procedure and 32 references. The weights c are the smallest with Σ_i c_i·E φ(U_i) = φ(q) for
    φ(u) = (u − q)^k and (u − q)^k·(1 + u + … + u^{N−1}), k = 0..3, the last factor being the base's own draws; for
    fewer than 12 references for two thirds as many functions as references, of the lowest k. Their sum is 1; some are
    negative, and none lies far from the quantile, so that what no φ describes vanishes with many references. The price
    is noise: about twice the standard deviation with 12 references, 1.3 times with 32. Where rewards take few values
    and one of them spans the quantile's neighborhood, T jumps and what is left is a few per cent.
    """
    q, moments = procedure.quantile, procedure.n + KINDS_OF_BEND
    rank = np.arange(1, references + 1)
    functions = min(2 * KINDS_OF_BEND, max(min(3, references), 2 * references // 3))
    near = functions + math.ceil(SPREAD * math.sqrt(references * q * (1.0 - q)))
    chosen = np.sort(np.argsort(np.abs(rank - q * (references + 1)), kind="stable")[:near])
    power = np.arange(moments - 1)  # E U^j = Π_{l<j} (i + l)/(K + 1 + l)
    ratios = (rank[chosen, None] + power) / (references + 1 + power)
    moments_KJ = np.concatenate([np.ones((len(chosen), 1)), np.cumprod(ratios, axis=1)], axis=1)
    basis = [
        polymul(polypow([-q, 1.0], k), draws) for k in range(KINDS_OF_BEND) for draws in ([1.0], np.ones(procedure.n))
    ][:functions]
    means = np.stack([moments_KJ[:, : len(phi)] @ phi for phi in basis])
    scale = np.abs(means).max(axis=1)
    at_quantile = np.array([polyval(q, phi) for phi in basis])
    weights_K = np.zeros(references)
    weights_K[chosen] = np.linalg.lstsq(means / scale[:, None], at_quantile / scale, rcond=None)[0]
    return weights_K


def beaten(policy_PM: Array, base_PB: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return how many base values of its prompt lie below each of the policy's, and how many at or below it."""
    ours, theirs = alike(policy_PM, base_PB)
    own, everyone = places(ours), places(np.concatenate([ours, theirs], axis=1))
    below, at_most = (every[:, : policy_PM.shape[1]] - mine for every, mine in zip(everyone, own, strict=True))
    return below, at_most


def alike(policy_PM: Array, base_PB: Array) -> tuple[Array, Array]:
    """Return both in the coarser of their floating-point precisions."""
    precisions = [values.dtype for values in (policy_PM, base_PB) if values.dtype.kind == "f"]
    coarser = min(precisions, key=lambda precision: precision.itemsize, default=np.dtype(float))
    return policy_PM.astype(coarser), base_PB.astype(coarser)


def _weighted_wins(policy_PM: Array, a_PMR: Array, base_PB: Array, b_PBR: Array) -> Array:
    """Return Σ_ij a_i·b_j·w(policy_i, base_j) for each procedure and prompt, (R, P), without a matrix of pairs."""
    prompts, samples, procedures = b_PBR.shape
    order, start = np.argsort(base_PB, axis=1), np.arange(prompts)[:, None]
    mass = np.zeros((prompts, samples + 1, procedures))
    mass[:, 1:] = b_PBR.reshape(-1, procedures).take(start * samples + order, axis=0)
    for i in range(samples):
        mass[:, i + 1] += mass[:, i]  # several times faster than cumsum along a middle axis
    below, at_most = (start * (samples + 1) + count for count in beaten(policy_PM, base_PB))
    flat = mass.reshape(-1, procedures)
    mass_beaten = flat.take(below, axis=0)
    mass_beaten += flat.take(at_most, axis=0)
    return np.asarray(np.einsum("pmr,pmr->rp", a_PMR, mass_beaten) / 2)
