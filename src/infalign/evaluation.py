"""Inference-time win rates from samples, for every N at once, with intervals over prompts.

A prompt's win rate under a procedure is W = Σ_ij a_i·b_j·w(y_i, z_j), where a and b are the probabilities that the
procedure serves policy sample i and base sample j, and w compares their judge rewards. It averages over all subsets
that the procedure could have drawn from the samples, so it is unbiased and uses every pair.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, ndtr, xlog1py
from scipy.stats import rankdata, t

from infalign.calibration import Array, win
from infalign.errors import ConfigError, DataError
from infalign.procedures import BestOfN, Procedure, RewindAndRepeat

RESAMPLES = 2000
RESAMPLED_PROMPTS = 10_000  # above, the bootstrap's distribution is its own expansion to within its noise
CHUNK = 2**17  # numbers in a temporary array; more leave the processor's cache
LENGTH_STEPS = 100  # tanh of a length difference is rounded to 1/100
STEEPEST = 20.0  # log odds beyond mean that the likelihood has no maximum
LEAST_LOG = -700.0  # below, e^x underflows
Served = list[tuple[int, "Samples", Array, "Samples", Array]]  # first prompt, policy, its weights, base, its weights


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over prompts with its bootstrap interval."""

    mean: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Return the numbers by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Samples:
    """What one model said to every prompt: rewards that the procedure selects by, a judge's, and lengths if known.

    All of shape (P, M), numbers or booleans. With ``judged`` equal to ``selected`` the judge is the selecting reward
    itself. ``lengths`` are in any unit, the same for both models.

    Raises DataError for other shapes, for what is no number, and where one is not finite: NaN would sort as the best.
    """

    selected: Array
    judged: Array
    lengths: Array | None = None

    def __post_init__(self) -> None:
        if self.selected.ndim != 2 or self.selected.shape != self.judged.shape:
            raise DataError(
                f"selection rewards {self.selected.shape} and judge rewards {self.judged.shape} "
                "must both be prompts × samples"
            )
        if self.lengths is not None and self.lengths.shape != self.selected.shape:
            raise DataError(f"lengths {self.lengths.shape} must have the shape of the rewards {self.selected.shape}")
        for name, values in (
            ("selection reward", self.selected),
            ("judge reward", self.judged),
            ("length", self.lengths),
        ):
            if values is None:
                continue
            if values.dtype.kind not in "biuf":
                raise DataError(f"the {name}s are of type {values.dtype}, not numbers")
            if not np.isfinite(values).all():
                prompt, sample = np.argwhere(~np.isfinite(values))[0]
                raise DataError(
                    f"the {name} of prompt {prompt}, sample {sample} is {values[prompt, sample]}, not finite"
                )


# Win rates


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
    # What only looks at ranks has one table of weights for all prompts; others weigh each prompt's rewards.
    by_rank = [i for i, pair in enumerate(pairs) if all(hasattr(p, "distortion") for p in pair)]
    wins_RP = np.empty((len(pairs), len(policy.selected)))
    if by_rank:
        ours = _served_within([pairs[i][0] for i in by_rank], policy.selected.shape[1])
        theirs = _served_within([pairs[i][1] for i in by_rank], base.selected.shape[1])
        for rows in _chunks(len(policy.selected), max(ours.size, theirs.size)):
            a_PMR, b_PBR = _weights_by_rank(policy.selected[rows], ours), _weights_by_rank(base.selected[rows], theirs)
            wins_RP[by_rank, rows] = _weighted_wins(policy.judged[rows], a_PMR, base.judged[rows], b_PBR)
    for i in set(range(len(pairs))).difference(by_rank):
        servings = _servings(policy, base, *pairs[i])
        for rows in _chunks(len(policy.selected), max(policy.selected.shape[1], base.selected.shape[1])):
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
        procedure.draws((rest if policy is base else policy).selected, _thresholds(references, procedure.quantile))
        for references, rest in _halves(base, [procedure], procedure.n if policy is base else 1)
    ]
    return np.asarray(np.mean(draws, axis=0))


