"""Procedures: sample weights against enumeration in exact arithmetic, and distortions against their laws."""

import math
import pickle
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.polynomial.legendre import leggauss

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.settings import read_procedure
from infalign.evaluation.win_rates import win_rates
from infalign.method.optimum import optimum
from infalign.method.procedures import (
    BaseQuantile,
    BestOfN,
    Draws,
    Mixture,
    OrderStatistics,
    RankProcedure,
    RewindAndRepeat,
    Served,
    Standard,
    WorstOfN,
    parse_procedure,
)
from infalign.method.procedures.order_statistics import kth_best, top_k
from infalign.method.transforms import Identity
from infalign.theory.choose import choose
from infalign.theory.law import aligned_law, law_at_kl
from infalign.theory.optimum import rank_optimum


@pytest.mark.parametrize(
    "procedure",
    [BestOfN(128), WorstOfN(128), kth_best(40, 128), top_k(3, 128), RewindAndRepeat(0.9, 128)],
    ids=lambda procedure: procedure.name,
)
def test_weights_of_many_samples_are_exact(procedure: Served) -> None:
    """From 1000 samples the weights still agree with binomials of whole numbers, here at six ranks, and sum to 1."""
    m, ranks = 1000, (1, 500, 872, 900, 901, 1000)
    match procedure:
        case BestOfN(n):
            exact = [Fraction(math.comb(j - 1, n - 1), math.comb(m, n)) for j in ranks]
        case WorstOfN(n):
            exact = [Fraction(math.comb(m - j, n - 1), math.comb(m, n)) for j in ranks]
        case OrderStatistics(_, probabilities):
            exact = [
                sum(
                    Fraction(q) * Fraction(math.comb(j - 1, i - 1) * math.comb(m - j, 128 - i), math.comb(m, 128))
                    for i, q in enumerate(probabilities, 1)
                    if q
                )
                for j in ranks
            ]
        case RewindAndRepeat(_, n):  # of 900 samples that fail
            failing = Fraction(math.perm(899, n - 1), math.perm(999, n - 1) * m)
            exact = [failing if j <= 900 else (1 - 900 * failing) / 100 for j in ranks]
    weights = procedure.weights([np.arange(1000.0)], [900.0])[0]
    assert weights[np.array(ranks) - 1] == pytest.approx([float(weight) for weight in exact], rel=1e-8, abs=1e-14)
    assert weights.sum() == pytest.approx(1.0, abs=1e-11)


def chosen(procedure: Served, rewards: Sequence[float], threshold: float = 0.0, seed: int = 0) -> tuple[int, int]:
    """Return which of ``rewards``, drawn in their order, is served, and how many were drawn for it."""
    serving, drawn, answer = procedure.serving(np.random.default_rng(seed)), 0, None
    try:
        while True:
            match serving.send(answer):
                case Draws(number):
                    answer = list(rewards[drawn : drawn + number])
                    drawn += number
                case BaseQuantile(quantile):
                    assert quantile == procedure.quantile
                    answer = [threshold]
    except StopIteration as ended:
        return ended.value, max(drawn, ended.value + 1)


@pytest.mark.parametrize(
    "procedure",
    [
        *(Standard(), BestOfN(1), BestOfN(3), BestOfN(5), WorstOfN(3), WorstOfN(5), kth_best(2, 4), kth_best(4, 4)),
        *(top_k(2, 4), OrderStatistics("uneven", (0.125, 0.5, 0.0, 0.375))),
        *(RewindAndRepeat(0.5, n, serve) for n in (1, 3, 4) for serve in ("last", "best")),
        parse_procedure("0.3*best-of-3+0.5*standard+0.2*worst-of-2"),
    ],
    ids=lambda procedure: procedure.name,
)
@pytest.mark.parametrize("rewards", [[3.0, 1.0, 4.0, 2.0, 5.0], [1.0, 2.0, 1.0, 2.0, 1.0], [4.0] * 5])
@pytest.mark.parametrize("threshold", [2.0, 4.0, 6.0])
def test_what_is_served_of_all_orders_of_draws_is_what_the_weights_say(
    procedure: Served, rewards: list[float], threshold: float
) -> None:
    """Each sample is served in the share of orders that its weight is, ties and the number of draws included."""
    # those that draw a rank or a part by luck get 40 seeds for each order, and 5 standard errors
    lucky = procedure.name in ("top-2-of-4", "uneven") or isinstance(procedure, Mixture)
    orders = list(permutations(range(len(rewards)))) * (40 if lucky else 1)
    served, draws = np.zeros(len(rewards)), []
    for seed, order in enumerate(orders):
        place, drawn = chosen(procedure, [rewards[i] for i in order], threshold, seed)
        served[order[place]] += 1 / len(orders)
        draws.append(drawn)
    # equal samples serve alike, but which of them is served is not what a weight says
    share = [served[np.equal(rewards, reward)].mean() for reward in rewards]
    error = 5 * 0.5 / np.sqrt(len(orders)) if lucky else 1e-12
    np.testing.assert_allclose(share, procedure.weights([rewards], [threshold])[0], atol=error)
    if isinstance(procedure, RewindAndRepeat):
        assert np.mean(draws) == pytest.approx(procedure.draws([rewards], [threshold])[0])


