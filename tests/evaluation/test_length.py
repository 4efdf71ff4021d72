"""Win rates at equal length: a direct fit, its influence, and where there is none."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit

from infalign.core.errors import DataError
from infalign.evaluation.length import length_controlled
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import threshold_weights, win_rates_of
from infalign.method.procedures import BestOfN, Procedure, RewindAndRepeat, Standard


@pytest.mark.parametrize("procedure", [BestOfN(3), RewindAndRepeat(0.5, 2)], ids=lambda p: p.name)
def test_length_control_is_the_most_likely_model_and_its_influence(procedure: Procedure) -> None:
    """The mean is that of a direct fit to all pairs; a prompt's value is its jackknife value up to order 1/P."""
    rng = np.random.default_rng(11)
    lengths = rng.integers(20, 400, size=(2, 60, 8))
    judged = rng.normal(size=(2, 60, 8)) + lengths / 150
    policy, base = (Samples(rng.normal(size=(60, 8)), j, n) for j, n in zip(judged, lengths, strict=True))

    def fitted(keep: np.ndarray) -> float:
        ways: list[tuple[float, np.ndarray | None, slice]] = [(1.0, None, slice(0, 8))]
        if isinstance(procedure, RewindAndRepeat):
            ways = [
                (share / 2, np.sort(base.selected[:, part], axis=1)[:, i], rest)
                for part, rest in ((slice(4), slice(4, 8)), (slice(4, 8), slice(4)))
                for i, share in enumerate(threshold_weights(4, procedure))
            ]
        weight, delta, won = [], [], []
        for share, at, rest in ways:
            a, b = procedure.weights(policy.selected, at), procedure.weights(base.selected[:, rest], at)
            weight.append(share * (a[:, :, None] * b[:, None, :])[keep].ravel())
            delta.append((policy.lengths[:, :, None] - base.lengths[:, None, rest])[keep].ravel())
            won.append((policy.judged[:, :, None] > base.judged[:, None, rest])[keep].ravel())
        w, d, y = (np.concatenate(parts) for parts in (weight, delta, won))
        x = np.tanh(d / np.sqrt(np.average(d**2, weights=w) - np.average(d, weights=w) ** 2))
        loss = minimize(lambda t: w @ np.logaddexp(0, t[0] + t[1] * x) - (w * y) @ (t[0] + t[1] * x), [0, 0], tol=1e-9)
        return float(expit(loss.x[0]))

    values = length_controlled([(policy, base)], procedure)
    every = np.arange(60)
    assert values.mean() == pytest.approx(fitted(every), abs=2e-4)  # tanh is rounded to 1/100
    jackknife = [60 * values.mean() - 59 * fitted(every[every != p]) for p in range(6)]
    assert values[:6] == pytest.approx(jackknife, abs=0.08)
    assert np.std(values) > 0.15


def test_length_control_joins_blocks() -> None:
    """Prompts in two blocks have the values they have in one."""
    rng = np.random.default_rng(12)
    policy, base = (Samples(r, r, rng.integers(20, 400, size=(40, 6))) for r in rng.normal(size=(2, 40, 6)))
    whole = length_controlled([(policy, base)], BestOfN(2))
    blocks = [(policy[rows], base[rows]) for rows in (slice(13), slice(13, 40))]
    assert length_controlled(blocks, BestOfN(2)) == pytest.approx(whole)


def test_length_control_without_length_differences_is_the_win_rate() -> None:
    """Where all lengths are equal there is nothing to control."""
    rng = np.random.default_rng(13)
    policy, base = (Samples(r, r, np.full((5, 4), 37)) for r in rng.normal(size=(2, 5, 4)))
    controlled = length_controlled([(policy, base)], BestOfN(2))
    assert controlled.tolist() == win_rates_of(policy, base, [BestOfN(2)])[0].tolist()


def test_length_control_says_where_it_cannot_know() -> None:
    """Without lengths, overlap of lengths, or wins and losses at a length, no number is made up."""
    rng = np.random.default_rng(14)
    one, two = rng.normal(size=(2, 30, 4))
    short, long = rng.integers(10, 50, size=(30, 4)), rng.integers(60, 90, size=(30, 4))
    with pytest.raises(DataError, match="needs the lengths"):
        length_controlled([(Samples(one, one, short), Samples(two, two))], Standard())
    with pytest.raises(DataError, match="of the policy is longer"):
        length_controlled([(Samples(one, one, long), Samples(two, two, short))], Standard())
    with pytest.raises(DataError, match="of the policy is shorter"):
        length_controlled([(Samples(one, one, short), Samples(two, two, long))], Standard())
    mixed = np.where(rng.random((30, 4)) < 0.5, short, long)
    with pytest.raises(DataError, match="the policy wins every served pair"):
        length_controlled([(Samples(one + 99, one + 99, mixed), Samples(two, two, mixed[::-1]))], Standard())
    for constant in (7, 0.003):
        same = np.full((30, 4), 0.002)
        with pytest.raises(DataError, match="of the policy is longer"):
            length_controlled([(Samples(one, one, same + constant), Samples(two, two, same))], Standard())
    judged = mixed + 0.0  # the longer one always wins
    with pytest.raises(DataError, match="length alone decides"):
        length_controlled(
            [(Samples(judged, judged, mixed), Samples(judged[::-1], judged[::-1], mixed[::-1]))], Standard()
        )