def length_controlled(
    blocks: Sequence[tuple[Samples, Samples]], procedure: Procedure, base_procedure: Procedure | None = None
) -> Array:
    """Return values, one a prompt, whose mean is the win rate at equal length, because judges like length.

    Over all pairs of samples, weighed as they are served, logit P(win) = α + γ·tanh(Δ/s) is fitted, Δ the policy's
    length minus the base's and s its standard deviation; the win rate at equal length is σ(α), which is AlpacaEval 2's
    without its terms for annotator and instruction. A prompt's value is σ(α) plus the prompt's influence on it, so that
    `estimate` gives the interval, and the differences of two policies' values give a paired one.

    ``blocks`` are pairs (policy, base) with lengths; prompts with other numbers of samples go to another block. Where
    no lengths differ these are the win rates themselves. tanh is rounded to 1/100. Cost: all pairs, for one procedure.

    It answers for a judge who is swayed by length alone, alike for every prompt, in steps of log odds that saturate. Do
    not trust it where good answers have to be long, or where few pairs are near equal length: there α is extrapolated.

    Raises DataError without lengths, where every served pair is won or every one lost, where all of the policy's
    responses are longer than the base's or all shorter, and where length alone tells who wins.
    """
    if any(samples.lengths is None for block in blocks for samples in block):
        raise DataError("a length-controlled win rate needs the lengths of both models' samples")
    served: Served = []
    prompts = 0
    for policy, base in blocks:
        servings = _servings(policy, base, procedure, base_procedure or procedure)
        served += [(prompts, policy, a_PM, rest, b_PB / len(servings)) for a_PM, rest, b_PB in servings]
        prompts += len(policy.selected)

    mean = square = 0.0
    for _, weight, _, delta in _pairs(served):
        mean += float((weight * delta).sum()) / prompts
        square += float((weight * delta**2).sum()) / prompts
    if square == 0.0:
        return np.concatenate([win_rates(*block, procedure, base_procedure) for block in blocks])
    deviation = np.sqrt(max(square - mean**2, 0.0)) or 1.0  # 0: all differ by the same, and are refused below

    def steps(delta: Array) -> NDArray[np.intp]:
        rounded: NDArray[np.intp] = np.rint(LENGTH_STEPS * np.tanh(delta / deviation)).astype(np.intp)
        return rounded

    x = np.arange(-LENGTH_STEPS, LENGTH_STEPS + 1) / LENGTH_STEPS
    total, won = np.zeros((2, x.size))
    for _, weight, wins, delta in _pairs(served):
        at = steps(delta).ravel() + LENGTH_STEPS
        total += np.bincount(at, weight.ravel(), x.size) / prompts
        won += np.bincount(at, (weight * wins).ravel(), x.size) / prompts
    if not total[x <= 0].any() or not total[x >= 0].any():
        way = "longer" if total[x > 0].any() else "shorter"
        raise DataError(f"every served response of the policy is {way} than the base's: none is of equal length")
    alpha, gamma, curvature = _fit_odds(x, total, won)
    expected = expit(alpha + gamma * x)
    scores_P2 = np.zeros((prompts, 2))
    for rows, weight, wins, delta in _pairs(served):
        at = steps(delta)
        residual = weight * (wins - expected[at + LENGTH_STEPS])
        scores_P2[rows] += np.stack(
            [residual.sum(axis=(1, 2)), (residual * at).sum(axis=(1, 2)) / LENGTH_STEPS], axis=1
        )
    level = expit(alpha)
    values_P: Array = level + level * (1 - level) * np.linalg.solve(curvature, scores_P2.T)[0]
    return values_P


# Best-of-n as a way to align: what it spends