ORDER_STATISTICS = st.integers(1, 12).flatmap(
    lambda n: (
        st.lists(st.integers(0, 5), min_size=n, max_size=n)
        .filter(any)
        .map(lambda odds: OrderStatistics("any", tuple(odd / sum(odds) for odd in odds)))
    )
)
KNOWN = st.one_of(
    st.just(Standard()),
    st.integers(1, 300).map(BestOfN),
    st.integers(1, 300).map(WorstOfN),
    st.integers(1, 40).flatmap(lambda n: st.integers(1, n).map(lambda k: kth_best(k, n))),
    st.integers(1, 40).flatmap(lambda n: st.integers(1, n).map(lambda k: top_k(k, n))),
)


def mixed(parts: st.SearchStrategy[RankProcedure]) -> st.SearchStrategy[Mixture]:
    """Return mixtures whose probabilities have a short spelling."""
    odds = st.sampled_from([(1.0,), (0.5, 0.5), (0.25, 0.75), (0.1, 0.2, 0.7), (1e-7, 1 - 1e-7)])
    return odds.flatmap(
        lambda weights: st.tuples(*(parts for _ in weights)).map(
            lambda found: Mixture(tuple(zip(weights, found, strict=True)))
        )
    )


NAMEABLE = st.one_of(KNOWN, mixed(KNOWN), mixed(mixed(KNOWN)))
REWOUND = st.builds(RewindAndRepeat, st.floats(0.001, 0.999), st.integers(1, 64), st.sampled_from(["last", "best"]))
P = np.concatenate(
    [[0.0], np.geomspace(1e-300, 0.1, 30), np.linspace(0.1, 0.9, 81)[1:], 1 - np.geomspace(0.09, 1e-16, 30)]
)
P = np.append(P, 1.0)


@given(st.one_of(NAMEABLE, ORDER_STATISTICS, st.tuples(REWOUND, st.floats(0.0, 1.0)).map(lambda x: x[0].given(x[1]))))
def test_a_distortion_is_a_cdf(procedure: RankProcedure) -> None:
    """h rises from h(0) = 0 to h(1) = 1, h' is not negative, and both keep the shape of their argument."""
    served, density = procedure.distortion(P), procedure.density(P)
    assert served[0] == pytest.approx(0.0, abs=1e-15)
    assert served[-1] == pytest.approx(1.0, abs=1e-12)
    assert (np.diff(served) >= -1e-13).all()
    assert (density >= 0).all()
    assert np.isfinite(density).all()
    assert procedure.distortion(0.5).shape == procedure.density(0.5).shape == ()
    assert procedure.density(np.full((2, 3), 0.5)).shape == (2, 3)


