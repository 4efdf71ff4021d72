"""Inference-time win rates from samples, for every N at once, with intervals over prompts.

A prompt's win rate under a procedure is W = Σ_ij a_i·b_j·w(y_i, z_j), where a and b are the probabilities that the
procedure serves policy sample i and base sample j, and w compares their judge rewards. It averages over all subsets
that the procedure could have drawn from the samples, so it is unbiased and uses every pair.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from infalign.errors import DataError
from infalign.evaluation.samples import Samples, chunks
from infalign.method.calibration import Array
from infalign.method.procedures import Procedure, RewindAndRepeat, looks_at_ranks, rewinds


def win_rates(policy: Samples, base: Samples, procedure: Procedure, base_procedure: Procedure | None = None) -> Array:
    """Return each prompt's unbiased inference-time win rate, shape (P,): `win_rates_of` one procedure."""
    base_procedures = None if base_procedure is None else [base_procedure]
    wins_P: Array = win_rates_of(policy, base, [procedure], base_procedures)[0]
    return wins_P


def win_rates_of(
    policy: Samples,
    base: Samples,
    procedures: Sequence[Procedure],
    base_procedures: Sequence[Procedure] | None = None,
) -> Array:
    """Return each prompt's unbiased win rate of policy over base under every procedure, shape (procedures, P).

    The base is served by the procedure at the same place of ``base_procedures``, by default as the policy is. W =
    Σ_ij a_i·b_j·w(y_i, z_j): ties in the selection reward are shared evenly, ties of the judge count 1/2. The two may
    have different numbers of samples. Rewards of different floating-point precision are compared in the coarser one,
    so that a reward that was once stored as float32 ties with itself.

    Rewind-and-Repeat takes its threshold from one half of the base samples and compares with the other, so that the
    base does not grade itself; the halves take turns. So the order of a prompt's base samples must not depend on their
    rewards, and the noise of a threshold from few samples stays in the estimate.

    Raises DataError if the prompts differ in number or the samples are fewer than a procedure needs.
    """
    if len(policy.selected) != len(base.selected):
        raise DataError(f"the policy has {len(policy.selected)} prompts, the base {len(base.selected)}")
    pairs = list(zip(procedures, procedures if base_procedures is None else base_procedures, strict=True))
    # A procedure that only looks at ranks has one table of weights for all prompts; others need each prompt's rewards.
    by_rank = [i for i, pair in enumerate(pairs) if all(map(looks_at_ranks, pair))]
    wins_RP = np.empty((len(pairs), len(policy.selected)))
    if by_rank:
        ours = _served_within([pairs[i][0] for i in by_rank], policy.selected.shape[1])
        theirs = _served_within([pairs[i][1] for i in by_rank], base.selected.shape[1])
        for rows in chunks(len(policy.selected), max(ours.size, theirs.size)):
            a_PMR, b_PBR = _weights_by_rank(policy.selected[rows], ours), _weights_by_rank(base.selected[rows], theirs)
            wins_RP[by_rank, rows] = _weighted_wins(policy.judged[rows], a_PMR, base.judged[rows], b_PBR)
    for i in set(range(len(pairs))).difference(by_rank):
        servings = ways_to_serve(policy, base, *pairs[i])
        for rows in chunks(len(policy.selected), max(policy.selected.shape[1], base.selected.shape[1])):
            wins_RP[i, rows] = np.mean(
                [
                    _weighted_wins(policy.judged[rows], a[rows, :, None], rest.judged[rows], b[rows, :, None])
                    for a, rest, b in servings
                ],
                axis=0,
            )
    return np.clip(wins_RP, 0.0, 1.0)  # weights sum to 1 up to rounding


def rewind_draws(policy: Samples, base: Samples, procedure: RewindAndRepeat) -> Array:
    """Return each prompt's expected number of draws under Rewind-and-Repeat, shape (P,).

    For the base itself give ``base`` twice: the half that did not set the threshold is counted.
    """
    draws = [
        procedure.draws((rest if policy is base else policy).selected, thresholds(references, procedure.quantile))
        for references, rest in halves(base, [procedure], procedure.n if policy is base else 1)
    ]
    return np.asarray(np.mean(draws, axis=0))


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


