"""Shapings: closed forms, what leaves each unchanged, and the β that spends a budget on the rollouts."""

from typing import Any

import numpy as np
import pytest
from scipy.special import expit, softmax
from scipy.stats import entropy

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array
from infalign.method.optimum import Optimal
from infalign.method.procedures import BestOfN, WorstOfN, parse_procedure
from infalign.method.shapings import LSC, PAR, Raw, RawPerPrompt, budget_beta, log_ratios, parse_shaping, shape_rollouts
from infalign.method.transforms import Function, at_ranks

REFERENCES = np.array([-1.0, 0.0, 0.5, 2.0])
TRANSFORMS = ["identity", "log", "exp:10", "exp:-2.5", "power:7", "power:-63", "power:0.125"]
RIVALS = [Raw(), RawPerPrompt(), PAR(), LSC()]
ROLLOUTS_PK = np.random.default_rng(0).normal(size=(30, 64)) * np.linspace(0.1, 3.0, 30)[:, None]


def test_par_is_the_mean_probability_of_winning() -> None:
    """PAR is the mean of σ(r − r_i) over the references, one at a time."""
    rewards = np.array([[-2.0, 0.5], [1.0, 7.0]])
    exact = [[expit(r - REFERENCES).mean() for r in row] for row in rewards]
    assert PAR()(rewards, REFERENCES) == pytest.approx(np.array(exact), rel=1e-14)


def test_lsc_is_the_log_sigmoid_above_a_quantile() -> None:
    """LSC is log σ(r − q); a reward far below stays finite, where σ itself is 0."""
    median = 0.25
    assert LSC(0.5)([1.0, median], REFERENCES) == pytest.approx([np.log(expit(0.75)), np.log(0.5)])
    assert LSC(0.5)(-2000.0, REFERENCES) == pytest.approx(-2000.25)
    assert LSC()(0.0, np.linspace(0.0, 1.0, 101)) == pytest.approx(np.log(expit(-0.85)))


def test_per_prompt_standardisation_gives_mean_zero_and_variance_one() -> None:
    """The rollouts of each prompt get mean 0 and standard deviation 1; equal rollouts get 0, and others r − mean."""
    shaped_PK = shape_rollouts(RawPerPrompt(), ROLLOUTS_PK)
    assert shaped_PK.mean(axis=1) == pytest.approx(0.0, abs=1e-14)
    assert shaped_PK.std(axis=1) == pytest.approx(1.0)
    assert RawPerPrompt()([0.1, 2.1], np.full(3, 0.1)) == pytest.approx([0.0, 2.0])