@settings(max_examples=50)
@given(st.one_of(NAMEABLE, ORDER_STATISTICS), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_the_density_is_the_derivative_of_the_distortion(procedure: RankProcedure, a: float, b: float) -> None:
    """∫h' between any two points is the difference of h."""
    x, weight = leggauss(400)  # exact for polynomials of degree 799
    inside = (a + b) / 2 + (b - a) / 2 * x
    integral = (b - a) / 2 * float(weight @ procedure.density(inside))
    assert integral == pytest.approx(float(procedure.distortion(b) - procedure.distortion(a)), abs=1e-11)


@given(REWOUND, st.floats(0.0, 1.0))
def test_rewind_given_its_failures_is_the_papers_law(procedure: RewindAndRepeat, below: float) -> None:
    """What rewind serves, and its draws, equal the sums over the number of failures before the first success."""
    n, s = procedure.n, below
    rewound = procedure.given(s)
    tries = sum(s**k for k in range(n))
    assert procedure.expected_draws(s) == pytest.approx(tries, rel=1e-9)
    for p in (0.0, s / 3, s * 0.99, s, (1 + s) / 2, 1.0):
        failing = p**n if procedure.serve == "best" else s ** (n - 1) * p
        exact = failing if p < s else s**n + (p - s) * tries
        assert float(rewound.distortion(p)) == pytest.approx(exact, abs=1e-12)


@given(st.one_of(NAMEABLE, REWOUND))
def test_a_name_spells_its_procedure(procedure: Served) -> None:
    """parse_procedure(name) gives a procedure of that name that does the same."""
    read = parse_procedure(procedure.name)
    assert read.name == procedure.name
    if isinstance(procedure, RewindAndRepeat):
        assert read.given(0.7).distortion(P) == pytest.approx(procedure.given(0.7).distortion(P), abs=1e-13)  # type: ignore[union-attr]
        assert read.quantile == pytest.approx(procedure.quantile, rel=1e-14)  # type: ignore[union-attr]
    else:
        assert read.distortion(P) == pytest.approx(procedure.distortion(P), abs=1e-13)  # type: ignore[union-attr]


@pytest.mark.parametrize("n", [1, 2, 5, 32, 200])
def test_an_order_statistic_at_an_end_is_best_or_worst_of_n(n: int) -> None:
    """The 1st and the N-th best of N, and top-1-of-N, are Best- and Worst-of-N; top-N-of-N is a plain draw."""
    for one, other in [
        (kth_best(1, n), BestOfN(n)),
        (top_k(1, n), BestOfN(n)),
        (kth_best(n, n), WorstOfN(n)),
        (top_k(n, n), Standard()),
    ]:
        assert one.distortion(P) == pytest.approx(other.distortion(P), abs=1e-12)
        assert one.density(P) == pytest.approx(other.density(P), rel=1e-10, abs=1e-12)


@given(st.one_of(NAMEABLE, ORDER_STATISTICS, REWOUND))
@example(RewindAndRepeat(0.5002, 2))
@example(RewindAndRepeat(0.0605516250196303, 2))
@settings(max_examples=60)
def test_the_base_policy_wins_half_against_itself(procedure: Served) -> None:
    """W = 1/2 for the base policy against itself, whatever the procedure."""
    assert aligned_law(Identity(), beta=1e17).win_rate(procedure) == pytest.approx(0.5, abs=1e-11)


OWN = """
import numpy as np
from math import comb
from infalign.method.procedures import Draws

class BestOf4:
    def distortion(self, p):
        return p**4
    def density(self, p):
        return 4 * p**3
    def weights(self, rewards_PM):
        places = np.argsort(np.argsort(rewards_PM, axis=1), axis=1)
        samples = rewards_PM.shape[1]
        return np.vectorize(lambda i: comb(i, 3) / comb(samples, 4))(places)
    def serving(self, rng):
        return int(np.argmax((yield Draws(4))))

mine = BestOf4()

class Second:
    def weights(self, rewards_PM):
        return np.full(rewards_PM.shape, 1 / rewards_PM.shape[1])
    def serving(self, rng):
        (first,) = yield Draws(1)
        return 0 if first > 0 else 1

class Of4(BestOf4):
    def __init__(self, n):
        pass
"""
CHANGED = {
    "weights = None": "Own has no method weights",
    "serving = None": "Own has no method serving",
    "density = None": "Own has no method density",
    "distortion = lambda self, p: (p + 1) / 2": r"must rise from h\(0\) = 0 to h\(1\) = 1, found 0.5 to 1",
    "distortion = lambda self, p: p / 2": "found 0 to 0.5",
    "distortion = lambda self, p: p + np.sin(2 * np.pi * p)": "found 0 to 1, falling",
    "distortion = lambda self, p: np.where(p == 0.5, np.nan, p)": "one finite number for each",
    "distortion = lambda self, p: 1.0": r"one finite number for each of \(1001,\), found \(\)",
    "distortion = lambda self, p: p if p < 0.5 else p": "distortion raised ValueError in own_\\d+.py, line",
    "density = lambda self, p: p": "density must be the derivative of distortion",
    "density = lambda self, p: 1 - 2 * (p > 0.5)": "density must be the derivative of distortion",
}


@pytest.mark.parametrize("name", ["BestOf4", "mine"])
def test_an_own_procedure_is_the_one_that_it_says(tmp_path: Path, name: str) -> None:
    """A class, or an instance, that says what Best-of-4 does wins, chooses and serves as Best-of-4, alone or mixed."""
    file = tmp_path / "c++*" / "own_best.py"
    file.parent.mkdir()
    file.write_text(OWN)
    own, rewards = f"{file}:{name}", np.random.default_rng(0).integers(5, size=(6, 9)).astype(float)
    for spelling in ("best-of-4", "0.5*standard+0.5*best-of-4"):
        known, read = parse_procedure(spelling), parse_procedure(spelling.replace("best-of-4", own))
        assert read.name == spelling.replace("best-of-4", f"own_best.py:{name}")
        assert pickle.loads(pickle.dumps(read)) == read
        assert read.weights(rewards) == pytest.approx(known.weights(rewards), abs=1e-12)
        assert rank_optimum(read, kl=0.5).win_rate == pytest.approx(rank_optimum(known, kl=0.5).win_rate, abs=1e-12)
        sums = optimum(rewards, read, kl=0.1, objective="reward").probabilities_PK  # type: ignore[arg-type]
        assert sums == pytest.approx(optimum(rewards, known, kl=0.1, objective="reward").probabilities_PK, abs=1e-9)  # type: ignore[arg-type]
    serving = parse_procedure(own).serving(np.random.default_rng(0))
    assert next(serving) == Draws(4)
    with pytest.raises(StopIteration) as served:
        serving.send([0.1, 0.4, 0.3, 0.2])
    assert served.value.value == 1


@pytest.mark.parametrize(("change", "message"), CHANGED.items())
def test_an_own_procedure_is_checked_when_it_is_read(tmp_path: Path, change: str, message: str) -> None:
    """What lacks a method, or whose distortion is no distribution with that density, is refused with what is wrong."""
    file = tmp_path / f"own_{[*CHANGED].index(change)}.py"
    file.write_text(f"{OWN}\n\nclass Own(BestOf4):\n    {change}\n")
    with pytest.raises(ConfigError, match=message):
        parse_procedure(f"{file}:Own")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("yield 4", "serving raised TypeError: it yields Draws, found 4"),
        ("return -1", "serving raised ValueError: it returns -1 after 0 draws"),
        ("return 0.5", "serving raised ValueError: it returns 0.5 after 0 draws"),
        ("raise KeyError(rng)", "serving raised KeyError"),
    ],
)
def test_what_an_own_procedure_serves_is_a_draw(tmp_path: Path, change: str, message: str) -> None:
    """Another ask, a draw that there is not, and an error of its code are refused with its name."""
    file = tmp_path / f"serves_{abs(hash(change))}.py"
    file.write_text(
        f"{OWN}\n\nclass Own(BestOf4):\n    def serving(self, rng):\n        {change}\n        yield Draws(1)\n"
    )
    with pytest.raises(ConfigError, match=f"procedure {file.name}:Own: {message}"):
        next(parse_procedure(f"{file}:Own").serving(np.random.default_rng(0)))


