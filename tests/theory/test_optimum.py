"""The optimal transformation: known answers, exact identities, and optimisers that try to beat it."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from infalign.core.errors import ConfigError
from infalign.method.procedures import BestOfN, RewindAndRepeat, Served, Standard, WorstOfN, distortion, parse_procedure
from infalign.method.procedures.order_statistics import kth_best, top_k
from infalign.method.transforms import Identity, Power, parse_transform
from infalign.theory.contest import Contest
from infalign.theory.law import aligned_law, law_at_kl
from infalign.theory.optimum import rank_optimum, stationarity

KNOWN = [  # W and KL at β = 1, 0.1 and 0.01, from Taylor series in 40 digits of the equation in docs/derivations.md
    ("best-of-2", 0.624265311655, 0.058807569884, 0.907247538204, 1.096989777262, 0.989966810632, 3.286633594487),
    ("best-of-4", 0.689660854967, 0.082701519582, 0.931169977481, 0.890858972335, 0.991366196721, 2.53179054307),
    ("best-of-8", 0.767035506511, 0.101476252075, 0.954217749111, 0.685597854409, 0.993868338982, 1.774389298148),
    ("best-of-32", 0.896995979027, 0.095148713954, 0.983091622978, 0.343761099033, 0.997710687585, 0.74312759181),
    ("best-of-128", 0.962771153945, 0.056880285483, 0.994527702644, 0.145372656888, 0.999282614118, 0.274021697283),
    ("worst-of-2", 0.647426399404, 0.073573764542, 0.950000000772, 1.013609008091, 0.995, 2.164901546492),
    ("worst-of-4", 0.763360042589, 0.124247608404, 0.975, 0.683601057592, 0.9975, 1.259247330841),
    ("worst-of-8", 0.875131185729, 0.141594564955, 0.9875, 0.429271588794, 0.99875, 0.717094725418),
    ("worst-of-32", 0.96875, 0.078833784169, 0.996875, 0.150789568325, 0.9996875, 0.222745352481),
    ("worst-of-128", 0.9921875, 0.030548073515, 0.99921875, 0.048537019555, 0.999921875, 0.066525965594),
]


@pytest.mark.parametrize(
    ("name", "beta", "win_rate", "kl"),
    [
        pytest.param(
            name, beta, *row[2 * i : 2 * i + 2], marks=[] if name.endswith(("-4", "-128")) else pytest.mark.slow
        )
        for name, *row in KNOWN
        for i, beta in enumerate((1.0, 0.1, 0.01))
    ]
    + [("best-of-8", 0.03, 0.983612948569, 1.203401479189)],
)
def test_known_optima(name: str, beta: float, win_rate: float, kl: float) -> None:
    """Best- and Worst-of-N have the win rate and KL of the series to 1e-11, and as a law of the table."""
    optimum = rank_optimum(parse_procedure(name), beta=beta)
    assert (optimum.win_rate, optimum.kl) == pytest.approx((win_rate, kl), abs=1e-11)
    assert optimum.law.win_rate(optimum.procedure) == pytest.approx(optimum.win_rate, abs=1e-9)
    assert optimum.law.kl == pytest.approx(optimum.kl, abs=1e-9)


@pytest.mark.parametrize(
    ("beta", "win_rate", "kl", "draws"), [(1.0, 0.866386, 0.136622, 9.02), (0.1, 0.977552, 0.451308, 7.19)]
)
def test_known_optima_of_rewind(beta: float, win_rate: float, kl: float, draws: float) -> None:
    """The paper's Rewind-and-Repeat has the known win rate, KL and draws."""
    procedure = RewindAndRepeat(0.85, 32)
    optimum = rank_optimum(procedure, beta=beta)
    assert optimum.win_rate == pytest.approx(win_rate, abs=1e-6)
    assert optimum.kl == pytest.approx(kl, abs=1e-6)
    assert optimum.law.draws(procedure) == pytest.approx(draws, abs=5e-3)
    assert procedure.expected_draws(0.85) == pytest.approx(6.63, abs=5e-3)


@pytest.mark.parametrize("procedure", [BestOfN(2), BestOfN(4), BestOfN(8), BestOfN(32), BestOfN(128), WorstOfN(4)])
def test_at_small_kl_the_power_is_optimal(procedure: BestOfN | WorstOfN) -> None:
    """W − 1/2 ≈ √(2·V_N·KL) with V_N in closed form, and u^{2N−1} or its mirror reaches it."""
    n, kl = procedure.n, 1e-8
    slope = n**4 / (2 * n - 1) ** 2 * (1 / (4 * n - 1) - 1 / (4 * n**2))
    best = rank_optimum(procedure, kl=kl).win_rate - 0.5
    assert best == pytest.approx(np.sqrt(2 * slope * kl), rel=2e-3)
    power = Power((2 * n - 1) * (1 if isinstance(procedure, BestOfN) else -1))
    assert law_at_kl(power, kl=kl).win_rate(procedure) - 0.5 == pytest.approx(best, rel=2e-3)