def best_of_n_kl_bound(n: int) -> float:
    """Return log n − (n−1)/n nats: no policy spends more by serving the best of n draws; without atoms it is exact.

    Raises ConfigError unless n is a whole number of at least 1.
    """
    BestOfN(n)  # refuses what is no n
    return float(np.log(n) - (n - 1) / n)


def best_of_n_kl_given(log_probabilities: ArrayLike, n: int) -> Array:
    """Return the KL in nats of Best-of-n to the policy, estimated from responses that it served, shape of the input.

    ``log_probabilities`` are log ε, with ε the policy's probability of the response that was served:
    (1−ε)^n·[log n + (n−1)·log(1−ε) − (n−1)/n] + [1 − (1−ε)^n]·log([1 − (1−ε)^n]/ε) (Beirami et al., arXiv 2401.01879).
    It is the exact KL where the best response has probability ε and all others have none of their own: the bound as
    ε → 0, and 0 at ε = 1.

    Raises DataError for a log-probability that is NaN or above 0, ConfigError as `best_of_n_kl_bound`.
    """
    given = np.asarray(log_probabilities, float)
    bad = ~(given <= 0)
    if bad.any():
        raise DataError(
            f"log_probabilities has {given[bad][0]:g}; give logs of probabilities in nats, which are at most 0"
        )
    log_epsilon = np.maximum(given, LEAST_LOG)  # where the bound is reached to all digits
    epsilon, others = np.exp(log_epsilon), -np.expm1(log_epsilon)
    missed = np.exp(xlog1py(n, -epsilon))  # by all n draws
    among_others = missed * best_of_n_kl_bound(n) + xlog1py((n - 1) * missed, -epsilon)
    more = -others * np.expm1(xlog1py(n - 1, -epsilon)) / epsilon  # [1 − (1−ε)^n]/ε − 1, without cancellation
    return np.asarray(among_others + (1.0 - missed) * np.log1p(more))


def best_of_n_kl(rewards_PM: Array, log_probabilities_PM: Array, n: int) -> Array:
    """Return each prompt's mean of `best_of_n_kl_given` over what Best-of-n serves of M ≥ n samples, shape (P,).

    ``log_probabilities_PM`` are the samples' own, in nats, under the policy that drew them. Every sample counts with
    the probability that it is the best of n, so that the mean is unbiased for the estimator's over all draws. Raises
    DataError for other shapes and for fewer samples than n, and as `best_of_n_kl_given`.
    """
    if rewards_PM.shape != log_probabilities_PM.shape:
        raise DataError(
            f"rewards {rewards_PM.shape} and log-probabilities {log_probabilities_PM.shape} "
            "must both be prompts × samples"
        )
    kl_PM = best_of_n_kl_given(log_probabilities_PM, n)
    return np.asarray((BestOfN(n).weights(rewards_PM) * kl_PM).sum(axis=1))


# Diagnostics


def tie_rate(policy: Samples, base: Samples) -> Array:
    """Return each prompt's share of pairs of samples that the judge finds equal, shape (P,).

    Where it is large the win rate is mostly the convention that a tie counts 1/2.
    """
    shares_P = np.empty(len(policy.judged))
    for rows in _chunks(len(policy.judged), policy.judged.shape[1] + base.judged.shape[1]):
        below, at_most = _beaten(policy.judged[rows], base.judged[rows])
        shares_P[rows] = (at_most - below).mean(axis=1) / base.judged.shape[1]
    return shares_P


def saturation(rewards_PM: Array, reference_rewards_PK: Array) -> Array:
    """Return each prompt's share of rewards above all K reference rewards, shape (P,).

    All of them have calibrated reward 1, so neither training nor a curve over u can tell them apart. Fresh base samples
    without ties reach 1/(K + 1) on average; a policy far above it asks for a larger K.
    """
    return np.asarray((rewards_PM > reference_rewards_PK.max(axis=1, keepdims=True)).mean(axis=1))


