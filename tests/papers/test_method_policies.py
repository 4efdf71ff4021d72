"""Methods as policies of a recipe: their settings, their budgets, and which of them a recipe can have."""

import re
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pyarrow as pa
import pytest
from method_policies import MethodPolicies, check_budgets, possible_methods
from methods import METHODS, nearest_n

from infalign.core.errors import ConfigError
from infalign.core.storage import write_table
from infalign.method.procedures import BestOfN, WorstOfN
from infalign.method.transforms import parse_transform
from infalign.recipe.layout import Layout
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.theory.choose import best_named, choose
from infalign.theory.law import law_at_kl
from infalign.training.solvers import read_solver
from infalign.training.solvers.guide import Guide


def recipe(root: Path, *overrides: str) -> Recipe:
    """Return a recipe that trains an offline and an on-policy policy."""
    settings = micro.settings(root / "run")
    del settings["policies"]["plain"]
    return load_recipe(micro.write(root / "recipe.yaml", settings), ["procedure=best-of-2", *overrides])


def test_strengths_are_those_of_the_budget() -> None:
    """The n of Best-of-n is the one with the nearest KL."""
    for n in (2, 3, 17, 400):
        assert nearest_n(law_at_kl(parse_transform("log"), kl=np.log(n) - (n - 1) / n).kl) == n


@pytest.mark.slow
def test_the_aware_transformation_is_the_best_that_has_a_name() -> None:
    """It is the first of `theory.choose` that a recipe can spell: steeper for larger N, negative for the worst."""
    for procedure in (BestOfN(4), WorstOfN(4), BestOfN(32)):
        first = [c.transform.name for c in choose(procedure, kl=0.5, rollouts=100).candidates]
        assert best_named(procedure.name, 0.5, 100) == next(name for name in first if not name.startswith("optimal"))
    rates = [parse_transform(best_named(f"best-of-{n}", 0.5, 100)).t for n in (2, 4, 32)]
    assert rates == sorted(rates)
    assert rates[0] < 8 < 50 < rates[2]


@pytest.mark.parametrize("served", ["best-of-4", "worst-of-2"])
def test_every_method_is_a_policy_of_the_recipe(tmp_path: Path, served: str) -> None:
    """Each solver accepts its settings at a budget, and the aware ones have the transformation for the procedure."""
    changed = recipe(tmp_path, f"procedure={served}", "rollout.k=8")
    methods = dict(zip(METHODS, MethodPolicies(changed, [*METHODS], [0.5]).recipe.policies.values(), strict=True))
    name = best_named(served, 0.5, 8)
    aware = {method for method, policy in methods.items() if policy.transformation == name}
    assert aware == {"qrpo", "resample", "rloo", "ppo", "grpo"}
    assert methods["rloo"].fit == methods["bond"].fit == changed.policies["online"].fit
    assert methods["ipo"].fit == changed.policies["aware"].fit
    assert methods["rloo"].generations == 4


def test_all_offline_methods_have_the_form_of_the_recipes_first(tmp_path: Path) -> None:
    """With a guide there all have it; what trains one language model takes the fit of the student instead."""
    changed = recipe(tmp_path, "rollout.k=8")
    student = read_solver(solver="distil", teacher="aware", fit={"learning_rate": 0.5})
    guided = changed.policies["aware"].model_copy(update={"guide": Guide(trunk="reward")})
    changed = changed.model_copy(update={"policies": {"student": student, "aware": guided}})
    offline, others = ["qrpo", "qrpo-raw", "resample", "ipo", "bon-sft", "bonbon"], ["rloo"]
    found = MethodPolicies(changed, [*offline, *others], [0.5]).recipe.policies.values()
    fits = [(getattr(policy, "guide", None), policy.fit.learning_rate) for policy in found]
    own = (Guide(trunk="reward"), guided.fit.learning_rate)
    assert fits == [own] * len(offline) + [(None, 2.5 * 0.5)]


def test_without_an_on_policy_policy_the_offline_fit_is_stretched(tmp_path: Path) -> None:
    """Three times the epochs and 2.5 times the learning rate; nothing else differs."""
    both = recipe(tmp_path)
    offline = both.model_copy(update={"policies": {"aware": both.policies["aware"]}})
    fit = MethodPolicies(offline, ["rloo"], [0.5]).recipe.policies["rloo-0_5"].fit
    own = both.policies["aware"].fit
    assert fit == own.model_copy(update={"epochs": 3 * own.epochs, "learning_rate": 2.5 * own.learning_rate})


def test_without_names_the_methods_are_those_that_the_recipe_has_settings_for(tmp_path: Path) -> None:
    """On-policy methods need an on-policy policy, and what is left out comes with its reason."""
    both = recipe(tmp_path)
    chosen, left_out = possible_methods(both, [0.5])
    assert [*METHODS] == sorted([*chosen, *left_out], key=[*METHODS].index)
    assert not left_out
    offline = both.model_copy(update={"policies": {"aware": both.policies["aware"]}})
    chosen, left_out = possible_methods(offline, [0.5])
    assert set(chosen) == {name for name, method in METHODS.items() if not method.generates}
    assert "no on-policy policy" in left_out["bond"]


