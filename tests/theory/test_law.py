"""Analytic curves against the paper's closed forms and known answers."""

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
from numpy.polynomial.legendre import leggauss

from infalign.core.errors import ConfigError
from infalign.method.procedures import BestOfN, RewindAndRepeat, Standard, WorstOfN
from infalign.method.procedures.base import MAX_N
from infalign.method.transforms import Exponential, Function, Identity, Log, Power, parse_transform
from infalign.theory.law import aligned_law, law_at_kl, training_beta

TRANSFORMS = ["identity", "log", "exp:5", "exp:10", "exp:-5", "exp:-10"]


@pytest.mark.parametrize("n", [2, 3, 4, 8, 32])
def test_log_with_beta_one_over_n_minus_one_is_best_of_n_itself(n: int) -> None:
    """Φ = log at β = 1/(n−1) has KL = log n − (n−1)/n and win rate n/(n+1) under Best-of-N for every N."""
    law = aligned_law(Log(), beta=1 / (n - 1))
    assert law.kl == pytest.approx(np.log(n) - (n - 1) / n, abs=1e-12)
    for served in (1, 2, 5, 32):
        assert law.win_rate(BestOfN(served)) == pytest.approx(n / (n + 1), abs=1e-12)


def test_beta_converts_between_raw_and_normalised() -> None:
    """e^{10u} at KL = 1 has the paper's β near 5·10³, which is 0.241 for the normalised Φ."""
    beta = law_at_kl(Exponential(10), kl=1.0).beta
    assert beta == pytest.approx(5315.25, abs=0.01)
    assert training_beta(Exponential(10), kl=1.0) == pytest.approx(0.2413, abs=1e-4)


def test_an_unreachable_budget_is_refused() -> None:
    """A Φ that is flat on its best tenth spends at most log 10 nats, and the error says so."""
    step = Function("step", lambda u: np.where(u > 0.9, 1.0, 0.0))
    assert law_at_kl(step, kl=2.3).kl == pytest.approx(2.3, rel=1e-9)
    with pytest.raises(ConfigError, match=r"cannot reach a KL of 2.31 nats; the maximum is 2\.303"):
        law_at_kl(step, kl=2.31)


@pytest.mark.parametrize("beta", [1e-6, 1e-3, 0.3, 1.0, 50.0])
def test_the_identity_has_its_closed_form(beta: float) -> None:
    """W = 1/(1 − e^{−1/β}) − β and KL = W/β − log(β(e^{1/β} − 1)) = W/β − 1/β − log(β(1 − e^{−1/β}))."""
    law = aligned_law(Identity(), beta=beta)
    assert law.win_rate(Standard()) == pytest.approx(-1 / np.expm1(-1 / beta) - beta, abs=1e-12)
    exact = (law.win_rate(Standard()) - 1) / beta - np.log(-beta * np.expm1(-1 / beta))
    assert law.kl == pytest.approx(exact, abs=1e-15 / beta + 1e-13)
    u = np.array([0.0, 1e-3, 0.5, 1 - 1e-3, 1.0])
    cdf = np.exp((u - 1) / beta) * -np.expm1(-u / beta) / -np.expm1(-1 / beta)
    assert law.cdf_at(u) == pytest.approx(cdf, abs=1e-12)


@pytest.mark.parametrize("kl", [0.01, 0.5, 2.0])
def test_the_largest_n_is_resolved(kl: float) -> None:
    """As N grows, the extremes of N draws lie at an end, where the policy has f times the draws: W = f/(1 + f)."""
    law = law_at_kl(Identity(), kl=kl)
    low, high = 1.0 / law.beta / np.expm1(1.0 / law.beta), 1.0 / law.beta / -np.expm1(-1.0 / law.beta)
    assert law.win_rate(BestOfN(MAX_N)) == pytest.approx(high / (1.0 + high), abs=1e-4)
    assert law.win_rate(WorstOfN(MAX_N)) == pytest.approx(1.0 / (1.0 + low), abs=1e-4)


