"""Several methods compared in one run directory: what is shared, what is counted, what is written."""

import io
import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from infalign.compare.comparison import Comparison, compare_methods, place_in_theory
from infalign.compare.policies import MethodPolicies
from infalign.compare.tables import make_sheets
from infalign.method.calibration import win
from infalign.method.procedures import BestOfN, Standard, WorstOfN
from infalign.method.transforms import Identity, Log
from infalign.pipeline.pending import pending
from infalign.recipe.layout import Layout
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.report.equal_kl import matched
from infalign.report.scored_samples import ScoredSamples
from infalign.steps import whole_run
from infalign.steps.run import Run
from infalign.theory.law import law_at_kl
from infalign.theory.optimum import optimal

pytestmark = pytest.mark.slow
FIRST, BUDGETS = ["qrpo", "bon-sft"], [0.1, 0.2]  # both budgets are nearest to the best of two


def recipe(root: Path, *overrides: str) -> Recipe:
    """Return a recipe whose run trains an offline and an on-policy policy and takes the gold for its judge."""
    root.mkdir(parents=True, exist_ok=True)
    settings = micro.settings(root / "run") | {"judge": micro.GOLD, "procedure": "best-of-2"}
    del settings["policies"]["plain"], settings["gold"]
    for policy in settings["policies"].values():
        policy["fit"] = policy["fit"] | {"epochs": 4, "learning_rate": 1.2e-2}  # enough to spend the budgets
    fixed = ["compute.processes=1", "report_to=[]"]
    return load_recipe(micro.write(root / "recipe.yaml", settings), [*fixed, *overrides])


def compare(root: Path, methods: list[str], budgets: list[float] = BUDGETS) -> tuple[dict[str, Any], list[str]]:
    """Return the numbers of a comparison and the names of the units that were done for it."""
    console = Console(file=io.StringIO(), width=200)
    results = compare_methods(recipe(root), methods=methods, budgets=budgets, console=console)
    return results, [line.split()[1] for line in console.file.getvalue().splitlines() if line.startswith("✓")]


