"""Transformations: values, scale and the fall from the top, tables as files, and functions of the user's."""

import json
import re
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infalign.core.errors import ConfigError
from infalign.method.procedures import BestOfN, RewindAndRepeat, WorstOfN
from infalign.method.transforms import Exponential, Function, Identity, Log, Power, Tabulated, parse_transform
from infalign.theory.law import aligned_law, law_at_kl
from infalign.theory.optimum import rank_optimum

NAMED = [Identity(), Log(), Exponential(5), Exponential(-10), Exponential(0.5), Power(7), Power(-7), Power(0.5)]


def raw(transform: Any, u: mpmath.mpf) -> mpmath.mpf:
    """Return the paper's Φ(u) with mpmath's digits."""
    match transform:
        case Identity():
            return u
        case Log():
            return mpmath.log(u)
        case Exponential(t):
            return mpmath.sign(t) * mpmath.exp(mpmath.mpf(t) * u)
        case Power(m):
            return u ** mpmath.mpf(m) if m > 0 else -((1 - u) ** mpmath.mpf(-m))
    raise AssertionError(transform)


@pytest.mark.parametrize("transform", NAMED, ids=lambda transform: transform.name)
@given(st.floats(1e-6, 1.0))
def test_scale_times_the_normalised_value_is_the_papers(transform: Any, u: float) -> None:
    """Raw Φ = scale × normalised Φ at every u, to 40 digits rounded."""
    with mpmath.workdps(40):
        exact = float(raw(transform, mpmath.mpf(u)))
    assert transform.scale * float(transform(u)) == pytest.approx(exact, rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("transform", NAMED, ids=lambda transform: transform.name)
@pytest.mark.parametrize("v", [1e-200, 1e-30, 1e-16, 1e-9, 0.1, 0.7, 1 - 1e-9])
def test_the_fall_from_the_top_keeps_all_digits(transform: Any, v: float) -> None:
    """Φ(1−v) − Φ(1) has full relative accuracy also where 1 − v rounds to 1."""
    with mpmath.workdps(460):
        exact = float((raw(transform, 1 - mpmath.mpf(v)) - raw(transform, mpmath.mpf(1))) / mpmath.mpf(transform.scale))
    assert float(transform.drop(v)) == pytest.approx(exact, rel=1e-13, abs=1e-320)


BAD_NAMES = ["", "exp", "exp:", "exp:x", "exp:1:2", "power:x", "log:2", "Identity", "bon_fp"]
SENSELESS = [
    (f"exp:{t:g}", f"exp:t needs a finite t with 0 < |t| ≤ 500, found {t:g}") for t in (0, np.nan, np.inf, 501, -1e9)
]
SENSELESS += [(f"power:{m:g}", f"found {m:g}") for m in (0.0, np.nan, 1e8, -2e6)]


@pytest.mark.parametrize(
    ("name", "message"),
    [(name, f"unknown transformation '{name}'; known: identity, log") for name in BAD_NAMES] + SENSELESS,
)
def test_a_name_that_is_none_is_refused(name: str, message: str) -> None:
    """A spelling that is none of ours is quoted, and a rate or exponent that makes no sense has its range."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_transform(name)


@pytest.mark.parametrize(
    "procedure", [BestOfN(4), WorstOfN(32), RewindAndRepeat(0.85, 32)], ids=lambda procedure: procedure.name
)
def test_a_table_round_trips_through_its_file(procedure: BestOfN | WorstOfN | RewindAndRepeat, tmp_path: Path) -> None:
    """A solved optimum written as JSON and read again is the same to the last bit, and so is its law."""
    table = rank_optimum(procedure, kl=0.5).transform
    (tmp_path / "optimum.json").write_text(table.to_json(), encoding="utf-8")
    read = parse_transform(str(tmp_path / "optimum.json"))
    assert isinstance(read, Tabulated)
    assert read.name == table.name
    for column in ("v", "phi", "slope"):
        assert getattr(read, column).tobytes() == getattr(table, column).tobytes()
    assert aligned_law(read, beta=0.1).kl == aligned_law(table, beta=0.1).kl


@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=12), st.floats(-3, 3), st.floats(-3, 3), st.floats(0.1, 3))
def test_a_table_of_a_cubic_is_the_cubic(steps: list[float], a: float, b: float, c: float) -> None:
    """Between its knots a table is the cubic with their values and slopes."""
    v = np.concatenate([[0.0], np.cumsum(steps) / np.sum(steps)])
    v[-1] = 1.0

    def cubic(x: np.ndarray) -> np.ndarray:
        return a * x + b * x**2 + c * x**3 + 2.0

    if np.ptp(cubic(v)) < 1e-3:
        return
    table = Tabulated("cubic", v, cubic(v), a + 2 * b * v + 3 * c * v**2)
    x = np.linspace(0.0, 1.0, 57)
    assert table.scale * table(1 - x) == pytest.approx(cubic(x), abs=1e-12)
    assert table.scale * table.drop(x) == pytest.approx(cubic(x) - 2.0, abs=1e-12)


def test_knots_may_lie_at_any_distance() -> None:
    """Knots 1e-200 apart are interpolated like others."""
    v = np.array([0.0, 1e-200, 2e-200, 1.0])
    table = Tabulated("steep", v, np.array([0.0, -1.0, -2.0, -3.0]), np.array([-1e149, -1e149, -1e149, 0.0]))
    assert float(table.drop(1e-200)) == pytest.approx(-1 / 3)
    assert float(table.drop(1.5e-200)) == pytest.approx(-1 / 2)


@pytest.mark.parametrize("quantile", [0.85, 0.3, 0.001, 0.999, 0.5, 1 / 3])
def test_a_rank_exactly_at_the_threshold_passes(quantile: float) -> None:
    """The optimum of Rewind-and-Repeat jumps where a response passes: at the quantile itself, not beyond."""
    optimum = rank_optimum(RewindAndRepeat(quantile, 8), beta=0.3)
    at, below = optimum.transform(np.array([quantile, quantile - 1e-12]))
    above = float(optimum.transform(quantile + 1e-12))
    assert above == pytest.approx(float(at), abs=1e-9)
    assert abs(at - below) > 1e-3
    assert Tabulated("same", optimum.transform.v, optimum.transform.phi, optimum.transform.slope)(quantile) == at


GOOD = {"name": "t", "v": [0.0, 0.5, 1.0], "phi": [0.0, -1.0, -2.0], "slope": [-2.0, -2.0, -2.0]}
CHANGES: list[dict[str, Any]] = [
    *({"v": v} for v in ([0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 2.0, 1.0], [0.1, 0.5, 1.0], [0.0, 0.5, 0.9])),
    *({"v": few, "phi": few, "slope": few} for few in ([], [0.0])),
    *({"phi": [0.0, value, 1.0]} for value in (float("nan"), float("inf"), 1.5e308)),
    *(
        {"phi": phi}
        for phi in ([1.0, 1.0, 1.0], "012", ["a", "b", "c"], [[0.0], [1.0], [2.0]], [None, 0.0, 1.0], {"0": 1})
    ),
    *({"slope": slope} for slope in ([], [0.0, -1e300, 0.0])),
]
BAD_TABLES = [
    "",
    "not JSON",
    "[]",
    "null",
    '["name"]',
    '{"name": "other"}',
    '{"name": "exp:0"}',
    json.dumps(GOOD).replace("-1.0", "-1e999"),
]
BAD_TABLES += [json.dumps({key: GOOD[key] for key in GOOD if key != missing}) for missing in GOOD]
BAD_TABLES += [json.dumps(GOOD | change) for change in CHANGES]


def test_what_is_no_table_is_refused_with_its_file(tmp_path: Path) -> None:
    """A malformed file, a missing one, a folder and bytes that are no text are ConfigErrors that name the file."""
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for number, text in enumerate(BAD_TABLES):
        (tmp_path / f"{number}.json").write_text(text, encoding="utf-8")
    for name in ("missing", "folder", "bytes", *range(len(BAD_TABLES))):
        with pytest.raises(ConfigError, match=rf"{name}\.json"):
            parse_transform(str(tmp_path / f"{name}.json"))


@pytest.mark.parametrize(
    ("phi", "message"),
    [
        (lambda u: u * np.nan, r"wild is nan at u = \d"),
        (lambda u: np.nan, r"wild is nan at u = \d"),
        (lambda u: np.where(u > 0.7, np.inf, u), r"wild is inf at u = 0\.7\d+"),
        (lambda u: np.where((u > 0.3) & (u < 0.4), np.nan, u), r"wild is nan at u = 0\.3\d+"),
        (lambda u: np.where(u < 1e-4, np.inf, u), r"wild is inf at u = \d\.\d+e-\d+"),
    ],
)
def test_a_function_that_is_nan_or_infinite_is_refused_with_its_place(phi: object, message: str) -> None:
    """Φ = NaN or +∞ is a ConfigError that names the transformation and the u."""
    wild = Function("wild", phi)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        aligned_law(wild, beta=1.0)
    with pytest.raises(ConfigError, match=message):
        law_at_kl(wild, kl=1.0)


def test_a_function_may_be_minus_infinity_or_a_number() -> None:
    """Φ = −∞ rules responses out, and a constant Φ leaves the base policy as it is."""
    upper = Function("upper half", lambda u: np.where(u > 0.5, 0.0, -np.inf))
    assert aligned_law(upper, beta=1.0).kl == pytest.approx(np.log(2), abs=1e-12)
    assert aligned_law(Function("constant", lambda u: 3.0), beta=1.0).kl == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("exact", [Identity(), Exponential(10), Power(7), Log()], ids=lambda transform: transform.name)
@pytest.mark.parametrize("kl", [1.0, 5.0, 15.0, 25.0, 32.0])
def test_the_error_of_a_rounded_function_is_honest(exact: Any, kl: float) -> None:
    """A plain function's law is off by at most ten times its own error, which is large where digits are lost."""
    plain = Function("plain", lambda u: exact.scale * exact(u))
    beta = law_at_kl(exact, kl=kl).beta
    best, rounded = aligned_law(exact, beta=beta), aligned_law(plain, beta=beta)
    for found, right in [
        (rounded.kl, best.kl),
        *((rounded.win_rate(procedure), best.win_rate(procedure)) for procedure in (BestOfN(4), WorstOfN(4))),
    ]:
        assert abs(found - right) <= 10 * rounded.error
    assert rounded.error < 1e-9 if kl <= 5 else rounded.error > 1e-10
    assert rounded.error > 1e-6 or kl < 25
    assert best.error < 1e-11
