"""Procedures given by a density of ranks, against closed forms."""

from collections.abc import Callable

import numpy as np
import pytest

from infalign.core.errors import ConfigError
from infalign.method.procedures import BestOfN, RankDensity
from infalign.method.transforms import Log
from infalign.theory.law import aligned_law

P = np.concatenate(
    [[0.0], np.geomspace(1e-300, 0.1, 30), np.linspace(0.1, 0.9, 81)[1:], 1 - np.geomspace(0.09, 1e-16, 30), [1.0]]
)


def test_a_density_cannot_be_served() -> None:
    """It says what is served, and no number of draws does that exactly."""
    with pytest.raises(ConfigError, match="serve a nearby mixture"):
        RankDensity("tilt", lambda u: u).serving(np.random.default_rng(0))


@pytest.mark.parametrize(("n", "scale"), [(1, 1.0), (8, 1e-20), (32, 1.0), (128, 1e200)])
def test_a_density_of_best_of_n_is_best_of_n(n: int, scale: float) -> None:
    """g = u^{N−1} is Best-of-N, however it is scaled."""
    procedure = RankDensity("power", lambda u: scale * u ** (n - 1))
    assert procedure.distortion(P) == pytest.approx(BestOfN(n).distortion(P), abs=1e-12)
    inside = P[1:-1]
    assert procedure.density(inside) == pytest.approx(BestOfN(n).density(inside), rel=1e-11, abs=1e-300)


@pytest.mark.parametrize(
    ("g", "distortion"),
    [
        (lambda u: u**-0.5, lambda p: np.sqrt(p)),
        (lambda u: 1e-30 * u**-0.9, lambda p: p**0.1),
        (lambda u: -np.log(u), lambda p: p - p * np.log(np.maximum(p, 1e-320))),
        (lambda u: (u >= 0.9) * 1.0, lambda p: np.maximum(0, p - 0.9) / 0.1),
        (lambda u: (u < 1 / 3) * 7.0, lambda p: np.minimum(1, p * 3)),
        (
            lambda u: np.where((u > 0.3) & (u < 0.6), 0.0, 1.0),
            lambda p: (np.minimum(p, 0.3) + np.maximum(p - 0.6, 0)) / 0.7,
        ),
        (lambda u: 5.0, lambda p: p),
    ],
    ids=["root", "tenth root", "log", "upper tail", "lower tail", "gap", "constant"],
)
def test_singular_and_broken_densities_integrate_exactly(g: Callable, distortion: Callable) -> None:
    """Densities with an integrable singularity at 0, with steps and with gaps have their closed-form distortion."""
    procedure = RankDensity("odd", g)
    points = np.concatenate([[0.0], np.geomspace(1e-12, 0.1, 20), np.linspace(0.1, 1.0, 91)])
    assert procedure.distortion(points) == pytest.approx(distortion(points), abs=1e-11)


@pytest.mark.parametrize(("a", "tail"), [(1.5, 0.99), (2.0, 0.5), (5.0, 0.9)])
def test_the_upper_tail_wins_as_its_closed_form(a: float, tail: float) -> None:
    """For F = u^a and the mean of the upper tail, W has a closed form although h bends at F(u) = tail."""
    procedure = RankDensity("upper tail", lambda u: (u >= tail) * 1.0)
    law = aligned_law(Log(), beta=1 / (a - 1))
    start = tail ** (1 / a)
    exact = 1 - ((1 - start ** (a + 1)) / (a + 1) - tail * (1 - start)) / (1 - tail) ** 2
    assert law.win_rate(procedure) == pytest.approx(exact, abs=1e-10)


@pytest.mark.parametrize(
    ("g", "message"),
    [
        (lambda u: -u, r"the density of odd must be non-negative and finite: g\(\d.*\) = -"),
        (lambda u: np.where(u > 0.5, -1e-9, 1.0), r"g\(0\.5\d*\) = -1e-09"),
        (lambda u: np.where(u > 0.99, np.nan, u), r"g\(0\.99\d*\) = nan"),
        (lambda u: u + np.inf, r"g\(\d.*\) = inf"),
        (lambda u: 1 / u, "must be non-negative and finite|not integrable"),
        (lambda u: 1 / (1 - u), "must be non-negative and finite|not integrable"),
        (lambda u: 0 * u, "the density of odd is zero everywhere"),
    ],
)
def test_a_density_that_is_none_is_refused(g: Callable, message: str) -> None:
    """A density that is negative, NaN, infinite, not integrable or zero is a ConfigError that says where."""
    with pytest.raises(ConfigError, match=message):
        RankDensity("odd", g)
