"""Analytic curves against the paper's closed forms and known answers."""

from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from numpy.polynomial.legendre import leggauss

from infalign.core.errors import ConfigError
from infalign.method.procedures import BestOfN, RewindAndRepeat, Standard, WorstOfN
from infalign.method.transforms import (
    Exponential,
    Function,
    Identity,
    Log,
    Power,
    Transformation,
    normalised_beta,
    parse_transform,
)
from infalign.theory.law import aligned_law, curve, law_at_kl, training_beta

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


@pytest.mark.parametrize(("n", "win_rate"), [(1, 2 / 3), (2, 11 / 15), (4, 0.802020), (8, None), (32, None)])
def test_worst_of_n_under_the_log_has_its_closed_form(n: int, win_rate: float | None) -> None:
    """For F = u^a Worst-of-N wins N·Σ_k (−1)^k·C(N, k)·B(ak + 1, N); at β = 1 this is 11/15 for N = 2."""
    for beta in (0.5, 1.0, 3.0):
        with mpmath.workdps(60):
            a = 1 + 1 / mpmath.mpf(beta)
            terms = ((-1) ** k * mpmath.binomial(n, k) * mpmath.beta(a * k + 1, n) for k in range(n + 1))
            exact = float(n * mpmath.fsum(terms))
        found = aligned_law(Log(), beta=beta).win_rate(WorstOfN(n))
        assert found == pytest.approx(exact, abs=1e-12)
        assert beta != 1.0 or win_rate is None or found == pytest.approx(win_rate, abs=5e-7)


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.3, 1.0, 50.0])
def test_the_kl_of_the_identity_has_its_closed_form(beta: float) -> None:
    """KL = W/β − log(β(e^{1/β} − 1)) = W/β − 1/β − log(β(1 − e^{−1/β}))."""
    law = aligned_law(Identity(), beta=beta)
    exact = (law.win_rate(Standard()) - 1) / beta - np.log(-beta * np.expm1(-1 / beta))
    assert law.kl == pytest.approx(exact, abs=1e-15 / beta + 1e-13)
    u = np.array([0.0, 1e-3, 0.5, 1 - 1e-3, 1.0])
    cdf = np.exp((u - 1) / beta) * -np.expm1(-u / beta) / -np.expm1(-1 / beta)
    assert law.cdf_at(u) == pytest.approx(cdf, abs=1e-12)


@pytest.mark.parametrize("name", [*TRANSFORMS, "power:7", "power:-7", "power:0.1", "exp:500", "power:1000"])
@pytest.mark.parametrize("kl", [1e-9, 30.0])
def test_extreme_budgets_are_spent(name: str, kl: float) -> None:
    """From 1e-9 to 30 nats a budget is spent to 1e-9, and the win rate lies where it must."""
    law = law_at_kl(parse_transform(name), kl=kl)
    assert law.kl == pytest.approx(kl, abs=1e-15, rel=1e-10)
    assert law.error < 1e-11
    for n in (1, 4, 1024):
        for procedure in (BestOfN(n), WorstOfN(n)):
            assert law.win_rate(procedure) > (0.5 if kl < 1 else 1 - 1e-9)


@pytest.mark.parametrize("procedure", [RewindAndRepeat(0.999, 32), RewindAndRepeat(0.85, 32, "best"), BestOfN(4)])
@pytest.mark.parametrize("kl", [0.5, 10.0])
def test_a_jump_is_resolved_among_rounded_values(procedure: RewindAndRepeat | BestOfN, kl: float) -> None:
    """Where a density is known to ten digits only, the jump of a procedure still costs no more than these digits."""
    flat = Exponential(1e-6)  # the identity but for rounding
    exact = law_at_kl(Identity(), kl=kl).win_rate(procedure)
    assert law_at_kl(flat, kl=kl).win_rate(procedure) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("kl", [0.0, -1.0, np.nan, np.inf])
def test_a_senseless_budget_is_refused(kl: float) -> None:
    """A KL budget is positive and finite."""
    with pytest.raises(ConfigError, match=f"the KL budget must be positive and finite, found {kl}"):
        law_at_kl(Identity(), kl=kl)


# An independent oracle: closed forms of F in 40 digits

SERVINGS = (1, 2, 4, 8, 32, 128, 1024)