def test_what_is_no_rank_procedure_has_no_law(tmp_path: Path) -> None:
    """An own procedure without a distortion wins by its weights; where a law is needed it is told so."""
    (tmp_path / "own_second.py").write_text(OWN)
    own = f"{tmp_path / 'own_second.py'}:Second"
    policy, reference = [[0.7, 0.9], [1.2, 0.1]], [[0.5, 0.3], [0.9, 0.2]]
    assert win_rates(policy, reference, own).mean == win_rates(policy, reference, "standard").mean
    for needs_law in (
        partial(rank_optimum, own, kl=1.0),
        partial(choose, own, kl=0.5),
        lambda: law_at_kl(Identity(), kl=1.0).win_rate(parse_procedure(own)),
        partial(optimum, policy, own, kl=0.1, objective="reward"),
        partial(parse_procedure, f"0.5*{own}+0.5*standard"),
        partial(read_procedure, own),
    ):
        with pytest.raises(ConfigError, match=r"own_second.py:Second.*(no rank procedure|only look at ranks)|by rank"):
            needs_law()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:Mine", "the file .*nowhere.py does not exist"),
        ("own_bad.py:Nothing", "own_bad.py has no Nothing"),
        ("own_bad.py:Of4", "missing 1 required positional argument: 'n'"),
        ("own_bad.py:comb", "comb has no method weights"),
        ("own_bad.py:", "unknown procedure"),
    ],
)
def test_an_own_procedure_that_is_not_there_is_refused(tmp_path: Path, spec: str, message: str) -> None:
    """A missing file or class, one that takes arguments and what is no procedure are ConfigErrors."""
    (tmp_path / "own_bad.py").write_text(OWN)
    with pytest.raises(ConfigError, match=message):
        parse_procedure(f"{tmp_path}/{spec}")