def rank_error(rollouts: int, *, confidence: float = 0.95) -> float:
    """Return what the error of calibrated rewards from K ``rollouts`` stays below: sqrt(log(2/δ)/2K) (DKW).

    It holds for all rewards of a prompt at once with probability ``confidence`` = 1 − δ.
    """
    return float(np.sqrt(np.log(2.0 / (1.0 - confidence)) / (2.0 * rollouts)))


def uniformity(ranks: ArrayLike) -> float:
    """Return the Kolmogorov distance of calibrated rewards from Unif[0, 1], which fresh base samples should follow."""
    u = np.sort(np.asarray(ranks, float).ravel())
    steps = rankdata(u, method="max") / u.size
    return float(np.max(np.maximum(np.abs(steps - u), np.abs((rankdata(u, method="min") - 1) / u.size - u))))


# Intervals


def estimate(values_P: ArrayLike, *, confidence: float = 0.95, seed: int = 0) -> Estimate:
    """Return the mean over prompts with a bootstrap interval (prompts are the clusters); seeded.

    Give the difference of two policies' values on the same prompts for a paired interval.

    It is the bias-corrected and accelerated bootstrap (BCa) of a mean, bias and acceleration taken from the skewness
    and the normal quantiles replaced by Student's. Measured on win rates from 20, 50 and 200 prompts
    (`benchmarks/coverage.py`), its 95 % intervals cover 94–96 %, where the percentile bootstrap covers 91–95 %; if few
    prompts decide, because almost all are won, 91 % from 20 prompts and 94 % from 50. Above 10,000 prompts its
    expansion is used, which no longer resamples.

    Where all values are equal the interval has no width, which says nothing about other prompts. Raises DataError for
    fewer than two prompts, which give no interval, and for a value that is not finite; ConfigError unless
    0 < confidence < 1.
    """
    values = np.asarray(values_P, float)
    if values.size < 2:
        raise DataError(f"an interval needs at least 2 prompts, found {values.size}")
    if not np.isfinite(values).all():
        raise DataError(f"the value of prompt {np.flatnonzero(~np.isfinite(values))[0]} is not finite")
    if not 0.0 < confidence < 1.0:
        raise ConfigError(f"the confidence of an interval lies between 0 and 1, found {confidence}")
    prompts, mean = values.size, values.mean()
    spread = values - mean
    square = float(spread @ spread)
    skew = float((spread**3).sum()) / (6.0 * square**1.5) if square > 0 else 0.0
    z = t.ppf(0.5 + confidence / 2.0, prompts - 1) * np.array([-1.0, 1.0])
    if prompts > RESAMPLED_PROMPTS:
        low, high = mean + np.sqrt(square) / prompts * (z + skew * (2.0 * z**2 + 1.0))
        return Estimate(float(mean), float(low), float(high))
    z = skew + np.sqrt(prompts / (prompts - 1)) * z
    levels = ndtr(skew + z / np.maximum(1.0 - skew * z, 1e-9))
    rng = np.random.default_rng(seed)
    means = [
        values[rng.integers(prompts, size=(rows.stop - rows.start, prompts))].mean(axis=1)
        for rows in _chunks(RESAMPLES, prompts)
    ]
    low, high = np.quantile(np.concatenate(means), levels)
    return Estimate(float(mean), float(low), float(high))