@pytest.mark.parametrize("n", [2, pytest.param(8, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize("beta", [1e3, pytest.param(1.0, marks=pytest.mark.slow), 1e-2, 1e-3])
def test_identities_of_best_and_worst_of_n(n: int, beta: float) -> None:
    """W and KL of an optimum's law satisfy the exact identities with the density at its end, over six decades of β."""
    for procedure, end in ((BestOfN(n), -1), (WorstOfN(n), 0)):
        optimum = rank_optimum(procedure, beta=beta)
        assert optimum.self_check < 1e-9
        assert optimum.residual < 1e-7
        law = optimum.law
        drop = optimum.transform.drop
        wins, kl = law.win_rate(procedure), law.kl
        v = float(law.v[end])
        log_f = float(law.log_density[end] + optimum.transform.scale / beta * (drop(0.0 if end else 1.0) - drop(v)))
        gain = beta / n * math.expm1(log_f)
        assert (wins if end else wins - 1) == pytest.approx(gain, abs=2e-8 * max(1.0, beta / n * math.exp(log_f)))
        spread = n / beta * (wins - 1 if end else wins)
        assert kl == pytest.approx(log_f + spread, abs=2e-8 * max(1.0, n / beta))


@pytest.mark.parametrize("n", [pytest.param(1024, marks=pytest.mark.slow), 10_000])
@pytest.mark.parametrize("beta", [100.0, 1.0, 1e-3])
def test_large_n_works(n: int, beta: float) -> None:
    """For N in the thousands the win rate is right to 1e-6, and the self-check says how right."""
    for procedure in (BestOfN(n), WorstOfN(n)):
        optimum = rank_optimum(procedure, beta=beta)
        assert optimum.law.win_rate(procedure) == pytest.approx(optimum.win_rate, abs=2 * optimum.self_check + 1e-12)
        assert optimum.self_check < 1e-6
    assert optimum.win_rate == pytest.approx(1 - beta / n, abs=1e-9) or beta > 1


@pytest.mark.parametrize("beta", [1e3, 1.0, 1e-2])
@pytest.mark.parametrize("procedure", [Standard(), BestOfN(1), kth_best(1, 1), RewindAndRepeat(0.3, 1)])
def test_one_draw_is_optimal_under_the_identity(procedure: Served, beta: float) -> None:
    """Whatever serves one plain draw has Φ(u) = u as its optimum."""
    optimum, law = rank_optimum(procedure, beta=beta), aligned_law(Identity(), beta=beta)
    assert optimum.kl == pytest.approx(law.kl, abs=1e-9)
    assert optimum.win_rate == pytest.approx(law.win_rate(Standard()), abs=1e-9)
    u = np.linspace(0.01, 1.0, 100)
    table = optimum.transform
    assert table.scale * (table(u) - table(1.0)) == pytest.approx(u - 1, abs=1e-8)


@pytest.mark.parametrize(("beta", "value"), [(0.5, 7.8e-5), (0.3, 7.8e-5), (0.2, 0.1213)])
def test_the_best_of_several_stationary_points_is_returned(beta: float, value: float) -> None:
    """Worst-of-8 against a base served by Best-of-8 has one or three stationary points; the best one jumps."""
    optimum = rank_optimum(WorstOfN(8), base=BestOfN(8), beta=beta)
    assert optimum.win_rate - beta * optimum.kl == pytest.approx(value, abs=5e-5)


BUDGETS = [(procedure, kl) for procedure in (WorstOfN(4), RewindAndRepeat(0.85, 32)) for kl in (1e-9, 0.5)]
BUDGETS += [(BestOfN(n), kl) for n in (2, 128) for kl in (1e-15, 0.5, 5.0)]
SLOW = [kth_best(2, 8), top_k(2, 8), RewindAndRepeat(0.85, 4, "best"), Standard()]
SLOW += [parse_procedure("0.5*best-of-4+0.5*worst-of-2")]
SLOW_BUDGETS = [pytest.param(one, kl, marks=pytest.mark.slow) for one in SLOW for kl in (1e-3, 1.0)]


@pytest.mark.parametrize(("procedure", "kl"), [*BUDGETS, *SLOW_BUDGETS])
def test_a_budget_is_spent(procedure: Served, kl: float) -> None:
    """The optimum at a KL budget has that KL, is the optimum at its β, and wins at least what half the budget wins."""
    optimum = rank_optimum(procedure, kl=kl)
    assert optimum.kl == pytest.approx(kl, rel=1e-7, abs=1e-9 if kl > 1e-9 else 0.0)
    assert optimum.law.kl == pytest.approx(kl, abs=1e-9 + optimum.self_check)
    if kl <= 1:  # beyond, β is below what is solved for directly
        again = rank_optimum(procedure, beta=optimum.beta)
        assert (again.win_rate, again.kl) == pytest.approx((optimum.win_rate, kl), abs=1e-8)
    assert max(0.5, rank_optimum(procedure, kl=kl / 2).win_rate) <= optimum.win_rate <= 1.0


@pytest.mark.parametrize(
    ("procedure", "base"),
    [
        (BestOfN(4), None),
        (WorstOfN(4), None),
        (kth_best(2, 8), None),
        (WorstOfN(4), BestOfN(2)),
        (RewindAndRepeat(0.85, 8), None),
        (RewindAndRepeat(0.85, 8, "best"), None),
    ],
)
def test_the_residual_of_a_disturbed_table_is_the_disturbance(procedure: Served, base: Served | None) -> None:
    """Adding δ·sin to Φ makes the residual δ/β to within a factor of ten, and the win rate fall."""
    optimum, contest = rank_optimum(procedure, base=base, beta=0.2), Contest(procedure, base or procedure)
    table = optimum.transform
    before = optimum.residual
    assert before < 1e-6
    for size in (1e-5, 1e-3, 0.1):
        waves = replace(
            table, phi=table.phi + size * np.sin(9 * table.v), slope=table.slope + 9 * size * np.cos(9 * table.v)
        )
        law = aligned_law(waves, beta=0.2)
        residual, win_rate = stationarity(contest, law)
        assert 0.1 * size / 0.2 < residual < 10 * size / 0.2 + before
        assert win_rate == pytest.approx(law.win_rate(procedure, base), abs=1e-9)
        assert win_rate - 0.2 * law.kl < optimum.win_rate - 0.2 * optimum.kl


def test_a_mass_in_the_last_thousandth_is_resolved() -> None:
    """Rewind-and-Repeat with a quantile of 0.999 and 1024 draws is certified although log f climbs by 1e6 above it."""
    for beta in (1.0, 0.1, 1e-3):
        optimum = rank_optimum(RewindAndRepeat(0.999, 1024), beta=beta)
        assert optimum.self_check < 1e-9
        assert optimum.residual < 1e-6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of kl and beta"),
        ({"beta": 1.0, "kl": 1.0}, "exactly one of kl and beta"),
        *(({"beta": beta}, f"beta must be positive and finite, found {beta}") for beta in (0.0, -1.0, np.nan, np.inf)),
        *(({"kl": kl}, f"the KL budget must be positive and finite, found {kl}") for kl in (0, -0.5, np.nan, np.inf)),
        ({"beta": 1e20}, r"beta = 1e\+20 leaves the base policy unchanged; lower it"),
        ({"kl": 1e-60}, "a KL of 1e-60 leaves the base policy unchanged; give at least 1e-20"),
    ],
)
def test_senseless_settings_are_refused(settings: dict[str, float], message: str) -> None:
    """A setting that is missing, doubled or senseless is a ConfigError with its value."""
    with pytest.raises(ConfigError, match=message):
        rank_optimum(BestOfN(2), **settings)


@pytest.mark.parametrize(
    ("procedure", "kl"),
    [(BestOfN(2), 1e300), (BestOfN(2), 1e4), (WorstOfN(1024), 30.0), (RewindAndRepeat(0.999, 1024), 5.0)],
)
def test_a_budget_out_of_reach_is_refused(procedure: Served, kl: float) -> None:
    """Worst-of-N is so easily won that 1 − W is rounding at a large budget."""
    message = re.escape(
        f"the optimum for {procedure.name} at {kl:g} nats is beyond what can be computed; give a smaller"
    )
    with pytest.raises(ConfigError, match=message):
        rank_optimum(procedure, kl=kl)


@pytest.mark.parametrize(
    ("name", "quantile", "kl"), [("best-of-4", 0.85, 0.5), ("best-of-4", 0.3, 1.0), ("worst-of-4", 0.85, 0.5)]
)
def test_a_base_that_rewinds_is_solved_across_its_jump(name: str, quantile: float, kl: float) -> None:
    """Φ is stationary on both sides of the quantile, KL and W are its table's, and no other law wins more at the KL."""
    procedure, base = parse_procedure(name), RewindAndRepeat(quantile, 8)
    found = rank_optimum(procedure, kl=kl, base=base)
    assert found.kl == pytest.approx(kl, abs=1e-9)
    assert found.residual < 1e-6
    assert found.self_check < 1e-7
    for other in ("identity", "log", "exp:3", "exp:10", "exp:-5", "power:7"):
        assert law_at_kl(parse_transform(other), kl=kl).win_rate(procedure, base) < found.win_rate
    beside = np.array([-2e-6, -1e-6]), np.array([1e-6, 2e-6])
    jump = float(distortion(base).density(quantile) / distortion(base).density(quantile - 1e-9))
    below, above = (float(-np.diff(found.transform.drop(1.0 - (quantile + side)))[0]) for side in beside)
    assert below / above == pytest.approx(1.0 / jump, rel=0.01)