def exact_law(transform: Transformation, beta: float) -> tuple[np.ndarray, ...]:
    """Return u, v, weights, F, 1 − F, f and log f on a fixed graded rule, all from closed forms in 40 digits."""
    x, weight = leggauss(16)
    own = np.unique(np.concatenate([[0.0], 0.5 ** np.arange(1, 48), np.arange(1, 9) / 16, 0.5 - np.arange(1, 8) / 64]))
    near = own[:-1, None] + np.diff(own)[:, None] * (1 + x) / 2  # distances from an end
    weights = np.tile((np.diff(own)[:, None] * weight / 2).ravel(), 2)
    log_density, cdf = exact_density(transform, beta)
    rows = []
    with mpmath.workdps(40):
        for distance in near.ravel():
            for top in (False, True):
                v = mpmath.mpf(distance) if top else 1 - mpmath.mpf(distance)
                log_f, below = log_density(1 - v), cdf(1 - v)
                numbers = (1 - v, v, below, 1 - below, mpmath.exp(log_f), log_f)
                rows.append([top, *(float(number) for number in numbers)])
    table = np.array(sorted(rows, key=lambda row: row[0])).T
    return table[1], table[2], weights, *table[3:]


def exact_density(transform: Transformation, beta: float) -> tuple[Callable, Callable]:
    """Return log f and F as functions of an mpmath number, for the paper's ``beta``."""
    with mpmath.workdps(40):
        b = mpmath.mpf(beta)
        match transform:
            case Identity():
                raw, area = (lambda u: u), (lambda u: b * mpmath.expm1(u / b))
            case Log():
                raw, area = mpmath.log, (lambda u: u ** (1 + 1 / b) / (1 + 1 / b))
            case Exponential(t) if t > 0:
                raw, start = (lambda u: mpmath.exp(t * u)), mpmath.ei(1 / b)
                area = lambda u: (mpmath.ei(mpmath.exp(t * u) / b) - start) / t  # noqa: E731
            case Exponential(t):
                raw, start = (lambda u: -mpmath.exp(t * u)), mpmath.e1(1 / b)
                area = lambda u: (mpmath.e1(mpmath.exp(t * u) / b) - start) / -t  # noqa: E731
            case Power(m) if m > 0:
                m = mpmath.mpf(m)
                raw, area = (lambda u: u**m), (lambda u: u * mpmath.hyp1f1(1 / m, 1 + 1 / m, u**m / b))
            case Power(m):
                k = -mpmath.mpf(m)
                raw, beyond = (lambda u: -((1 - u) ** k)), (lambda v: v * mpmath.hyp1f1(1 / k, 1 + 1 / k, -(v**k) / b))
                area = lambda u: beyond(mpmath.mpf(1)) - beyond(1 - u)  # noqa: E731
        whole = area(mpmath.mpf(1))
        return (lambda u: raw(u) / b - mpmath.log(whole)), (lambda u: area(u) / whole)


def check_against_closed_forms(transform: Transformation, share: float) -> None:
    """Compare the law at β = ``share`` × scale, and that at its KL, with the oracle."""
    beta = share * transform.scale
    u, v, weights, cdf, above, density, log_density = exact_law(transform, beta)
    assert np.sum(weights * density) == pytest.approx(1.0, abs=1e-11)  # the oracle's own rule resolves f
    kl = float(np.sum(weights * (density * log_density - density + 1)))
    law = aligned_law(transform, beta=beta)
    assert law.error < 1e-11
    assert law.kl == pytest.approx(kl, abs=1e-10)
    at_kl = law_at_kl(transform, kl=kl)
    assert at_kl.kl == pytest.approx(kl, abs=1e-10)
    for n in SERVINGS:
        best = 1 - n * np.sum(weights * cdf**n * u ** (n - 1))
        worst = n * np.sum(weights * above**n * v ** (n - 1))
        for found in (law, at_kl):
            assert found.win_rate(BestOfN(n)) == pytest.approx(best, abs=1e-9), (n, found.beta)
            assert found.win_rate(WorstOfN(n)) == pytest.approx(worst, abs=1e-9), (n, found.beta)


ORACLE = ["identity", "log", "exp:5", "exp:10", "exp:-5", "exp:-10", "power:7", "power:-7", "power:63", "power:0.5"]


@pytest.mark.parametrize("name", ORACLE)
@pytest.mark.parametrize("share", [1e-3, 0.1])
def test_laws_agree_with_closed_forms_in_forty_digits(name: str, share: float) -> None:
    """KL and win rates, given β or given the KL, agree to 1e-9 with F in closed form for N up to 1024."""
    check_against_closed_forms(parse_transform(name), share)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLE)
@pytest.mark.parametrize("share", [1e-4, 1e-2, 0.03, 0.3, 1.0, 10.0, 100.0])
def test_laws_agree_with_closed_forms_over_six_decades(name: str, share: float) -> None:
    """The same for β over six decades."""
    check_against_closed_forms(parse_transform(name), share)
