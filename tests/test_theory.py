"""Analytic curves against the paper's closed forms and known answers."""

import mpmath
import numpy as np
import pytest

from infalign.errors import ConfigError
from infalign.procedures import BestOfN, Standard, WorstOfN
from infalign.theory import aligned_law, curve, law_at_kl, training_beta
from infalign.transforms import Exponential, Function, Identity, Log, normalised_beta, parse_transform

TRANSFORMS = ["identity", "log", "exp:5", "exp:10", "exp:-5", "exp:-10"]


@pytest.mark.parametrize("n", [2, 3, 4, 8, 32])
def test_log_with_beta_one_over_n_minus_one_is_best_of_n_itself(n: int) -> None:
    """Φ = log at β = 1/(n−1) has KL = log n − (n−1)/n and win rate n/(n+1) under Best-of-N for every N."""
    law = aligned_law(Log(), beta=1 / (n - 1))
    assert law.kl == pytest.approx(np.log(n) - (n - 1) / n, abs=1e-12)
    for served in (1, 2, 5, 32):
        assert law.win_rate(BestOfN(served)) == pytest.approx(n / (n + 1), abs=1e-12)


@pytest.mark.parametrize(("beta", "win_rate"), [(1.0, 0.581976706869), (0.3, 0.736993706590)])
def test_identity_has_its_closed_form(beta: float, win_rate: float) -> None:
    """Standard win rate of the identity is 1/(1 − e^{−1/β}) − β."""
    law = aligned_law(Identity(), beta=beta)
    assert law.win_rate(Standard()) == pytest.approx(win_rate, abs=1e-12)
    assert law.win_rate(Standard()) == pytest.approx(1 / (1 - np.exp(-1 / beta)) - beta, abs=1e-13)


@pytest.mark.parametrize(
    ("transform", "kl"),
    [
        ("identity", 0.040651852256),
        ("exp:5", 5.595752225436),
        ("exp:-5", 0.023397258584),
        ("exp:10", 11.302494283854),
        ("exp:-10", 0.014329036775),
    ],
)
def test_kl_at_beta_one(transform: str, kl: float) -> None:
    """KL at the paper's β = 1, for the paper's raw Φ, equals the known answers."""
    assert aligned_law(parse_transform(transform), beta=1.0).kl == pytest.approx(kl, abs=2e-11)


@pytest.mark.parametrize("t", [5.0, 10.0, -10.0])
@pytest.mark.parametrize("beta", [0.01, 0.5, 100.0])
def test_kl_agrees_with_forty_digits(t: float, beta: float) -> None:
    """KL of the exponential agrees with 40-digit quadrature also where e^{Φ/β} overflows a double."""
    with mpmath.workdps(40):
        sign = mpmath.sign(t)
        top = sign * mpmath.exp(max(t, 0) if t > 0 else t)

        def weight(u: mpmath.mpf) -> mpmath.mpf:
            return mpmath.exp((sign * mpmath.exp(t * u) - top) / beta)

        edges = [0, *[1 - mpmath.mpf(2) ** -k for k in range(1, 60)], 1]
        if t < 0:
            edges = [*sorted(1 - e for e in edges), mpmath.mpf(1)]
            edges = sorted(set(edges))
        z = mpmath.quad(weight, edges)
        mean = mpmath.quad(lambda u: weight(u) * (sign * mpmath.exp(t * u) - top), edges) / z
        exact = float(mean / beta - mpmath.log(z))
    assert aligned_law(Exponential(t), beta=beta).kl == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(
    ("transform", "procedure", "win_rate"),
    [
        ("identity", BestOfN(4), 0.8770),
        ("log", BestOfN(4), 0.8631),
        ("exp:5", BestOfN(4), 0.9192),
        ("exp:10", BestOfN(4), 0.9351),
        ("identity", WorstOfN(4), 0.9745),
        ("log", WorstOfN(4), 0.9859),
        ("exp:-10", WorstOfN(4), 0.9927),
    ],
)
def test_win_rate_at_one_nat(transform: str, procedure: BestOfN | WorstOfN, win_rate: float) -> None:
    """At KL = 1 the win rates equal the known answers to their four digits."""
    assert law_at_kl(parse_transform(transform), kl=1.0).win_rate(procedure) == pytest.approx(win_rate, abs=5e-5)