def matched(
    budgets: Sequence[tuple[ArrayLike, ArrayLike]],
    kl: float,
    gain: Callable[[float], float],
) -> Array:
    """Return each prompt's win rate at mean KL ``kl``, shape (P,), by interpolation along a method's budgets.

    ``budgets``: for each budget of one method its per-prompt KL and win rates. ``gain(kl)`` is the shape of the curve,
    theory's W − 1/2 of the same transformation and procedure: what is interpolated, linearly in KL, is the share of it
    that the method reaches, and below the first budget that share is taken as constant. (A straight line from the base
    would lose many points: theory's curves rise like √KL.) Raises DataError when ``kl`` lies beyond the last budget.
    """
    points = sorted(
        ((float(np.mean(np.asarray(k, float))), np.asarray(w, float)) for k, w in budgets), key=lambda point: point[0]
    )
    above = next((i for i, (mean, _) in enumerate(points) if mean >= kl), None)
    if above is None:
        raise DataError(f"no policy reaches a KL of {kl:.3f} nats; the largest is {points[-1][0]:.3f}")
    high, wins = points[above]
    if high == kl:
        return wins
    share = (wins - 0.5) / gain(high)
    if above > 0:
        low, low_wins = points[above - 1]
        weight = (kl - low) / (high - low)
        share = weight * share + (1 - weight) * (low_wins - 0.5) / gain(low)
    return 0.5 + share * gain(kl)


# Samples and weights


