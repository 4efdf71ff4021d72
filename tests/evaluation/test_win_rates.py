"""Win rates against enumeration over all subsets, and against theory's for samples of known laws."""

import numpy as np
import pytest
from scipy.integrate import simpson
from scipy.stats import beta

from infalign.core.errors import DataError
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import rewind_draws, threshold_weights, tie_rate, win_rates_of
from infalign.method.calibration import win
from infalign.method.procedures import BestOfN, Procedure, RewindAndRepeat, Standard, WorstOfN, parse_procedure
from infalign.method.transforms import parse_transform
from infalign.theory.law import law_at_kl

PROCEDURES = [
    *(kind(n) for kind in (BestOfN, WorstOfN) for n in range(1, 6)),
    *map(parse_procedure, ("standard", "2nd-best-of-3", "top-2-of-4", "0.25*best-of-5+0.75*standard")),
]


def by_pairs(policy: Samples, base: Samples, ours: Procedure, theirs: Procedure) -> np.ndarray:
    """Return the win rates as sums over all pairs of samples, weighed as the procedures say, ties one half."""
    a, b = ours.weights(policy.selected), theirs.weights(base.selected)
    return np.einsum("pm,pb,pmb->p", a, b, win(policy.judged[:, :, None], base.judged[:, None, :]))


@pytest.mark.parametrize("seed", range(3))
def test_all_procedures_at_once_equal_the_sum_over_all_pairs(seed: int) -> None:
    """Under other procedures on the two sides, with ties, in any order of the samples, for increasing maps of both."""
    rng = np.random.default_rng(seed)
    sides = [rng.integers(0, 4, size=(2, 3, size)).astype(float) for size in (7, 5)]  # many ties in both rewards
    policy, base = (Samples(*side) for side in sides)
    served = PROCEDURES[::-1]
    exact = np.array([by_pairs(policy, base, *both) for both in zip(PROCEDURES, served, strict=True)])
    assert win_rates_of(policy, base, PROCEDURES, served) == pytest.approx(exact, abs=1e-12)
    shuffled = [Samples(*np.exp(rng.permutation(side, axis=2))) for side in sides]
    assert win_rates_of(*shuffled, PROCEDURES, served) == pytest.approx(exact, abs=1e-12)
    own = win_rates_of(policy, base, [BestOfN(2), Softmax()], [Softmax(), BestOfN(2)])
    assert own[0] == pytest.approx(by_pairs(policy, base, BestOfN(2), Softmax()))
    assert own[1] == pytest.approx(by_pairs(policy, base, Softmax(), BestOfN(2)))


def test_many_prompts_give_what_each_gives_alone() -> None:
    """The prompts of an array too large for one piece of work have the win rates that they have alone."""
    rng = np.random.default_rng(6)
    policy, base = rng.normal(size=(2, 2, 3000, 12))
    together = win_rates_of(Samples(*policy), Samples(*base), PROCEDURES)
    for p in (0, 1, 777, 2999):
        alone = [Samples(*side[:, p : p + 1]) for side in (policy, base)]
        assert win_rates_of(*alone, PROCEDURES)[:, 0] == pytest.approx(together[:, p], abs=1e-12)
        assert win_rates_of(*alone, [BestOfN(4)])[0] == pytest.approx(together[3, p], abs=1e-12)


class Softmax:
    """Serve a sample with a probability proportional to e^reward: a procedure that looks at more than ranks."""

    name = "softmax"

    def weights(self, rewards_PM: np.ndarray, thresholds_P: np.ndarray | None = None) -> np.ndarray:
        odds = np.exp(rewards_PM)
        return odds / odds.sum(axis=1, keepdims=True)


def test_samples_of_known_laws_reach_their_analytic_win_rates() -> None:
    """In 50 random settings of law, procedures and numbers of samples the estimate is the theory's within 3 errors."""
    rng = np.random.default_rng(7)
    names = ["identity", "log", "exp:5", "exp:-5", "power:3", "power:-3"]
    for _ in range(50):
        law = law_at_kl(parse_transform(rng.choice(names)), kl=rng.uniform(0.05, 1.2))
        ours, theirs = (PROCEDURES[i] for i in rng.integers(len(PROCEDURES), size=2))
        samples, base_samples = rng.integers(5, 30, size=2)
        u = np.interp(rng.random((1000, samples)), np.r_[0, law.cdf, 1], np.r_[0, law.u, 1])
        v = rng.random((1000, base_samples))
        (wins,) = win_rates_of(Samples(u, u), Samples(v, v), [ours], [theirs])
        error = wins.std(ddof=1) / np.sqrt(wins.size)
        assert abs(wins.mean() - law.win_rate(ours, theirs)) < 3 * error, (law.transform.name, ours.name, theirs.name)


