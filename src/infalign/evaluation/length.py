"""Win rates at equal length."""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from infalign.core.errors import DataError
from infalign.evaluation.samples import Samples, chunks
from infalign.evaluation.win_rates import alike, ways_to_serve, win_rates_of
from infalign.method.calibration import Array, win
from infalign.method.procedures import Procedure

LENGTH_STEPS = 100  # tanh of a length difference is rounded to 1/100
SAME_LENGTH_TOLERANCE = 1e-6  # relative spread of length differences up to which they are all the same but for rounding
MAX_LOG_ODDS = 20.0  # log odds beyond this mean that the likelihood has no maximum


def length_controlled(
    blocks: Sequence[tuple[Samples, Samples]], procedure: Procedure, base_procedure: Procedure | None = None
) -> Array:
    """Return one value per prompt; their mean is the win rate at equal length. Judges favor length.

    Over all pairs of samples, weighed as they are served, logit P(win) = α + γ·tanh(Δ/s) is fitted, Δ the policy's
    length minus the base's and s its standard deviation; the win rate at equal length is σ(α), which is AlpacaEval 2's
    without its terms for annotator and instruction. A prompt's value is σ(α) plus the prompt's influence on it, so that
    `estimate` gives the interval, and the differences of two policies' values give a paired one.

    ``blocks`` are pairs (policy, base) with lengths; prompts with other numbers of samples go to another block. Where
    no lengths differ these are the win rates themselves. tanh is rounded to 1/100. Cost: all pairs, for one procedure.

    It answers for a judge swayed by length alone, alike for every prompt, in steps of log odds that saturate. Do
    not trust it where good answers have to be long, or where few pairs are near equal length: there α is extrapolated.

    Raises DataError without lengths, where every served pair is won or every one lost, where all of the policy's
    responses are longer than the base's or all shorter, and where length alone tells who wins.

    >>> rng = np.random.default_rng(0)
    >>> lengths = [rng.random((400, 8)) < share for share in (0.8, 0.3)]
    >>> policy, base = (Samples(own, own + rng.gumbel(size=own.shape), own) for own in lengths)
    >>> apart = win_rates_of(policy, base, [BestOfN(1)]), length_controlled([(policy, base)], BestOfN(1))
    >>> [f"{values.mean():.2f}" for values in apart]  # a judge that favors length, between equals
    ['0.62', '0.50']
    """
    if any(samples.lengths is None for block in blocks for samples in block):
        raise DataError("a length-controlled win rate needs the lengths of both models' samples")
    base_procedure = base_procedure or procedure
    served_pairs = partial(_served_pairs, blocks, procedure, base_procedure)
    prompts = sum(len(policy.selected) for policy, _ in blocks)
    mean = square = 0.0
    for _, weight, _, delta in served_pairs():
        mean += float((weight * delta).sum()) / prompts
        square += float((weight * delta**2).sum()) / prompts
    if square == 0.0:
        return np.concatenate([win_rates_of(*block, [procedure], [base_procedure])[0] for block in blocks])
    deviation = np.sqrt(max(square - mean**2, 0.0))
    if deviation <= SAME_LENGTH_TOLERANCE * abs(mean):
        raise _never_equal(mean)

    def steps(delta: Array) -> NDArray[np.intp]:
        return np.asarray(np.rint(LENGTH_STEPS * np.tanh(delta / deviation)), np.intp)

    x = np.arange(-LENGTH_STEPS, LENGTH_STEPS + 1) / LENGTH_STEPS
    total, won = np.zeros((2, x.size))
    for _, weight, wins, delta in served_pairs():
        at = steps(delta).ravel() + LENGTH_STEPS
        total += np.bincount(at, weight.ravel(), x.size) / prompts
        won += np.bincount(at, (weight * wins).ravel(), x.size) / prompts
    if not total[x <= 0].any() or not total[x >= 0].any():
        raise _never_equal(mean)
    alpha, gamma, curvature = _fit_odds(x, total, won)
    expected = expit(alpha + gamma * x)
    scores_P2 = np.zeros((prompts, 2))
    for rows, weight, wins, delta in served_pairs():
        at = steps(delta)
        residual = weight * (wins - expected[at + LENGTH_STEPS])
        slopes = (residual * at).sum(axis=(1, 2)) / LENGTH_STEPS
        scores_P2[rows] += np.stack([residual.sum(axis=(1, 2)), slopes], axis=1)
    level = expit(alpha)
    return np.asarray(level + level * (1 - level) * np.linalg.solve(curvature, scores_P2.T)[0])


def _never_equal(difference: float) -> DataError:
    way = "longer" if difference > 0 else "shorter"
    return DataError(f"no pair of equal length: every served response of the policy is {way} than the base policy's")


def _served_pairs(
    blocks: Sequence[tuple[Samples, Samples]], procedure: Procedure, base_procedure: Procedure
) -> Iterator[tuple[slice, Array, Array, Array]]:
    """Yield prompts and all pairs of their samples: weights, wins and differences of lengths, each (p, M, B)."""
    start = 0
    for policy, base in blocks:
        for rows in chunks(len(policy.selected), policy.selected.shape[1] * base.selected.shape[1]):
            ours = policy[rows]
            for a_PMR, rest, b_PBR in ways_to_serve(ours, base[rows], procedure, base_procedure):
                assert ours.lengths is not None
                assert rest.lengths is not None
                judged, base_judged = alike(ours.judged, rest.judged)
                yield (
                    slice(start + rows.start, start + rows.stop),
                    np.einsum("pmr,pbr->pmb", a_PMR, b_PBR),
                    win(judged[:, :, None], base_judged[:, None, :]),
                    np.subtract(ours.lengths[:, :, None], rest.lengths[:, None, :], dtype=float),
                )
        start += len(policy.selected)


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
        if np.abs(theta).max() > MAX_LOG_ODDS:
            break
    raise DataError(
        "no win rate at equal length: the policy wins every served pair, loses every one, or length alone decides"
    )