@pytest.mark.parametrize("n", [1, 2, 4, 16])
@pytest.mark.parametrize("transform", ["identity", "exp:5", "exp:-10"])
def test_reflection_swaps_best_and_worst(transform: str, n: int) -> None:
    """Reflecting the density keeps the KL and sends W of Best-of-N to 1 − W of Worst-of-N."""
    phi = parse_transform(transform)
    law = aligned_law(phi, beta=0.7 * phi.scale)
    mirror = aligned_law(Function("mirrored", lambda u: phi(1 - u)), beta=0.7)
    assert mirror.kl == pytest.approx(law.kl, rel=1e-9)
    assert mirror.win_rate(WorstOfN(n)) == pytest.approx(1 - law.win_rate(BestOfN(n)), abs=1e-9)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("procedure", [Standard(), BestOfN(4), WorstOfN(4)])
def test_a_large_beta_gives_the_base_policy(transform: str, procedure: Standard | BestOfN | WorstOfN) -> None:
    """β → ∞ gives win rate 1/2 and KL 0 for any procedure."""
    law = aligned_law(parse_transform(transform), beta=1e9)
    assert law.win_rate(procedure) == pytest.approx(0.5, abs=1e-4)
    assert law.kl == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kl", [1e-6, 0.1, 1.0, 5.0, 15.0])
def test_a_budget_is_spent_exactly(transform: str, kl: float) -> None:
    """The law found for a KL budget has that KL, and its β gives the same law again."""
    law = law_at_kl(parse_transform(transform), kl=kl)
    assert law.kl == pytest.approx(kl, rel=1e-8)
    assert aligned_law(parse_transform(transform), beta=law.beta).kl == law.kl


def test_curve_is_the_law_at_every_budget() -> None:
    """A curve holds the win rates of the laws at its budgets, the procedure's and the standard one."""
    served, standard = curve(Exponential(10), BestOfN(4), np.array([0.5, 1.0]))
    assert served[1] == law_at_kl(Exponential(10), kl=1.0).win_rate(BestOfN(4))
    assert standard[0] == law_at_kl(Exponential(10), kl=0.5).win_rate(Standard())


def test_beta_converts_between_raw_and_normalised() -> None:
    """e^{10u} at KL = 1 has the paper's β near 5·10³, which is 0.241 for the normalised Φ."""
    beta = law_at_kl(Exponential(10), kl=1.0).beta
    assert beta == pytest.approx(5315.25, abs=0.01)
    assert normalised_beta(Exponential(10), beta) == pytest.approx(0.2413, abs=1e-4)
    assert training_beta(Exponential(10), kl=1.0) == normalised_beta(Exponential(10), beta)


@pytest.mark.parametrize("beta", [0.0, -1.0, np.inf, np.nan])
def test_a_senseless_beta_is_refused(beta: float) -> None:
    """β must be positive and finite."""
    with pytest.raises(ConfigError, match="beta must be positive"):
        aligned_law(Identity(), beta=beta)


def test_an_unreachable_budget_is_refused() -> None:
    """A Φ that is flat on its best tenth spends at most log 10 nats, and the error says so."""
    step = Function("step", lambda u: np.where(u > 0.9, 1.0, 0.0))
    assert law_at_kl(step, kl=2.3).kl == pytest.approx(2.3, rel=1e-9)
    with pytest.raises(ConfigError, match=r"cannot reach a KL of 2.31 nats; the largest in reach is 2\.303"):
        law_at_kl(step, kl=2.31)


@pytest.mark.parametrize("name", ["exp:", "exp:x", "exp:0", "exp:inf", "square", ""])
def test_an_unknown_transformation_is_refused(name: str) -> None:
    """A spelling that is none of ours is an error that lists ours, or says what is wrong with t."""
    with pytest.raises(ConfigError, match=r"known: identity, log, exp:T|finite t"):
        parse_transform(name)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformations_round_trip_through_their_names(name: str) -> None:
    """A transformation's name spells it."""
    assert parse_transform(name).name == name