@pytest.mark.parametrize("name", ["rewind:0.8:4", "rewind:0.8:4:best"])
@pytest.mark.parametrize("base", [None, "best-of-2", "rewind:0.8:2"])
def test_rewind_is_theory_at_the_quantile_itself(name: str, base: str | None) -> None:
    """From 19 references, whose 0.8 quantile has a Beta(16, 4) rank, win rate and draws are theory's, nearly."""
    rng = np.random.default_rng(8)
    procedure, served = parse_procedure(name), base and parse_procedure(base)
    law = law_at_kl(parse_transform("exp:3"), kl=0.3)
    u = np.interp(rng.random((6000, 8)), np.r_[0, law.cdf, 1], np.r_[0, law.u, 1])
    v = rng.random((6000, 38))
    (wins,) = win_rates_of(Samples(u, u), Samples(v, v), [procedure], [served or procedure])
    slack = 0.005 if base == "rewind:0.8:2" else 0.0025  # the covariance of two thresholds stays
    assert abs(wins.mean() - law.win_rate(procedure, served)) < 3 * wins.std() / np.sqrt(wins.size) + slack
    draws = rewind_draws(Samples(u, u), Samples(v, v), procedure)
    off = abs(draws.mean() - law.draws(procedure))
    assert off < 3 * draws.std() / np.sqrt(6000) + 0.01 * law.draws(procedure)
    naive = procedure.draws(u, np.quantile(v[:, :19], 0.8, axis=1, method="weibull"))
    assert naive.mean() - law.draws(procedure) > 2 * off


@pytest.mark.parametrize(("references", "kinds"), [(3, 3), (8, 5), (12, 8), (32, 8), (200, 8)])
def test_weights_of_thresholds_act_like_the_quantile(references: int, kinds: int) -> None:
    """Integrals over each order statistic's Beta law, weighed, are φ(q) for every φ that is promised; ranks nearby."""
    q, n = 0.7, 9
    weights = threshold_weights(references, RewindAndRepeat(q, n))
    assert weights.sum() == pytest.approx(1.0, abs=1e-9)
    x = np.linspace(0, 1, 4001)
    for k, factor in [(k, f) for k in range(4) for f in (np.ones_like(x), sum(x**j for j in range(n)))][:kinds]:
        phi = (x - q) ** k * factor
        laws = beta(np.arange(1, references + 1)[:, None], references + 1 - np.arange(1, references + 1)[:, None])
        means = np.array([simpson(phi * density, x=x) for density in laws.pdf(x[None, :])])
        assert weights @ means == pytest.approx(np.interp(q, x, phi), abs=2e-5 * np.abs(weights).sum())
    used = np.flatnonzero(weights) / references
    assert np.abs(used - q).max() < 10 / np.sqrt(references)


def test_a_threshold_that_ties_is_passed() -> None:
    """Of rewards 0 and 1 the 0.8 quantile is 1, where all ones pass: draws follow P(1), if the quantile is not near."""
    rng = np.random.default_rng(14)
    rewards = (rng.random((3000, 400)) < 0.4).astype(float)
    draws = rewind_draws(Samples(rewards, rewards), Samples(rewards, rewards), RewindAndRepeat(0.8, 3))
    exact = 1 + 0.6 + 0.36
    assert draws.mean() == pytest.approx(exact, abs=3 * draws.std() / np.sqrt(3000))


def test_what_base_samples_cannot_show_is_an_error() -> None:
    """The other half of four for four draws, and the 0.99 quantile of nineteen, whatever serves the base."""
    samples = Samples(*np.random.default_rng(0).random((2, 2, 38)))
    with pytest.raises(DataError, match=r"rewind:0.5:4 needs 8 base samples"):
        win_rates_of(samples[:, :4], samples[:, :4], [RewindAndRepeat(0.5, 4)])
    with pytest.raises(DataError, match=r"rewind:0.99:2 needs 198 base samples per prompt, found 38"):
        win_rates_of(samples, samples, [RewindAndRepeat(0.99, 2)], [Standard()])
    assert win_rates_of(samples, samples, [RewindAndRepeat(0.95, 2)], [Standard()]).shape == (1, 2)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(bad: float) -> None:
    """A reward that is not finite, the judge's and a length too, is named by prompt and sample."""
    good, wrong = np.zeros((3, 4)), np.zeros((3, 4))
    wrong[1, 2] = bad
    for name, columns in (("selection reward", (wrong, good)), ("judge reward", (good, wrong))):
        with pytest.raises(DataError, match=f"the {name} of prompt 1, sample 2 is"):
            Samples(*columns)
    with pytest.raises(DataError, match="the length of prompt 1, sample 2 is"):
        Samples(good, good, wrong)


def test_rewards_of_any_number_type_are_compared_and_text_is_refused() -> None:
    """Integers, booleans and both precisions compare; a reward stored as float32 ties with its float64 original."""
    exact = np.array([[0.1, 0.2, 0.3]])
    rounded = exact.astype(np.float32)
    assert rounded[0, 0] > exact[0, 0]  # as float64 it would win
    twins = Samples(rounded, rounded), Samples(exact, exact)
    assert win_rates_of(*twins, [Standard()])[0] == pytest.approx([0.5])
    assert tie_rate(*twins) == pytest.approx([1 / 3])
    near = np.array([[0.1, 0.1 + 1e-12, 0.4]])  # one value as float32
    mixed = Samples(near, near), Samples(rounded, rounded)
    assert win_rates_of(*mixed, [Standard()])[0] == pytest.approx([(0.5 + 0.5 + 3) / 9])
    won, lost = np.array([[True, True]]), np.array([[0, 0, 1]])
    assert win_rates_of(Samples(won, won), Samples(lost, lost), [Standard()])[0] == pytest.approx([5 / 6])
    text = np.array([["0.1", "0.2"]])
    with pytest.raises(DataError, match="must be numbers"):
        Samples(text, text)