def test_a_method_may_be_for_another_n(tmp_path: Path) -> None:
    """Its policy has the transformation that loses least for that N, under a name of its own beside the recipe's."""
    policies = MethodPolicies(recipe(tmp_path), ["qrpo", "qrpo-for-16"], [0.2]).recipe.policies
    names = [policies[name].transformation for name in ("qrpo-0_2", "qrpo-for-16-0_2")]
    assert names == [best_named(f"best-of-{n}", 0.2, 6) for n in (2, 16)]
    assert names[0] != names[1]


def test_budgets_that_differ_little_have_policies_of_their_own(tmp_path: Path) -> None:
    """Names had six digits of the budget, so one of two policies was left out."""
    found = MethodPolicies(recipe(tmp_path), ["qrpo-identity"], [0.4, 0.4000001]).recipe.policies
    assert [*found] == ["qrpo-identity-0_4", "qrpo-identity-0_4000001"]


def test_a_policy_of_the_recipe_is_not_overwritten(tmp_path: Path) -> None:
    """A name that the recipe gave to something else is refused."""
    own = recipe(tmp_path)
    taken = own.model_copy(update={"policies": own.policies | {"qrpo-1": read_solver(kl_budget=0.3)}})
    with pytest.raises(ConfigError, match="another policy named qrpo-1; rename that policy"):
        MethodPolicies(taken, ["qrpo"], [1.0])


def write_references(of: Recipe, rewards_K: np.ndarray) -> None:
    """Write the stored rewards of a run with two prompts, which have the same."""
    layout = Layout(Path(of.run_dir))
    layout.root.mkdir()
    write_table(layout.calibrated, pa.table({"reference_rewards": [rewards_K.tolist()] * 2}))


def test_further_budgets_bracket_the_median(tmp_path: Path) -> None:
    """Who spends more than half of the methods gets a smaller budget, who spends less a larger one, in proportion."""
    own = recipe(tmp_path, "rollout.k=64")
    write_references(own, np.arange(64.0))
    policies = MethodPolicies(own, ["qrpo", "ipo", "rloo"], [0.2, 0.4])
    spent = {"qrpo-0_2": 0.3, "qrpo-0_4": 0.6, "ipo-0_2": 0.1, "ipo-0_4": 0.15, "rloo-0_2": 0.19, "rloo-0_4": 0.345}
    wider = policies.bracketed(spent)  # medians 0.19 and 0.345
    assert wider.more_budgets == {
        "qrpo": pytest.approx([0.2 * 0.19 / 0.3 / 1.2], rel=0.01),
        "ipo": pytest.approx([0.4 * 0.345 / 0.15 * 1.2], rel=0.01),
    }
    assert [len(names) for names in wider.by_method.values()] == [3, 3, 2]
    assert wider.by_budget == policies.by_budget
    lower, upper = (name for names in wider.by_method.values() for name in names if name not in spent)
    assert wider.bracketed(spent | {lower: 0.15, upper: 0.4}).more_budgets == wider.more_budgets


@pytest.mark.parametrize(("ties", "further"), [(1, {"qrpo-raw": [1.0]}), (32, {})])
def test_no_further_budget_is_more_than_the_rollouts_can_spend(tmp_path: Path, ties: int, further: Any) -> None:
    """The KL of raw rewards over K rollouts is at most log K less the log of ties at the top."""
    own = recipe(tmp_path, "rollout.k=64")
    write_references(own, np.minimum(np.arange(64.0), 64 - ties))
    spent = {"qrpo-raw-0_5": 0.3, "qrpo-0_5": 0.5, "ipo-0_5": 0.5}
    assert MethodPolicies(own, ["qrpo-raw", "qrpo", "ipo"], [0.5]).bracketed(spent).more_budgets == further


@pytest.mark.parametrize(
    ("method", "budgets", "said"),
    [
        ("qpro", [0.5], "unknown method 'qpro'; did you mean qrpo?"),
        ("zzz", [0.5], "unknown method 'zzz'; known: qrpo, "),
        ("ipo-for-32", [0.5], "ipo has the same transformation for every N"),
        ("qrpo", [0, 1], "KL budgets must be positive numbers"),
        ("bon-sft", [2], "needs rollout.k of at least 19"),
    ],
)
def test_mistakes_are_named_before_any_work(tmp_path: Path, method: str, budgets: list[float], said: str) -> None:
    """What cannot be compared is said with what would be possible, and the run directory is not made."""
    with pytest.raises(ConfigError, match=re.escape(said)):
        MethodPolicies(recipe(tmp_path), [method], check_budgets(budgets))
    assert not (tmp_path / "run").exists()