def test_pass_at_k_is_best_of_k() -> None:
    """pass@8 and pass^8 are best-of-8 and worst-of-8, printed as written; a recipe calls them by one name."""
    for spelling, same in {"pass@8": BestOfN(8), "pass^8": WorstOfN(8)}.items():
        assert (parse_procedure(spelling), parse_procedure(spelling).name) == (same, spelling)
        assert read_procedure(spelling).name == same.name


REWIND = RewindAndRepeat(0.85, 32)
SENSELESS: list[tuple[Any, str]] = [
    *(
        (partial(kind, n), f"a whole number of samples from 1 to 100,000, found N = {n}")
        for kind in (BestOfN, WorstOfN, partial(RewindAndRepeat, 0.5), partial(kth_best, 1))
        for n in (0, 2.5, math.nan, 100_001)
    ),
    *(
        (partial(RewindAndRepeat, q, 4), f"quantile of rewind must be between 0 and 1, found {q}")
        for q in (0.0, 1.0, 1.5, math.nan)
    ),
    (lambda: RewindAndRepeat(0.5, 4, "first"), "last or the best.*found serve = 'first'"),  # type: ignore[arg-type]
    *(
        (partial(make, k, 4), f"k must be between 1 and N = 4, found k = {k}")
        for make in (kth_best, top_k)
        for k in (0, 5)
    ),
    (lambda: top_k(1, 0), "found N = 0"),
    (lambda: Draws(0), "found N = 0"),
    *(
        (
            partial(make, odds),
            "the probabilities of .* must be non-negative and sum to 1, found " + re.escape(str(odds)),
        )
        for make in (partial(OrderStatistics, "odd"), lambda odds: Mixture(tuple((odd, Standard()) for odd in odds)))
        for odds in ((), (0.5, 0.6), (1.5, -0.5), (math.nan, 1.0))
    ),
    (lambda: Mixture(((0.5, REWIND), (0.5, Standard()))), "a mixture cannot contain rewind:0.85:32"),  # type: ignore[arg-type]
    (lambda: parse_procedure("0.5*rewind:0.85:32+0.5*standard"), "a mixture cannot contain rewind:0.85:32"),
]
NAMES = ["", "median", "best-of", "best-of--2", "best-of-2.5", "1*", "*standard", "x*standard", "rewind:0.5"]
NAMES += ["rewind:0.5:4:worst", "top-2", "0.5*best-of-2+0.5*best", "best-of-2 "]
UNWEIGHABLE: list[tuple[Any, type[Exception], str]] = [
    (lambda: BestOfN(2).weights([1.0, 2.0]), DataError, r"prompts × samples array, found shape \(2,\)"),
    (lambda: kth_best(2, 4).weights([[1.0, 2.0]]), DataError, "2nd-best-of-4 cannot be estimated from 2 samples"),
    (lambda: Mixture(((1.0, BestOfN(3)),)).weights([[1.0]]), DataError, "best-of-3 cannot be estimated from 1"),
    (lambda: top_k(1, 1).weights([[1.0, np.inf]]), DataError, "prompt 0, sample 1 is inf"),
    (lambda: RewindAndRepeat(0.5, 2).weights([[1.0, 2.0]]), ConfigError, "needs the base policy's 0.5 quantile"),
    (lambda: RewindAndRepeat(0.5, 2).weights([[1.0, 2.0]], [np.nan]), DataError, "threshold of prompt 0 is nan"),
    (lambda: RewindAndRepeat(0.5, 2).draws(np.zeros((3, 2)), [1.0]), DataError, "one threshold for each of 3"),
    (lambda: RewindAndRepeat(0.5, 2).weights(np.zeros((3, 2)), 1.0), DataError, "one threshold for each of 3"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [(call, ConfigError, message) for call, message in SENSELESS]
    + [(partial(parse_procedure, name), ConfigError, "unknown procedure") for name in NAMES]
    + UNWEIGHABLE,
)
def test_bad_arguments_and_samples_are_refused(call: Any, error: type[Exception], message: str) -> None:
    """A setting that makes no sense, with its value; too few samples, wrong shapes and numbers that are not finite."""
    with pytest.raises(error, match=message):
        call()