@pytest.mark.parametrize(
    ("shaping", "unchanged"),
    [
        (parse_shaping("exp:10"), ("shift", "scale", "exp")),
        (RawPerPrompt(), ("shift", "scale")),
        (PAR(), ("shift",)),
        (LSC(), ("shift",)),
        (Raw(), ()),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_what_a_prompt_may_do_to_its_rewards(shaping: Any, unchanged: tuple[str, ...]) -> None:
    """Ranks ignore every increasing map, the standardized reward affine ones, PAR and LSC a shift, Raw none."""
    shaped_PK = shape_rollouts(shaping, ROLLOUTS_PK)
    maps = {"shift": ROLLOUTS_PK + 5.0, "scale": 3.0 * ROLLOUTS_PK, "exp": np.exp(ROLLOUTS_PK)}
    for name, rewards_PK in maps.items():
        same = np.allclose(shape_rollouts(shaping, rewards_PK), shaped_PK, rtol=1e-9, atol=1e-12)
        assert same == (name in unchanged), name


@pytest.mark.parametrize("shaping", [*RIVALS, parse_shaping("identity")], ids=lambda shaping: shaping.name)
def test_a_shaping_refuses_what_calibration_refuses(shaping: Any) -> None:
    """A reward that is not finite and references that are not sorted are errors for every shaping."""
    with pytest.raises(DataError, match="is nan"):
        shaping([np.nan], REFERENCES)
    with pytest.raises(DataError, match="sorted in ascending order"):
        shaping([0.0], REFERENCES[::-1])


@pytest.mark.parametrize("name", ["raw", "raw-prompt", "par", "lsc:0.85", "lsc:0.5", *TRANSFORMS])
def test_names_round_trip(name: str) -> None:
    """A name spells a shaping whose name it is."""
    assert parse_shaping(name).name == name


@pytest.mark.parametrize(
    "law",
    [
        Optimal(BestOfN(8), 0.1 / 3),
        Optimal(parse_procedure("0.25*best-of-2+0.75*best-of-8"), 1e-7, "win-rate", (-1.0, 1.0)),
        Optimal(WorstOfN(8), 0.5, raised=frozenset({"0a", "1b"})),
    ],
)
def test_the_spelling_of_an_optimum_is_all_of_it(law: Optimal) -> None:
    """So it leaves a run as text; what only looks like one is refused."""
    assert Optimal.parse(law.name) == law
    assert Optimal.parse(law.name + "x") is None
    with pytest.raises(ConfigError, match="infalign export --transform optimal"):
        parse_shaping(law.name + "x")


ALL = r"known: identity, log, exp:T.*raw, raw-prompt, par, lsc:Q"


@pytest.mark.parametrize(
    ("name", "message"),
    [(name, ALL) for name in ("rew", "lsc", "lsc:x", "par:1")]
    + [(f"lsc:{q}", f"quantile Q from 0 to 1, found {q}") for q in ("1.5", "-0.1", "nan")],
)
def test_a_name_that_is_none_is_refused(name: str, message: str) -> None:
    """The message lists transformations and shapings, or the range of the quantile."""
    with pytest.raises(ConfigError, match=message):
        parse_shaping(name)


@pytest.mark.parametrize("shaping", RIVALS, ids=lambda shaping: shaping.name)
@pytest.mark.parametrize("kl", [1e-6, 0.5, 4.0])
def test_the_budget_is_spent_on_average(shaping: Any, kl: float) -> None:
    """At the β found the law ∝ e^{s/β} loses entropy against the uniform one: the budget, averaged over prompts."""
    shaped_PK = shape_rollouts(shaping, ROLLOUTS_PK)
    beta = budget_beta(shaped_PK, kl)
    law_PK = np.exp(log_ratios(shaped_PK, beta)) / 64
    assert law_PK == pytest.approx(softmax(shaped_PK / beta, axis=1), rel=1e-9)
    assert np.mean(np.log(64) - entropy(law_PK, axis=1)) == pytest.approx(kl, rel=1e-6)


def test_beta_follows_the_scale_of_the_rewards() -> None:
    """A shift of all shaped rewards leaves β and a scale multiplies it, however small or large."""
    beta = budget_beta(ROLLOUTS_PK, 0.5)
    for scale in (1e-200, 3.0, 1e200):
        assert budget_beta(scale * (ROLLOUTS_PK + 1.0), 0.5) == pytest.approx(scale * beta, rel=1e-9, abs=0.0)


@pytest.mark.parametrize(
    ("shaped_PK", "largest"),
    [
        (np.array([[0.0, 1.0, 2.0, 3.0]]), "1.386"),  # log 4
        (np.array([[0.0, 1.0, 3.0, 3.0], [0.0, 1.0, 2.0, 3.0]]), "1.04"),  # (log 4 + log 2)/2
        (np.array([[1.0, 1.0, 1.0, 1.0]]), "0"),
    ],
)
def test_an_unreachable_budget_is_refused(shaped_PK: Array, largest: str) -> None:
    """K rollouts reach log K less the log of ties at the top, on average over prompts; the message says how much."""
    with pytest.raises(
        ConfigError, match=rf"4 rollouts .* 1.5 nats; .* below {largest} .*lower the budget or sample more"
    ):
        budget_beta(shaped_PK, 1.5)
    for kl in (0.0, -1.0, np.nan):
        with pytest.raises(ConfigError, match="must be positive"):
            budget_beta(shaped_PK, kl)


@pytest.mark.parametrize(
    ("phi", "said"),
    [
        (lambda u: 1.0 / (1.0 - u), "odd is inf at rank 1;"),
        (lambda u: np.where(u == 0.5, np.nan, u), "odd is nan at rank 0.5;"),
        (lambda u: 1.0 / u, "odd is inf at rank 0;"),
        (lambda u: np.log(u - 0.2), "odd is nan at rank 0;"),
        (lambda u: np.where(u < 0.2, -np.inf, u), "odd is -inf at rank 0.125;"),
    ],
    ids=["inf above", "nan inside", "inf below", "nan below", "-inf above 0"],
)
def test_a_transformation_is_finite_but_for_minus_infinity_at_rank_zero(phi: object, said: str) -> None:
    """Any other infinity or NaN is an error with the transformation, the rank and the value."""
    with pytest.raises(ConfigError, match=f"the transformation {said} it must be finite"):
        at_ranks(Function("odd", phi), [0.0, 0.5, 1.0], 4)  # type: ignore[arg-type]