def _weights_by_rank(rewards_PM: Array, served_within: Array) -> Array:
    """Return the probability that each sample is served, (P, M, procedures), shared evenly within ties."""
    below, at_most = places(rewards_PM)
    weights = served_within.take(at_most, axis=0)
    weights -= served_within.take(below, axis=0)
    weights /= (at_most - below)[:, :, None]
    return weights


def ways_to_serve(
    policy: Samples, base: Samples, procedure: Procedure, base_procedure: Procedure
) -> list[tuple[Array, Samples, Array]]:
    """Return equally good ways to serve: the policy's weights, the base samples to compare with, and their weights."""
    rewinding = [p for p in (procedure, base_procedure) if rewinds(p)]
    if not rewinding:
        return [(procedure.weights(policy.selected), base, base_procedure.weights(base.selected))]
    draws = base_procedure.n if rewinds(base_procedure) else 1
    return [
        (_rewound(procedure, policy, references), rest, _rewound(base_procedure, rest, references))
        for references, rest in halves(base, rewinding, draws)
    ]


def _rewound(procedure: Procedure, samples: Samples, references_PK: Array) -> Array:
    """Return the weights of ``samples``; where the procedure rewinds, with thresholds from ``references_PK``."""
    if rewinds(procedure):
        return procedure.weights(samples.selected, thresholds(references_PK, procedure.quantile))
    return procedure.weights(samples.selected)


def rewind_samples(procedure: RewindAndRepeat, draws: int | None = None) -> int:
    """Return how many base samples a prompt Rewind-and-Repeat needs: each half shows the quantile and N ``draws``."""
    q = procedure.quantile
    shown = math.ceil(max(q / (1 - q), (1 - q) / q) - 1e-9)  # of K samples q lies between two if q(K + 1) ≤ K
    return 2 * max(procedure.n if draws is None else draws, shown)


def halves(base: Samples, rewinding: Sequence[RewindAndRepeat], draws: int) -> list[tuple[Array, Samples]]:
    """Return twice a half of the base's rewards to take thresholds from, and the other half as samples to compare with.

    Raises DataError if a half cannot show the quantiles or has fewer samples than ``draws``.
    """
    needed, found = max(rewind_samples(rewind, draws) for rewind in rewinding), base.selected.shape[1]
    if found < needed:
        raise DataError(f"{rewinding[0].name} needs {needed} base samples a prompt, found {found}")
    half = found // 2
    parts = [
        Samples(base.selected[:, part], base.judged[:, part], None if base.lengths is None else base.lengths[:, part])
        for part in (slice(half), slice(half, None))
    ]
    return [(parts[0].selected, parts[1]), (parts[1].selected, parts[0])]


def thresholds(references_PK: Array, quantile: float) -> Array:
    """Return the quantile of each prompt, whose rank among fresh samples is right on average."""
    return np.asarray(np.quantile(references_PK, quantile, axis=1, method="weibull"))


def places(values_PX: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return how many values of its row lie below each value, and how many at or below it, from one sort."""
    order = np.argsort(values_PX, axis=1)
    ordered = np.take_along_axis(values_PX, order, axis=1)
    first = np.ones(ordered.shape, bool)  # whether a value is the first of those that tie
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    last = np.roll(first, -1, axis=1)
    place, samples = np.arange(ordered.shape[1]), ordered.shape[1]
    below, at_most = np.empty((2, *ordered.shape), np.intp)
    np.put_along_axis(below, order, np.maximum.accumulate(np.where(first, place, 0), axis=1), axis=1)
    ends = np.where(last, place + 1, samples)[:, ::-1]
    np.put_along_axis(at_most, order, np.minimum.accumulate(ends, axis=1)[:, ::-1], axis=1)
    return below, at_most


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