def _chunks(length: int, size: int) -> Iterator[slice]:
    """Yield slices that cover ``length`` items, in each so many that at ``size`` numbers an item they fit the cache."""
    step = max(1, CHUNK // size)
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def _served_within(procedures: Sequence[Procedure], samples: int) -> Array:
    """Return the probability that what is served is among the m = 0..M lowest of M samples, (M + 1, procedures)."""
    ranks = np.arange(samples)[None, :]
    weights = np.stack([procedure.weights(ranks)[0] for procedure in procedures], axis=1)
    return np.concatenate([np.zeros((1, len(procedures))), np.cumsum(weights, axis=0)])


def _weights_by_rank(rewards_PM: Array, served_within: Array) -> Array:
    """Return the probability that each sample is served, (P, M, procedures), shared evenly within ties."""
    below, at_most = _places(rewards_PM)
    weights = served_within.take(at_most, axis=0)
    weights -= served_within.take(below, axis=0)
    weights /= (at_most - below)[:, :, None]
    return weights


def _servings(
    policy: Samples, base: Samples, procedure: Procedure, base_procedure: Procedure
) -> list[tuple[Array, Samples, Array]]:
    """Return equally good ways to serve: the policy's weights, the base samples to compare with, and their weights."""
    rewinds = [p for p in (procedure, base_procedure) if isinstance(p, RewindAndRepeat)]
    if not rewinds:
        return [(procedure.weights(policy.selected), base, base_procedure.weights(base.selected))]
    draws = base_procedure.n if isinstance(base_procedure, RewindAndRepeat) else 1
    return [
        (_rewound(procedure, policy, references), rest, _rewound(base_procedure, rest, references))
        for references, rest in _halves(base, rewinds, draws)
    ]


def _rewound(procedure: Procedure, samples: Samples, references_PK: Array) -> Array:
    """Return the weights of ``samples``; where the procedure rewinds, with thresholds from ``references_PK``."""
    if isinstance(procedure, RewindAndRepeat):
        return procedure.weights(samples.selected, _thresholds(references_PK, procedure.quantile))
    return procedure.weights(samples.selected)


def rewind_samples(procedure: RewindAndRepeat, draws: int | None = None) -> int:
    """Return how many base samples a prompt Rewind-and-Repeat needs: each half shows the quantile and N ``draws``."""
    q = procedure.quantile
    shown = math.ceil(max(q / (1 - q), (1 - q) / q) - 1e-9)  # of K it lies between two of them if q(K + 1) ≤ K
    return 2 * max(procedure.n if draws is None else draws, shown)


def _halves(base: Samples, rewinds: Sequence[RewindAndRepeat], draws: int) -> list[tuple[Array, Samples]]:
    """Return twice a half of the base's rewards to take thresholds from, and the other half as samples to compare with.

    Raises DataError if a half cannot show the quantiles or has fewer samples than ``draws``.
    """
    needed, found = max(rewind_samples(rewind, draws) for rewind in rewinds), base.selected.shape[1]
    if found < needed:
        raise DataError(f"{rewinds[0].name} needs {needed} base samples a prompt, found {found}")
    half = found // 2
    parts = [
        Samples(base.selected[:, part], base.judged[:, part], None if base.lengths is None else base.lengths[:, part])
        for part in (slice(half), slice(half, None))
    ]
    return [(parts[0].selected, parts[1]), (parts[1].selected, parts[0])]


def _thresholds(references_PK: Array, quantile: float) -> Array:
    """Return the quantile of each prompt, whose rank among fresh samples is right on average."""
    return np.asarray(np.quantile(references_PK, quantile, axis=1, method="weibull"))


# Pairs of samples


def _places(values_PX: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return how many values of its row lie below each value, and how many at or below it, from one sort."""
    order = np.argsort(values_PX, axis=1)
    ordered = np.take_along_axis(values_PX, order, axis=1)
    first = np.ones(ordered.shape, bool)  # of the values that tie
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    last = np.roll(first, -1, axis=1)
    place, samples = np.arange(ordered.shape[1]), ordered.shape[1]
    below, at_most = np.empty((2, *ordered.shape), np.intp)
    np.put_along_axis(below, order, np.maximum.accumulate(np.where(first, place, 0), axis=1), axis=1)
    ends = np.where(last, place + 1, samples)[:, ::-1]
    np.put_along_axis(at_most, order, np.minimum.accumulate(ends, axis=1)[:, ::-1], axis=1)
    return below, at_most


def _beaten(policy_PM: Array, base_PB: Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return how many base values of its prompt lie below each of the policy's, and how many at or below it."""
    ours, theirs = _alike(policy_PM, base_PB)
    own, everyone = _places(ours), _places(np.concatenate([ours, theirs], axis=1))
    below, at_most = (every[:, : policy_PM.shape[1]] - mine for every, mine in zip(everyone, own, strict=True))
    return below, at_most


def _alike(policy_PM: Array, base_PB: Array) -> tuple[Array, Array]:
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
    below, at_most = (start * (samples + 1) + count for count in _beaten(policy_PM, base_PB))
    flat = mass.reshape(-1, procedures)
    beaten = flat.take(below, axis=0)
    beaten += flat.take(at_most, axis=0)
    return np.asarray(np.einsum("pmr,pmr->rp", a_PMR, beaten) / 2)


def _pairs(served: Served) -> Iterator[tuple[slice, Array, Array, Array]]:
    """Yield prompts and all pairs of their samples: weights, wins and differences of lengths, each (p, M, B)."""
    for start, policy, a_PM, base, b_PB in served:
        assert policy.lengths is not None
        assert base.lengths is not None
        ours, theirs = _alike(policy.judged, base.judged)
        for rows in _chunks(len(ours), a_PM.shape[1] * b_PB.shape[1]):
            yield (
                slice(start + rows.start, start + rows.stop),
                a_PM[rows, :, None] * b_PB[rows, None, :],
                win(ours[rows, :, None], theirs[rows, None, :]),
                np.subtract(policy.lengths[rows, :, None], base.lengths[rows, None, :], dtype=float),
            )


def _fit_odds(x: Array, total: Array, won: Array) -> tuple[float, float, Array]:
    """Return α, γ and the curvature of the likelihood where logit P(win) = α + γx fits best.

    At x, a share ``won`` of ``total`` is won. Raises DataError where the likelihood has no maximum.
    """
    design, theta = np.stack([np.ones_like(x), x]), np.zeros(2)
    for _ in range(100):
        p = expit(theta @ design)
        curvature: Array = (design * (total * p * (1.0 - p))) @ design.T
        step = np.linalg.solve(curvature, design @ (won - total * p))
        theta += step / max(1.0, np.abs(step).max())
        if np.abs(step).max() < 1e-9:
            return float(theta[0]), float(theta[1]), curvature
        if np.abs(theta).max() > STEEPEST:
            break
    raise DataError(
        "no win rate at equal length: every served pair is won, or every one lost, or length alone tells which"
    )
