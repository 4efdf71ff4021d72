"""Win rates at one KL: theory's curve, policies that know less, and widths that contain the error."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from known_run import make_recipe
from rank_correlation import law_at_rank_correlation

from infalign.core.storage import write_table
from infalign.method.calibration import Array
from infalign.method.optimum import optimum
from infalign.method.procedures import BestOfN, parse_procedure
from infalign.method.transforms import parse_transform
from infalign.recipe.layout import Layout
from infalign.report.equal_kl import AtOneKL, is_comparable, matched, widen
from infalign.report.scored_samples import ScoredSamples
from infalign.theory.law import law_at_kl


def test_matched_interpolates_the_share_of_theorys_gain() -> None:
    """A policy's own KL gives its own win rates; elsewhere its share of the curve is linear; beyond, there is none."""

    def gain(kl: float) -> float:
        return 0.4 * np.sqrt(kl)

    budgets = [(np.full(3, 4.0), np.full(3, 0.9)), (np.full(3, 1.0), np.full(3, 0.8))]  # shares 1/2 and 3/4
    assert matched(budgets, 1.0, gain).values == pytest.approx(0.8)
    assert matched(budgets, 0.81, gain).values == pytest.approx(0.5 + 0.75 * gain(0.81))
    assert matched(budgets, 2.5, gain).values == pytest.approx(0.5 + 0.625 * gain(2.5))
    assert [matched(budgets, kl, gain).shift for kl in (1.0, 0.81, 2.5)] == pytest.approx([0.0, 0.0, 0.0])
    over = matched([(kl, wins - 0.3) for kl, wins in budgets], 2.5, gain, np.full(3, 0.2))  # of what begins at 0.2
    assert over.values == pytest.approx(0.2 + 0.625 * gain(2.5))
    idle = (np.zeros(3), np.full(3, 0.48))  # a policy that learned nothing has no share of any gain
    assert matched([*budgets, idle], 0.81, gain).values == pytest.approx(0.5 + 0.75 * gain(0.81))
    assert [is_comparable((0.0, 1.0, 4.0), kl) for kl in (0.79, 0.81, 4.0, 4.5)] == [False, True, True, False]


@pytest.mark.parametrize("rho", [0.9, 0.7, 0.5])
@pytest.mark.parametrize(
    ("transform", "name"), [("identity", "best-of-4"), ("exp:10", "best-of-4"), ("exp:-10", "worst-of-4")]
)
def test_the_interval_at_one_kl_contains_the_error_of_interpolation(rho: float, transform: str, name: str) -> None:
    """A policy that knows ranks with correlation ρ wins what the widened estimate allows, exact numbers given."""
    procedure = parse_procedure(name)

    def gain(kl: float) -> float:
        return law_at_kl(parse_transform(transform), kl=kl).win_rate(procedure) - 0.5

    def won(kl: float) -> float:
        return law_at_rank_correlation(parse_transform(transform), rho=rho, kl=kl).law.win_rate(procedure)

    for budgets, kl in (((0.25, 1.25), 0.5), ((0.5, 1.0), 0.7), ((0.4,), 0.33)):
        found = matched([(np.full(2, own), np.full(2, won(own))) for own in budgets], kl, gain)
        mean = float(found.values.mean())
        e = widen({"mean": mean, "low": mean, "high": mean}, found.shift)
        assert e["low"] - 5e-4 <= won(kl) <= e["high"] + 5e-4
        assert abs(found.shift) < 0.02  # so that the width means something


def test_no_share_at_one_kl_is_above_one() -> None:
    """Not its interval either, where theory's curve has left the square root's far below, nor a difference's."""

    def gain(kl: float) -> float:
        return law_at_kl(parse_transform("exp:10"), kl=kl).win_rate(BestOfN(4)) - 0.5

    wins = [np.full(4, 0.5 + gain(kl)) for kl in (1.0, 4.0)]
    found = matched([(np.full(4, kl), own) for kl, own in zip((1.0, 4.0), wins, strict=True)], 2.0, gain)
    mean = float(found.values.mean())
    assert 0.9 < mean <= mean + found.shift <= 1.0
    at_the_top = widen({"mean": mean, "low": mean, "high": 0.999}, found.shift, least=0.0)
    assert (at_the_top["low"], at_the_top["high"]) == (mean, 1.0)
    assert widen({"mean": -0.9, "low": -0.95, "high": -0.8}, -0.2)["low"] == -1.0


def test_pass_at_k_grows_with_the_kl_as_on_the_stored_rewards(tmp_path: Path) -> None:
    """Near 100 % it hardly does. A law that knows the rates of 300 prompts is brought from .13 to .1 nats."""
    policies = {"aware": {"transform": "optimal", "kl_budget": 0.1}, "ordinary": {"transform": "raw", "kl_budget": 0.1}}
    truth = {"prompts": 300, "samples": 8, "max_n": 8, "truth": "reward"}
    recipe = make_recipe(
        tmp_path, policies=policies, gold=False, judge=None, procedure="best-of-8", evaluate=truth, rollout={"k": 64}
    )
    rng, layout = np.random.default_rng(0), Layout(tmp_path)
    rewards_PK = np.sort((rng.random((300, 64)) < rng.beta(4.0, 6.0, (300, 1))).astype(float), axis=1)
    layout.calibrated.parent.mkdir(exist_ok=True)
    write_table(layout.calibrated, pa.table({"reference_rewards": rewards_PK.tolist()}))
    (layout.evaluation("reference")).mkdir(parents=True)
    scores = pa.table({"reward": rewards_PK[:, ::8].ravel()})
    write_table(layout.evaluation("reference") / "scores.parquet", scores)
    evaluated, served = ScoredSamples(recipe, layout), BestOfN(8)

    def passed(aimed: str, kl: float) -> Array:
        weights_PK = np.exp(optimum(rewards_PK, aimed, kl=kl).log_ratios_PK)
        return 1.0 - (1.0 - (weights_PK * rewards_PK).sum(axis=1) / weights_PK.sum(axis=1)) ** 8

    for name, aimed in (("aware", "best-of-8"), ("ordinary", "standard")):

        def gain(kl: float, name: str = name) -> float:
            curve = evaluated.curve_at(recipe.policies[name], kl)
            assert curve is not None
            return curve.win_rate(served) - 0.5

        own = [(np.full(300, 0.13), passed(aimed, 0.13))]
        reference = 1.0 - (1.0 - rewards_PK.mean(axis=1)) ** 8
        found = matched(own, 0.1, gain, reference)
        exact = passed(aimed, 0.1).mean()
        assert found.values.mean() == pytest.approx(exact, abs=1e-4)
        assert found.values.mean() + found.shift < exact - 0.004  # as it would be without the stored rewards


def test_a_method_that_spends_far_less_or_far_more_is_left_out() -> None:
    """One that spends a quarter more stays and is marked; two at the ends are named with what they spend."""
    spent = {"little": 0.1, "identity": 0.5, "ipo": 0.5, "more": 0.62, "most": 0.63}
    methods = {name: [name] for name in spent}

    def at(kls: dict[str, float]) -> AtOneKL:
        return AtOneKL.of(methods, {name: np.full(4, kl) for name, kl in kls.items()}, lambda *_: None, median=0.5)

    found = at(spent)
    assert found.left_out == {"little": 0.1}
    assert found.not_bracketed == {"more": 0.62, "most": 0.63}
    assert found.kl == found.median == 0.5
    assert found.methods.keys() == {"identity", "ipo", "more"}
    assert at(spent | {"little": 0.4}).kl == 0.4  # near enough to be waited for
