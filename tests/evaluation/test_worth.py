"""What training on stored verdicts can be worth."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import beta, binom

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.extrapolation import RATES, Counts
from infalign.evaluation.measures import measure
from infalign.evaluation.worth import _Trained, worth
from infalign.method.optimum import Optimal
from infalign.method.procedures import BestOfN, Standard

EDGES = np.concatenate([[0.0], (RATES[1:] + RATES[:-1]) / 2.0, [1.0]])


class Known(Counts):
    """Counts of prompts whose rates are Beta(.4, 1.6)."""

    mixture = np.diff(beta.cdf(EDGES, 0.4, 1.6))


@pytest.mark.parametrize(
    ("responses", "known", "ordinary", "law"),
    [(16, False, 0.786, 0.848), (32, False, 0.786, 0.864), (64, False, 0.786, 0.877), (16, True, 0.786, 0.936)],
)
def test_a_known_law_has_the_limits_computed_before(responses: int, known: bool, ordinary: float, law: float) -> None:
    """pass@8 at .3 nats by policies that know (c + ½)/(K + 1) of Beta(.4, 1.6), or the rate, found by fixed points."""
    counts = Known([0, responses], responses)
    for name, expected in ((Standard(), ordinary), (BestOfN(8), law)):
        value = _Trained(counts, name, BestOfN(8), known=known).at(0.3)
        assert (value @ counts.mixture).item() == pytest.approx(expected, abs=1.1e-3)


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.9])
def test_a_policy_is_the_mean_over_what_may_be_stored_of_the_optimum_on_it(rate: float) -> None:
    """By enumeration of c of 5, with the reward that a trainer gets."""
    at = int(np.abs(RATES - rate).argmin())
    shaping = Optimal(BestOfN(4), 0.5, pair=(0.0, 1.0))
    shifts = np.zeros(6)
    value = kl = 0.0
    for c in range(6):
        wrong, right = shaping([0.0, 1.0], np.sort(np.arange(5) < c).astype(float)) / 0.5
        shifts[c] = -wrong
        odds = RATES[at] / (1.0 - RATES[at]) * np.exp(right - wrong)
        q = odds / (1.0 + odds)
        chance = binom.pmf(c, 5, RATES[at])
        value += chance * (1.0 - (1.0 - q) ** 4)
        kl += chance * (q * np.log(q / RATES[at]) + (1.0 - q) * np.log((1.0 - q) / (1.0 - RATES[at])))
    values, spent = _Trained(Counts([0, 5], 5), BestOfN(4), BestOfN(4))._by_rate(shifts[:, None])
    assert (values[0, at], spent[0, at]) == (pytest.approx(value), pytest.approx(kl))


@pytest.mark.parametrize("known", [False, True])
def test_at_no_kl_it_is_the_unbiased_pass_rate_and_gains_nothing(known: bool) -> None:
    """For prompts with different numbers of responses."""
    correct, samples = [0, 3, 8, 1, 0, 9], [8, 8, 8, 16, 16, 16]
    rewards = [np.arange(n) < c for c, n in zip(correct, samples, strict=True)]
    today = measure(rewards, ["pass@8"])[0]
    none = worth(Counts(correct, samples), "best-of-8", [0.0], known=known)[0]
    for limits in (none.today, none.ordinary, none.law):
        assert limits.as_dict() == pytest.approx({name: today[name] for name in ("mean", "low", "high")})
    assert set(none.gain.as_dict().values()) | set(none.difference.as_dict().values()) == {0.0}


@pytest.mark.parametrize("procedure", ["best-of-8", "worst-of-4", "2nd-best-of-4", "0.5*best-of-2+0.5*best-of-8"])
def test_where_all_is_right_nothing_is_promised(procedure: str) -> None:
    """At most what up to 1 − .025^{1/40} of other prompts could gain, of which 40 show none."""
    for one in worth(Counts([16] * 40, 16), procedure, [0.1, 3.0]):
        assert (one.gain.mean, one.difference.mean) == pytest.approx((0.0, 0.0), abs=1e-6)
        assert max(one.gain.high, one.difference.high) < 1.0 - 0.025 ** (1 / 40) + 0.002


def test_rates_below_what_is_seen_promise_less() -> None:
    """A fifth that is never right is promised nothing, where (c + ½)/(K + 1) of it would gain."""
    one = worth(Counts([0] * 50 + [16] * 200, 16), "best-of-8", [0.05])[0]
    assert one.law.mean == pytest.approx(0.8, abs=0.01)
    assert one.gain.low <= 0.0 < one.gain.high


@pytest.mark.parametrize(
    ("correct", "procedure", "kls", "error"),
    [
        ([1, 2], "best-of-8", [0.1], DataError),
        ([1, 5], "best-of-4", [0.1], DataError),
        ([1, 2], "rewind:0.85:32", [0.1], ConfigError),
        ([1, 2], "best-of-4", [-0.1], ConfigError),
        ([1, 2], "best-of-4", [np.nan], ConfigError),
    ],
)
def test_what_has_no_worth_is_refused(correct: list[int], procedure: str, kls: list[float], error: Any) -> None:
    """Fewer responses than the procedure draws, too."""
    with pytest.raises(error):
        worth(Counts(correct, 4), procedure, kls)