def contents(root: Path) -> dict[str, bytes]:
    """Return all that a run leaves for its reader and the records of its units."""
    files = [root / name for name in ("results.json", "report.html", "recipe.yaml", "calibrated.parquet")]
    return {str(path): path.read_bytes() for path in [*files, *sorted((root / "stages").glob("*.json"))]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return a run, a comparison in its directory and one with more methods: numbers, units done, files before."""
    root = tmp_path_factory.mktemp("compare")
    whole_run.run_recipe(recipe(root), console=Console(file=io.StringIO()))
    before = contents(root / "run")
    first, done_first = compare(root, FIRST)
    final, done_final = compare(root, [*FIRST, "rloo", "best-of-n"])
    return {
        "root": root,
        "before": before,
        "first": first,
        "done": [done_first, done_final],
        "results": final,
    }


def samples(root: Path, name: str, column: str) -> np.ndarray:
    """Return a column of a model's evaluation, prompts × samples."""
    table = pq.read_table(root / "run" / "evaluation" / name / "scores.parquet")
    return table[column].to_numpy().reshape(6, 8)


def test_a_comparison_trains_and_evaluates_its_own_policies_only(finished: dict[str, Any]) -> None:
    """All that the run and earlier comparisons have done is used; two budgets with one n share a policy."""
    names = ["qrpo-0.1", "qrpo-0.2", "bon-sft-n2"]
    for done, new in zip(finished["done"], (names, ["rloo-0.1", "rloo-0.2"]), strict=True):
        assert sorted(done) == sorted(work for name in new for work in (f"train-{name}", *micro.evaluation(name)))
    assert list(finished["first"]["policies"]) == names


def test_the_run_itself_does_not_change(finished: dict[str, Any]) -> None:
    """Results, report, recipe and every record of the run are as before, and the run has nothing left to do."""
    assert {path: Path(path).read_bytes() for path in finished["before"]} == finished["before"]
    run = Run.of(recipe(finished["root"]))
    assert pending(whole_run.units(run), run.layout.root) == {}


def test_cost_is_counted_where_it_arises(finished: dict[str, Any]) -> None:
    """On-policy training generates tokens, at most twelve a response; offline training uses the shared rollouts."""
    results = finished["results"]
    costs = {name: policy["cost"] for name, policy in results["policies"].items() if "cost" in policy}
    assert all(costs[name]["generated_tokens"] == 0 for name in ("qrpo-0.1", "bon-sft-n2"))
    responses = 192  # 12 prompts × 4 generations × 4 epochs
    assert responses < costs["rloo-0.2"]["generated_tokens"] <= 12 * responses
    assert all(cost["seconds"] > 0 and 2**27 < cost["peak_memory"] < 2**36 for cost in costs.values())
    rollouts = [
        len(ids)
        for shard in (finished["root"] / "run" / "rollouts").glob("part-*/part-*.parquet")
        for ids in pq.read_table(shard)["token_ids"].to_pylist()
    ]
    shared = results["shared_cost"]
    assert (shared["responses"], shared["generated_tokens"]) == (len(rollouts), sum(rollouts))


def test_best_of_n_itself_is_counted_over_the_references_samples(finished: dict[str, Any]) -> None:
    """The best of two of one half wins against the other half as all pairs say; served best-of-2, as all fours do."""
    found = finished["results"]["policies"]["best-of-2"]
    assert found["kl_bound"] == pytest.approx(np.log(2) - 0.5)
    assert 0 < found["kl"]["mean"] <= found["kl_bound"] + 1e-9
    rewards = samples(finished["root"], "reference", "reward")
    for served, ours, theirs in (("standard", 2, 1), ("best-of-2", 4, 2)):
        by_hand = [
            win(
                np.array([max(chosen) for chosen in combinations(row[:4], ours)])[:, None],
                np.array([max(chosen) for chosen in combinations(row[4:], theirs)]),
            ).mean()
            for row in rewards
        ]
        assert found["win_rates"]["reward"][served]["mean"] == pytest.approx(np.mean(by_hand))


def test_the_share_of_theorys_gap_is_that_at_the_policys_kl(finished: dict[str, Any]) -> None:
    """It places the win rate by the reward between identity and optimum, the efficiency the standard one."""
    for policy in finished["results"]["policies"].values():
        if found := policy.get("captured"):
            won, kl = policy["win_rates"]["reward"], max(policy["kl"]["mean"], 1e-6)
            assert 0.5 < found["identity"] < found["optimum"]
            assert found["optimum"] == pytest.approx(optimal(BestOfN(2), kl=kl).win_rate)
            standard = law_at_kl(Identity(), kl=kl).win_rate(Standard())
            assert found["efficiency"]["mean"] == pytest.approx((won["standard"]["mean"] - 0.5) / (standard - 0.5))
            if found["share"]:
                gap = found["optimum"] - found["identity"]
                assert won["best-of-2"]["low"] == pytest.approx(found["identity"] + found["share"]["low"] * gap)


def test_between_budgets_the_share_of_theorys_gain_is_interpolated(finished: dict[str, Any]) -> None:
    """A method's win rate at the common KL is `equal_kl.matched` of its policies, and theory is its own law's."""
    results = finished["results"]
    at = next(at for at in results["matched"] if at["kl"] and "best-of-n" in at["theory"]["best-of-2"])
    procedure = BestOfN(2)

    def theory(kl: float) -> float:
        return law_at_kl(Log(), kl=kl).win_rate(procedure)

    points = [
        (np.full(2, policy["kl"]["mean"]), np.full(2, policy["win_rates"]["reward"]["best-of-2"]["mean"]))
        for policy in results["policies"].values()
        if policy["method"] == "best-of-n"
    ]
    expected = matched(points, at["kl"], lambda kl: theory(kl) - 0.5)
    found = at["win_rates"]["reward"]["best-of-2"]["best-of-n"]
    assert found["mean"] == pytest.approx(expected.values[0])
    assert found["high"] - found["low"] > abs(expected.shift) > 0
    assert at["theory"]["best-of-2"]["best-of-n"] == pytest.approx(theory(at["kl"]))


def test_numbers_tables_and_figures_are_kept(finished: dict[str, Any]) -> None:
    """The folder holds every number as JSON, the tables as Markdown and a figure by each judge."""
    folder, results = finished["root"] / "run" / "compare", finished["results"]
    assert json.loads((folder / "comparison.json").read_text()) == results
    text = (folder / "comparison.md").read_text()
    for name, policy in results["policies"].items():
        if cost := policy.get("cost"):
            assert re.search(rf"\| {name} \|.*\| {cost['generated_tokens']:,} \| {cost['seconds']:,.1f} \|", text)
        assert f"{100 * policy['win_rates']['judge']['best-of-2']['mean']:.1f} (" in text
    for judge in results["judges"]:
        assert (folder / f"win-rate-by-kl-{judge}.png").read_bytes().startswith(b"\x89PNG")
        svg = (folder / f"win-rate-by-kl-{judge}.svg").read_text()
        assert all(method in svg for method in results["methods"])
        assert ("theory, optimal" in svg) == (judge == "reward")


class Told(Comparison):
    """A comparison that is told what each policy spends and wins, for every one of four prompts, served once."""

    def __init__(self, policies: MethodPolicies, told: dict[str, tuple[float, float]]) -> None:
        self.policies, self.recipe, self.served = policies, policies.recipe, [Standard()]
        self.evaluated = replace(ScoredSamples.of(policies.recipe, Layout(Path())), sources=("reward",))
        self.kls = {name: np.full(4, kl) for name, (kl, _) in told.items()}
        self.wins = {name: {"reward": {"standard": np.full(4, won)}} for name, (_, won) in told.items()}


def test_a_method_that_spends_far_less_or_far_more_is_left_out(tmp_path: Path) -> None:
    """One that spends a quarter more stays and is marked; two at the ends are named with what they spend."""
    policies = MethodPolicies(recipe(tmp_path), ["qrpo", "qrpo-identity", "ipo", "resample", "qrpo-raw"], [0.5])
    spent = {"qrpo-0.5": 0.1, "qrpo-identity-0.5": 0.5, "ipo-0.5": 0.5, "resample-0.5": 0.62, "qrpo-raw-0.5": 0.63}
    at = Told(policies, {name: (kl, 0.6) for name, kl in spent.items()}).at_budget(0.5)
    assert at["left_out"] == pytest.approx({"qrpo": 0.1})
    assert at["not_bracketed"] == pytest.approx({"resample": 0.62, "qrpo-raw": 0.63})
    assert at["kl"] == at["median"] == 0.5
    assert at["win_rates"]["reward"]["standard"].keys() == {"qrpo-identity", "ipo", "resample"}
    spent["qrpo-0.5"] = 0.4  # near enough to be waited for
    assert Told(policies, {name: (kl, 0.6) for name, kl in spent.items()}).at_budget(0.5)["kl"] == pytest.approx(0.4)


def test_the_tables_say_where_a_method_is_missing_and_who_is_favored(finished: dict[str, Any]) -> None:
    """A method that is left out is named with its KL, and a gain comes with what the choice of the baseline does."""
    results = finished["results"]
    points = {"mean": 0.02, "low": -0.01, "high": 0.05}
    one = {"baseline": "ipo", "gain": {"qrpo": points}}
    at = results["matched"][-1] | {
        "left_out": {"bond": 0.031},
        "not_bracketed": {"maxk": 1.9, "best-of-n": 0.3},
        "gains": {judge: dict.fromkeys(results["procedures"], one) for judge in results["judges"]},
    }
    *_, methods, _, gains = make_sheets(results | {"matched": [at]})  # by the reward, by the judge
    assert "spending less than 1/4 of this: bond (0.03 nats)." in methods.to_markdown()
    assert "| maxk | not bracketed: spent at least 1.90 nats | – | – | – |" in methods.to_markdown()
    assert "by extrapolation over less than 1.25: best-of-n (at least 0.30 nats)." in methods.to_markdown()
    assert "which favors it a little" in gains.to_markdown()
    assert "| baseline | ipo | ipo | ipo |" in gains.to_markdown()
    assert "| qrpo | +2.0 (−1.0 to +5.0) |" in gains.to_markdown()


def test_best_of_n_itself_is_no_baseline(tmp_path: Path) -> None:
    """It wins more than any here, but it is not trained: gains are over the best of the trained."""
    policies = MethodPolicies(recipe(tmp_path), ["qrpo", "ipo", "qrpo-identity", "best-of-n"], [0.5])
    won = {"qrpo-0.5": 0.7, "ipo-0.5": 0.6, "qrpo-identity-0.5": 0.65, "best-of-2": 0.9}
    at = Told(policies, {name: (0.5, rate) for name, rate in won.items()}).at_budget(0.5)
    gains = at["gains"]["reward"]["standard"]
    assert gains["baseline"] == "qrpo-identity"
    assert gains["gain"]["qrpo"] == pytest.approx({"mean": 0.05, "low": 0.05, "high": 0.05})


def test_a_policy_that_ran_away_has_no_place_in_theory_and_the_table_says_why(finished: dict[str, Any]) -> None:
    """Beyond the largest KL whose optimum is known the numbers are absent, and the others of the table stay."""
    won = {"mean": 0.9, "low": 0.8, "high": 0.95}
    lost = place_in_theory(won, won, WorstOfN(4), 1000.0)
    assert {lost[name] for name in ("identity", "optimum", "share", "efficiency")} == {None}
    assert "1000 nats" in lost["none"]
    results = finished["results"]
    name, *_ = results["policies"]
    runaway = {"captured": lost, "kl": {"mean": 1000.0, "low": 1000.0, "high": 1000.0}}
    policies = results["policies"] | {name: results["policies"][name] | runaway}
    text = "\n".join(sheet.to_markdown() for sheet in make_sheets(results | {"policies": policies}))
    assert f"{name} spent 1e+03 nats, for which there is no theory: {lost['none']}" in text