@pytest.mark.parametrize("name", [*TRANSFORMS, "power:7", "power:-7", "power:0.1", "exp:500", "power:1000"])
@pytest.mark.parametrize("kl", [1e-9, 1.0, 30.0])
def test_a_budget_is_spent(name: str, kl: float) -> None:
    """From 1e-9 to 30 nats a budget is spent to 1e-10, by the law of the β found, and wins what it must."""
    law = law_at_kl(parse_transform(name), kl=kl)
    assert law.kl == pytest.approx(kl, abs=1e-15, rel=1e-10)
    assert aligned_law(parse_transform(name), beta=law.beta).kl == law.kl
    assert law.error < 1e-11
    for n in (1, 4, 1024):
        for procedure in (BestOfN(n), WorstOfN(n)):
            assert law.win_rate(procedure) > (0.5 if kl <= 1 else 1 - 1e-9)


@pytest.mark.parametrize(
    ("procedure", "kl"),
    [(RewindAndRepeat(0.999, 32), 10.0), (RewindAndRepeat(0.85, 32, "best"), 0.5), (BestOfN(4), 0.5)],
)
def test_a_jump_is_resolved_among_rounded_values(procedure: RewindAndRepeat | BestOfN, kl: float) -> None:
    """Where a density is known to ten digits only, the jump of a procedure still costs no more than these digits."""
    flat = Exponential(1e-6)  # the identity but for rounding
    exact = law_at_kl(Identity(), kl=kl).win_rate(procedure)
    assert law_at_kl(flat, kl=kl).win_rate(procedure) == pytest.approx(exact, abs=1e-6)


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_senseless_beta_or_budget_is_refused(value: float) -> None:
    """β and a KL budget are positive and finite."""
    with pytest.raises(ConfigError, match="beta must be positive"):
        aligned_law(Identity(), beta=value)
    with pytest.raises(ConfigError, match=f"the KL budget must be positive and finite, found {value}"):
        law_at_kl(Identity(), kl=value)


SERVINGS = (1, 2, 4, 8, 32, 128, 1024)


def exact_law(transform: Any, beta: float) -> tuple[np.ndarray, ...]:
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


def exact_density(transform: Any, beta: float) -> tuple[Callable, Callable]:
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


ORACLE = ["identity", "log", "exp:5", "exp:10", "exp:-5", "exp:-10", "power:7", "power:-7", "power:63", "power:0.5"]
OVERFLOWS = [("exp:10", 4.5e-7), ("exp:-10", 0.01), ("exp:5", 1e-6)]  # e^{Φ/β} beyond a double
SHARES = [(name, 1e-3) for name in ORACLE] + OVERFLOWS
SLOW_SHARES = [
    pytest.param(name, share, marks=pytest.mark.slow)
    for name in ORACLE
    for share in (1e-4, 0.01, 0.1, 0.3, 1.0, 10.0, 100.0)
]


@pytest.mark.parametrize(("name", "share"), SHARES + SLOW_SHARES)
def test_laws_agree_with_closed_forms_in_forty_digits(name: str, share: float) -> None:
    """At β = share × scale, and at its KL, KL and win rates agree with F in closed form for N up to 1024."""
    transform = parse_transform(name)
    u, v, weights, cdf, above, density, log_density = exact_law(transform, share * transform.scale)
    assert np.sum(weights * density) == pytest.approx(1.0, abs=1e-11)  # the oracle's own rule resolves f
    kl = float(np.sum(weights * (density * log_density - density + 1)))
    laws = aligned_law(transform, beta=share * transform.scale), law_at_kl(transform, kl=kl)
    assert [law.kl for law in laws] == pytest.approx([kl, kl], abs=1e-10)
    assert laws[0].error < 1e-11
    for n in SERVINGS:
        best = 1 - n * np.sum(weights * cdf**n * u ** (n - 1))
        worst = n * np.sum(weights * above**n * v ** (n - 1))
        for law in laws:
            assert law.win_rate(BestOfN(n)) == pytest.approx(best, abs=1e-9), (n, law.beta)
            assert law.win_rate(WorstOfN(n)) == pytest.approx(worst, abs=1e-9), (n, law.beta)
