"""The judge's view of the reward, estimated from the base policy's own samples that both have scored.

Half of a prompt's samples are ranked among each other, the other half is what the base serves. The r-th lowest of H
ranked samples has a rank U ~ Beta(r, H − r + 1) among all responses, so the share of comparisons that it wins is an
unbiased estimate of E A(U), and A is fitted through these means: its estimate has no bias from finite ranks.
"""

import numpy as np
from scipy.special import betaln, log_ndtr, ndtr, ndtri

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.intervals import Estimate, estimate, resampled_means
from infalign.evaluation.samples import Samples, chunks
from infalign.evaluation.win_rates import win_rates_of
from infalign.method.calibration import Array, win
from infalign.method.judge import MIN_JUDGED_SAMPLES, EstimatedJudge, ProbitSpline, normal_density
from infalign.method.procedures import BestOfN, Procedure, Standard, looks_at_ranks

RANDOM_SPLITS = 8  # random halves of the samples, each used both ways
KNOT_NUMBERS = (3, 5, 7, 10, 14)  # of the spline: the first number with which it fits to within the noise, or the last
SCORES = np.linspace(-8.0, 8.0, 321)
ROUNDS, DAMPING = 20, 1e-6


def estimated_judge(base: Samples, procedure: Procedure, *, seed: int = 0) -> EstimatedJudge:
    """Return how the judge of ``base`` sees the ranks of its reward, against the base served by ``procedure``.

    N⁻¹(A) is a natural cubic spline in the normal score of the rank, by least squares, with as few knots as miss the
    measured chances by no more than their standard error. The resampled judges come from prompts drawn with
    replacement. Raises DataError for fewer than 8 samples per prompt or 4 prompts,
    and for fewer samples in a half than ``procedure`` draws; ConfigError for Rewind-and-Repeat.
    """
    if not looks_at_ranks(procedure):
        raise ConfigError(f"estimating a judge needs a base policy served by ranks; {procedure.name} is not")
    chances_PH = judged_chances(base, procedure, seed=seed)
    prompts, ranked = chances_PH.shape
    if prompts < 4:
        raise DataError(f"estimating a judge needs at least 4 prompts, found {prompts}")
    order = np.random.default_rng(seed).permutation(prompts)
    half = [chances_PH[part].mean(axis=0) for part in (order[: prompts // 2], order[prompts // 2 :])]
    whole = chances_PH.mean(axis=0)
    noise = float(np.sqrt(np.mean(chances_PH.var(axis=0, ddof=1) / prompts)))
    for knots in KNOT_NUMBERS:
        plain = _fit_splines(whole[None], knots)
        misfit = float(np.sqrt(np.mean((_order_statistic_weights(ranked) @ plain.chance(SCORES)[0] - whole) ** 2)))
        if misfit <= noise:
            break
    fitted = _fit_splines(
        np.concatenate([[whole, *half], resampled_means(chances_PH, seed=seed)]), knots, plain.coefficients
    )
    judge, first, second = (ProbitSpline(fitted.knots, fitted.coefficients[i]) for i in range(3))
    resampled = ProbitSpline(fitted.knots, fitted.coefficients[3:])
    return EstimatedJudge(judge, resampled, (first, second), prompts, base.selected.shape[1], misfit, noise)


def judged_chances(base: Samples, procedure: Procedure, *, seed: int = 0) -> Array:
    """Return how often the r-th lowest of H ranked samples beats, by the judge, what ``procedure`` serves, (P, H).

    The mean over random halves of each prompt's samples; rewards that tie are ranked at random.
    """
    prompts, samples = base.selected.shape
    if samples < MIN_JUDGED_SAMPLES:
        raise DataError(f"estimating a judge needs at least {MIN_JUDGED_SAMPLES} samples per prompt, found {samples}")
    half, rng = samples // 2, np.random.default_rng(seed)
    chances_PH = np.zeros((prompts, half))
    for _ in range(RANDOM_SPLITS):
        order = rng.permuted(np.broadcast_to(np.arange(samples), (prompts, samples)), axis=1)
        parts = [
            [np.take_along_axis(values, order[:, part], axis=1) for values in (base.selected, base.judged)]
            for part in (slice(half), slice(samples - half, None))
        ]
        for (rewards, judged), (other, others_judged) in (parts, parts[::-1]):
            ranks = np.argsort(rewards, axis=1, kind="stable")
            ranked, served = np.take_along_axis(judged, ranks, axis=1), procedure.weights(other)
            for rows in chunks(prompts, half * half):
                wins = win(ranked[rows, :, None], others_judged[rows, None, :])
                chances_PH[rows] += (wins @ served[rows, :, None])[..., 0]
    return chances_PH / (2 * RANDOM_SPLITS)


def best_of_n_by_judge(base: Samples, most: int) -> tuple[list[int], Array]:
    """Return N = 1, 2, 4, … and each prompt's win rate by the judge of Best-of-N over one plain draw, (N, P).

    Half of the samples are served, the other half compared with, and the halves take turns. N is at most ``most`` and
    the number of samples in a half.
    """
    half = base.selected.shape[1] // 2
    sizes = [2**i for i in range(64) if 2**i <= min(most, half)]
    first, second = (
        Samples(base.selected[:, part], base.judged[:, part]) for part in (slice(half), slice(half, 2 * half))
    )
    served, plain = [BestOfN(n) for n in sizes], [Standard()] * len(sizes)
    won_NP = (win_rates_of(first, second, served, plain) + win_rates_of(second, first, served, plain)) / 2
    return sizes, won_NP


def turning_point(sizes: list[int], won_NP: Array, *, confidence: float = 0.95) -> tuple[int, Estimate] | None:
    """Return the N from which Best-of-N falls by the judge, and by how much up to the largest N; None if none is sure.

    Each smaller N is compared with the largest, paired by prompt and at a confidence that holds for all together.
    """
    level = 1.0 - (1.0 - confidence) / max(len(sizes) - 1, 1)
    falls = {
        n: fall
        for n, won in zip(sizes[:-1], won_NP[:-1], strict=True)
        if (fall := estimate(won - won_NP[-1], confidence=level)).low > 0
    }
    if not falls:
        return None
    highest = max(falls, key=lambda n: falls[n].mean)
    return highest, falls[highest]


def _order_statistic_weights(ranked: int) -> Array:
    """Return weights with which A at SCORES has the mean E A(U) at each of H order statistics, (H, scores)."""
    r = np.arange(1, ranked + 1)[:, None]
    log_beta = (r - 1) * log_ndtr(SCORES) + (ranked - r) * log_ndtr(-SCORES) - betaln(r, ranked - r + 1)
    weights = np.exp(log_beta) * normal_density(SCORES)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _fit_splines(means_BH: Array, knots: int, start: Array | None = None) -> ProbitSpline:
    """Return the splines whose expected chances are nearest to each row of means, by damped Gauss–Newton steps."""
    ranked = means_BH.shape[1]
    expected = _order_statistic_weights(ranked)
    outermost = float(ndtri(ranked / (ranked + 1.0)))
    places = np.linspace(-outermost, outermost, knots)
    basis = ProbitSpline(places, np.zeros(knots)).basis(SCORES)
    coefficients = np.zeros((len(means_BH), knots)) + (0.0 if start is None else start)
    damping = np.full(len(means_BH), DAMPING)

    def missed(coefficients: Array) -> Array:
        return np.asarray(means_BH - ndtr(coefficients @ basis) @ expected.T)

    misses = missed(coefficients)
    for _ in range(ROUNDS):
        sensitivity = normal_density(coefficients @ basis)
        jacobian = np.stack([(sensitivity * row) @ expected.T for row in basis], axis=2)
        normal, slope = jacobian.transpose(0, 2, 1) @ jacobian, (misses[:, None, :] @ jacobian)[:, 0]
        ridge = damping[:, None, None] * np.eye(knots)
        trial = coefficients + np.linalg.solve(normal + ridge, slope[..., None])[..., 0]
        found = missed(trial)
        better = (found**2).sum(axis=1) <= (misses**2).sum(axis=1)
        coefficients[better], misses[better] = trial[better], found[better]
        damping = np.where(better, np.maximum(damping / 4.0, DAMPING), damping * 16.0)
    return ProbitSpline(places, coefficients)
