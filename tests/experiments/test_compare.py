"""Several methods compared in one run directory: what is shared, what is counted, what is written."""

import csv
import io
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import micro
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from infalign.core.errors import ConfigError
from infalign.core.storage import write_table
from infalign.evaluation.matched import matched
from infalign.experiments.compare import _matched, compare_methods, placed_in_theory
from infalign.experiments.comparison_tables import sheets
from infalign.experiments.methods import (
    METHODS,
    Compared,
    aware_transform,
    bracketing_budgets,
    nearest_n,
    possible_methods,
)
from infalign.method.calibration import win
from infalign.method.procedures import BestOfN, Standard, WorstOfN, parse_procedure
from infalign.method.transforms import Identity, Log, parse_transform
from infalign.pipeline.pending import pending
from infalign.recipe.layout import Layout
from infalign.recipe.reading import load_recipe
from infalign.recipe.settings import Recipe
from infalign.report.evaluated import Evaluated
from infalign.steps import whole_run
from infalign.steps.run import Run
from infalign.theory.choose import rank
from infalign.theory.law import law_at_kl
from infalign.theory.optimum import optimal
from infalign.training.solvers import read_solver
from infalign.training.solvers.base import Guide, Side

FIRST, BUDGETS = ["qrpo", "bon-sft", "ipo"], [0.1, 0.2]  # both budgets are nearest to the best of two


def recipe(root: Path, *overrides: str) -> Recipe:
    """Return a recipe whose run trains an offline and an on-policy policy and takes the gold for its judge."""
    root.mkdir(parents=True, exist_ok=True)
    settings = micro.settings(root / "run") | {"judge": micro.GOLD}
    del settings["policies"]["plain"], settings["gold"]
    settings["procedure"] = "best-of-2"
    for policy in settings["policies"].values():
        policy["fit"] = policy["fit"] | {"epochs": 4, "learning_rate": 1e-2}  # enough to spend the budgets
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
    """Return a run, a comparison in its directory and one with another method: numbers, units done, files before."""
    root = tmp_path_factory.mktemp("compare")
    whole_run.run_recipe(recipe(root), console=Console(file=io.StringIO()))
    before = contents(root / "run")
    first, done_first = compare(root, FIRST)
    results, done = compare(root, [*FIRST, "rloo", "best-of-n"], [0.2])
    final, done_final = compare(root, [*FIRST, "rloo", "best-of-n"])
    return {
        "root": root,
        "before": before,
        "first": first,
        "done": [done_first, done, done_final],
        "narrow": results,
        "results": final,
        "budgets": {
            0.1: ["qrpo-0.1", "bon-sft-n2", "ipo-0.1", "rloo-0.1", "best-of-2"],
            0.2: ["qrpo-0.2", "bon-sft-n2", "ipo-0.2", "rloo-0.2", "best-of-2"],
        },
    }


def samples(root: Path, name: str, column: str) -> np.ndarray:
    """Return a column of a model's evaluation, prompts × samples."""
    table = pq.read_table(root / "run" / "evaluation" / name / "scores.parquet")
    return table[column].to_numpy().reshape(6, 8)


def test_a_comparison_trains_and_evaluates_its_own_policies_only(finished: dict[str, Any]) -> None:
    """All that the run has done is used, two budgets with one n share a policy; training prompts are sampled too."""
    names = ["qrpo-0.1", "qrpo-0.2", "bon-sft-n2", "ipo-0.1", "ipo-0.2"]
    works = [
        work
        for name in names
        for work in (f"train-{name}", *micro.evaluation(name), *micro.evaluation(f"{name}.train"))
    ]
    assert sorted(finished["done"][0]) == sorted([*works, "samples-reference.train", "evaluate-reference.train"])
    assert list(finished["first"]["policies"]) == names


def test_a_later_comparison_trains_only_what_is_new(finished: dict[str, Any]) -> None:
    """One more method costs its training and evaluation, one more budget as well, and nothing else."""
    for done, name in zip(finished["done"][1:], ("rloo-0.2", "rloo-0.1"), strict=True):
        assert sorted(done) == sorted([f"train-{name}", *micro.evaluation(name), *micro.evaluation(f"{name}.train")])


def test_the_run_itself_does_not_change(finished: dict[str, Any]) -> None:
    """Results, report, recipe and every record of the run are as before, and the run has nothing left to do."""
    assert {path: Path(path).read_bytes() for path in finished["before"]} == finished["before"]
    run = Run.of(recipe(finished["root"]))
    assert pending(whole_run.units(run), run.layout.root) == {}


@pytest.mark.parametrize("judge", ["reward", "judge"])
@pytest.mark.parametrize("served", ["standard", "best-of-2", "worst-of-2"])
def test_the_win_rates_follow_from_the_table_of_scores(finished: dict[str, Any], served: str, judge: str) -> None:
    """KL and win rate of a policy are recounted over all pairs of samples."""
    root, result = finished["root"], finished["results"]["policies"]["rloo-0.2"]
    pairs = [(i, j) for i in range(8) for j in range(8) if i != j]

    def shown(name: str) -> list[np.ndarray]:
        """Return, prompt by prompt, the judge's scores of what is served of each pair, or of each sample."""
        selected, judged = samples(root, name, "reward"), samples(root, name, judge)
        if served == "standard":
            return list(judged)
        s = selected if served == "best-of-2" else -selected
        return [np.array([q[i] if r[i] >= r[j] else q[j] for i, j in pairs]) for r, q in zip(s, judged, strict=True)]

    by_hand = [win(a[:, None], b).mean() for a, b in zip(shown("rloo-0.2"), shown("reference"), strict=True)]
    assert result["win_rates"][judge][served]["mean"] == pytest.approx(np.mean(by_hand))
    assert result["kl"]["mean"] == pytest.approx(samples(root, "rloo-0.2", "kl").mean())


def test_cost_is_counted_where_it_arises(finished: dict[str, Any]) -> None:
    """On-policy training generates tokens, at most twelve a response; offline training uses the shared rollouts."""
    results = finished["results"]
    costs = {name: policy["cost"] for name, policy in results["policies"].items() if "cost" in policy}
    assert all(costs[name]["generated_tokens"] == 0 for name in ("qrpo-0.1", "bon-sft-n2", "ipo-0.2"))
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
    """On test prompts the win rate is that of the table, and the share places it between identity and optimum."""
    for policy in finished["results"]["policies"].values():
        for split, found in policy.get("captured", {}).items():
            if split == "test":
                assert found["win_rate"] == pytest.approx(policy["win_rates"]["reward"]["best-of-2"])
                assert found["kl"] == pytest.approx(policy["kl"]["mean"])
            assert 0.5 < found["identity"] < found["optimum"]
            assert found["optimum"] == pytest.approx(optimal(BestOfN(2), kl=max(found["kl"], 1e-6)).win_rate)
            standard = law_at_kl(Identity(), kl=max(found["kl"], 1e-6)).win_rate(Standard())
            if split == "test":
                gain = policy["win_rates"]["reward"]["standard"]["mean"] - 0.5
                assert found["efficiency"]["mean"] == pytest.approx(gain / (standard - 0.5))
            if found["share"]:
                gap = found["optimum"] - found["identity"]
                assert found["win_rate"]["low"] == pytest.approx(found["identity"] + found["share"]["low"] * gap)


def test_methods_are_compared_at_a_kl_that_all_of_them_reach(finished: dict[str, Any]) -> None:
    """The KL is the median spent for a budget, or what all reach; the gain is the paired one over the best baseline."""
    results = finished["results"]
    spent: dict[str, list[float]] = {}
    for policy in results["policies"].values():
        spent.setdefault(policy["method"], []).append(policy["kl"]["mean"])
    reached = {method: max(kl) for method, kl in spent.items()}
    for at, names in zip(results["matched"], finished["budgets"].values(), strict=True):
        median = np.median([results["policies"][name]["kl"]["mean"] for name in names])
        near = {method for method, kl in spent.items() if max(kl) >= median / 4}
        assert at["left_out"].keys() == reached.keys() - near
        assert at["kl"] == pytest.approx(min(median, *(reached[m] for m in near)))
        least = {method: min(one for one in kl if one > 1e-3) for method, kl in spent.items()}  # who learnt anything
        kept = {method for method in near if least[method] <= 1.25 * at["kl"]}
        assert at["not_bracketed"].keys() == {method for method in spent if least[method] > at["kl"]}
        for judge, by_procedure in at["win_rates"].items():
            for procedure, found in by_procedure.items():
                assert found.keys() == kept
                gains = at["gains"][judge][procedure]
                if gains["baseline"]:
                    for method, e in gains["gain"].items():
                        difference = found[method]["mean"] - found[gains["baseline"]]["mean"]
                        assert e["mean"] == pytest.approx(difference)
    assert any(at["kl"] for at in results["matched"])


def test_between_budgets_the_share_of_theorys_gain_is_interpolated(finished: dict[str, Any]) -> None:
    """A method's win rate at the common KL is `evaluation.matched` of its policies, and theory is its own law's."""
    results = finished["results"]
    at = next(at for at in results["matched"] if at["kl"] and "best-of-n" in at["theory"]["best-of-2"])
    procedure = BestOfN(2)

    def theory(kl: float) -> float:
        return law_at_kl(Log(), kl=kl).win_rate(procedure)

    points = [
        (
            np.full(2, policy["kl"]["mean"]),
            np.full(2, policy["win_rates"]["reward"]["best-of-2"]["mean"]),
        )
        for policy in results["policies"].values()
        if policy["method"] == "best-of-n"
    ]
    expected = matched(points, at["kl"], lambda kl: theory(kl) - 0.5)
    found = at["win_rates"]["reward"]["best-of-2"]["best-of-n"]
    assert found["mean"] == pytest.approx(expected.values[0])
    assert found["high"] - found["low"] > abs(expected.shift) > 0
    assert at["theory"]["best-of-2"]["best-of-n"] == pytest.approx(theory(at["kl"]))


def test_numbers_tables_and_figures_are_kept(finished: dict[str, Any]) -> None:
    """The folder holds every number as JSON and CSV, the tables as Markdown and a figure by each judge."""
    folder, results = finished["root"] / "run" / "compare", finished["results"]
    assert json.loads((folder / "comparison.json").read_text()) == results
    rows = list(csv.DictReader((folder / "comparison.csv").read_text().splitlines()))
    assert len(rows) == len(results["policies"]) * len(results["judges"]) * 3
    for row in rows:
        policy = results["policies"][row["policy"]]
        assert float(row["win_rate"]) == policy["win_rates"][row["judge"]][row["procedure"]]["mean"]
        assert float(row["kl"]) == policy["kl"]["mean"]
    text = (folder / "comparison.md").read_text()
    for name, policy in results["policies"].items():
        if cost := policy.get("cost"):
            assert f"| {name} | {cost['generated_tokens']:,} | {cost['seconds']:,.1f} |" in text
        assert f"{100 * policy['win_rates']['judge']['best-of-2']['mean']:.1f} (" in text
    for judge in results["judges"]:
        assert (folder / f"win-rate-by-kl-{judge}.png").read_bytes().startswith(b"\x89PNG")
        svg = (folder / f"win-rate-by-kl-{judge}.svg").read_text()
        assert all(method in svg for method in results["methods"])
        assert ("theory, optimal" in svg) == (judge == "reward")


def test_a_method_that_spends_far_less_or_far_more_is_left_out(tmp_path: Path) -> None:
    """One that spends a quarter more stays and is marked; two at the ends are named with what they spend."""
    procedure = Standard()
    compared = Compared(recipe(tmp_path), ["qrpo", "qrpo-identity", "ipo", "resample", "ipo-averaged"], [0.5])
    spent = {"qrpo-0.5": 0.1, "qrpo-identity-0.5": 0.5, "ipo-0.5": 0.5, "resample-0.5": 0.62, "ipo-averaged-0.5": 0.63}
    kls = {name: np.full(4, kl) for name, kl in spent.items()}
    wins = {name: {"reward": {procedure.name: np.full(4, 0.6)}} for name in spent}
    evaluated = Evaluated.of(compared.recipe, Layout(tmp_path))
    at = _matched(compared, evaluated, [procedure], 0.5, kls, wins)
    assert at["left_out"] == pytest.approx({"qrpo": 0.1})
    assert at["not_bracketed"] == pytest.approx({"resample": 0.62, "ipo-averaged": 0.63})
    assert at["kl"] == at["median"] == 0.5
    assert at["win_rates"]["reward"]["standard"].keys() == {"qrpo-identity", "ipo", "resample"}


def test_further_budgets_bracket_the_median(tmp_path: Path) -> None:
    """Who spends more than half of the methods gets a smaller budget, who spends less a larger one, in proportion."""
    own = recipe(tmp_path, "rollout.k=64")
    compared = Compared(own, ["qrpo", "ipo", "rloo", "best-of-n"], [0.2, 0.4])
    spent = {"qrpo-0.2": 0.3, "qrpo-0.4": 0.6, "ipo-0.2": 0.1, "ipo-0.4": 0.15, "rloo-0.2": 0.19, "rloo-0.4": 0.5}
    spent |= {"best-of-2": 0.19}  # medians 0.19 and 0.345
    more = bracketing_budgets(own, compared, spent)
    assert more.keys() == {"qrpo", "ipo"}
    assert more["qrpo"] == pytest.approx([0.2 * 0.19 / 0.3 / 1.2], rel=0.01)
    assert more["ipo"] == pytest.approx([0.4 * 0.345 / 0.15 * 1.2], rel=0.01)
    wider = Compared(own, ["qrpo", "ipo", "rloo", "best-of-n"], [0.2, 0.4], more)
    assert [len(names) for names in wider.by_method.values()] == [3, 3, 2, 1]
    assert wider.by_budget == compared.by_budget
    further = [name for names in wider.by_method.values() for name in names if name not in spent]
    done = bracketing_budgets(own, wider, spent | {further[0]: 0.15, further[1]: 0.4})
    assert done == more


def test_no_further_budget_is_more_than_the_rollouts_can_spend(tmp_path: Path) -> None:
    """The KL of raw rewards over K rollouts is at most log K less the log of ties at the top."""
    own = recipe(tmp_path, "rollout.k=64")
    compared = Compared(own, ["qrpo-raw", "qrpo", "ipo"], [0.5])
    spent = {"qrpo-raw-0.5": 0.3, "qrpo-0.5": 0.5, "ipo-0.5": 0.5}
    layout = Layout(Path(own.run_dir))
    for ties, further in ((1, {"qrpo-raw": [1.0]}), (32, {})):
        rewards = np.sort(np.minimum(np.arange(64.0), 64 - ties))
        layout.root.mkdir(exist_ok=True)
        write_table(layout.calibrated, pa.table({"reference_rewards": [rewards.tolist()] * 2}))
        assert bracketing_budgets(own, compared, spent) == further


def test_the_tables_say_where_a_method_is_missing_and_who_is_favoured(finished: dict[str, Any]) -> None:
    """A method that is left out is named with its KL, and a gain comes with what the choice of the baseline does."""
    results = finished["results"]
    points = {"mean": 0.02, "low": -0.01, "high": 0.05}
    one = {"baseline": "ipo", "gain": {"qrpo": points}}
    at = results["matched"][-1] | {
        "left_out": {"bond": 0.031},
        "not_bracketed": {"maxk": 1.9, "best-of-n": 0.3},
        "gains": {judge: dict.fromkeys(results["procedures"], one) for judge in results["judges"]},
    }
    *_, methods, _, gains = sheets(results | {"matched": [at]})  # by the reward, by the judge
    assert "spending less than 1/4 of this: bond (0.03 nats)." in methods.markdown()
    assert "| maxk | not bracketed: spent at least 1.90 nats | – | – | – |" in methods.markdown()
    assert "by extrapolation over less than 1.25: best-of-n (at least 0.30 nats)." in methods.markdown()
    assert "which favours it a little" in gains.markdown()
    assert "| baseline | ipo | ipo | ipo |" in gains.markdown()
    assert "| qrpo | +2.0 (−1.0 to +5.0) |" in gains.markdown()


def test_best_of_n_itself_is_no_baseline(tmp_path: Path) -> None:
    """It wins more than any here, but it is not trained: gains are over the best of the trained."""
    compared = Compared(recipe(tmp_path), ["qrpo", "ipo", "qrpo-identity", "best-of-n"], [0.5])
    won = {"qrpo-0.5": 0.7, "ipo-0.5": 0.6, "qrpo-identity-0.5": 0.65, "best-of-2": 0.9}
    kls = {name: np.full(4, 0.5) for name in won}
    wins = {name: {"reward": {"standard": np.full(4, rate)}} for name, rate in won.items()}
    at = _matched(compared, Evaluated.of(compared.recipe, Layout(tmp_path)), [Standard()], 0.5, kls, wins)
    gains = at["gains"]["reward"]["standard"]
    assert gains["baseline"] == "qrpo-identity"
    assert gains["gain"]["qrpo"] == pytest.approx({"mean": 0.05, "low": 0.05, "high": 0.05})


def test_strengths_are_those_of_the_budget() -> None:
    """The n of Best-of-n is the one with the nearest KL; and no smaller than two."""
    for n in (2, 3, 17, 400):
        assert nearest_n(law_at_kl(parse_transform("log"), kl=np.log(n) - (n - 1) / n).kl) == n


def test_the_aware_transformation_is_the_best_that_has_a_name() -> None:
    """It is the first of `theory.choose` that a recipe can spell: steeper for larger N, negative for the worst."""
    for procedure in (BestOfN(4), WorstOfN(4), BestOfN(32)):
        first = [c.transform.name for c in rank(procedure, kl=0.5, rollouts=100).candidates]
        assert aware_transform(procedure, 0.5, 100) == next(name for name in first if not name.startswith("optimal"))
    rates = [parse_transform(aware_transform(BestOfN(n), 0.5, 100)).t for n in (2, 4, 32)]
    assert rates == sorted(rates)
    assert rates[0] < 8 < 50 < rates[2]


@pytest.mark.parametrize("served", ["best-of-4", "worst-of-2"])
def test_every_method_is_a_policy_of_the_recipe(tmp_path: Path, served: str) -> None:
    """Each solver accepts its settings at a budget, and the aware ones have the transformation for the procedure."""
    changed = recipe(tmp_path, f"procedure={served}", "rollout.k=8")
    trained = [method for method in METHODS if method != "best-of-n"]
    compared = Compared(changed, trained, [0.5]).recipe
    methods = dict(zip(trained, compared.policies.values(), strict=True))
    procedure = parse_procedure(served)
    assert isinstance(procedure, (BestOfN, WorstOfN))
    aware = {name for name, policy in methods.items() if policy.shaping.name == aware_transform(procedure, 0.5, 8)}
    assert aware == {"qrpo", "resample", "rloo", "ppo", "grpo"}
    assert methods["rloo"].fit == methods["bond"].fit == changed.policies["online"].fit
    assert methods["ipo"].fit == methods["grpo-once"].fit == changed.policies["aware"].fit
    assert methods["rloo"].generations == 4


def test_all_offline_methods_have_the_form_of_the_recipes_first(tmp_path: Path) -> None:
    """With a guide there all have it; what trains one language model takes the fit of the student instead."""
    changed = recipe(tmp_path, "rollout.k=8")
    student = read_solver(solver="distil", teacher="aware", fit={"learning_rate": 0.5})
    guided = changed.policies["aware"].model_copy(update={"guide": Guide(trunk="reward")})
    changed = changed.model_copy(update={"policies": {"student": student, "aware": guided}})
    offline, others = ["qrpo", "qrpo-raw", "resample", "ipo", "bon-sft", "bonbon"], ["grpo-once", "rloo"]
    found = Compared(changed, [*offline, *others], [0.5]).recipe.policies.values()
    fits = [(getattr(policy, "guide", None), policy.fit.learning_rate) for policy in found]
    own = (Guide(trunk="reward"), guided.fit.learning_rate)
    assert fits == [own] * len(offline) + [(None, 0.5), (None, 2.5 * 0.5)]


def test_methods_of_the_recipes_solver_have_its_loss(tmp_path: Path) -> None:
    """The guide and its loss belong together: without it the same network would learn another thing."""
    found = recipe(tmp_path)
    squared = {"guide": Guide(side=Side()), "loss": "squared"}
    found.policies["aware"] = found.policies["aware"].model_copy(update=squared)
    policies = Compared(found, ["qrpo", "qrpo-raw", "resample"], [0.2]).recipe.policies.values()
    assert [getattr(policy, "loss", None) for policy in policies] == ["squared", "squared", None]


def test_without_an_on_policy_policy_the_offline_fit_is_stretched(tmp_path: Path) -> None:
    """Three times the epochs and 2.5 times the learning rate; nothing else differs."""
    both = recipe(tmp_path)
    offline = both.model_copy(update={"policies": {"aware": both.policies["aware"]}})
    fit = Compared(offline, ["rloo"], [0.5]).recipe.policies["rloo-0.5"].fit
    own = both.policies["aware"].fit
    assert fit == own.model_copy(update={"epochs": 3 * own.epochs, "learning_rate": 2.5 * own.learning_rate})


def test_without_names_the_methods_are_those_that_the_recipe_has_settings_for(tmp_path: Path) -> None:
    """On-policy methods need an on-policy policy, and what is left out comes with its reason."""
    both = recipe(tmp_path)
    chosen, left_out = possible_methods(both, [0.5])
    assert [*METHODS] == sorted([*chosen, *left_out], key=[*METHODS].index)
    assert left_out.keys() == {"grpo-once"}
    assert "no multiple of rollout.k 6" in left_out["grpo-once"]
    offline = both.model_copy(update={"policies": {"aware": both.policies["aware"]}})
    chosen, left_out = possible_methods(offline, [0.5])
    assert set(chosen) == {name for name, method in METHODS.items() if not method.generates} - {"grpo-once"}
    assert "no on-policy policy" in left_out["bond"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "qpro"], "unknown method 'qpro'; did you mean qrpo?"),
        (["--methods", "zzz"], "unknown method 'zzz'; known: qrpo, "),
        (["--methods", "ipo-for-32"], "ipo has the same transformation for every N"),
        (["--kl-budgets", "0,1"], "KL budgets are [0.0, 1.0]; give positive numbers"),
        (["--kl-budgets", "a"], "--kl-budgets takes numbers such as 0.5,1, found 'a'"),
        (["--set", "procedure=standard"], "the recipe's procedure is standard; change procedure"),
        (["--methods", "bon-sft", "--kl-budgets", "2"], "needs a rollout.k of at least 19"),
    ],
)
def test_mistakes_are_one_sentence_before_any_work(main: Any, tmp_path: Path, words: list[str], said: str) -> None:
    """What cannot be compared is said with what would be possible, exit code 2, and the run directory is not made."""
    recipe(tmp_path)
    code, _, err = main("compare", tmp_path / "recipe.yaml", *words)
    assert code == 2
    assert err.startswith("infalign: ")
    assert err.count("\n") == 1
    assert said in err
    assert not (tmp_path / "run").exists()


def test_a_method_may_be_for_another_n(tmp_path: Path) -> None:
    """Its policy has the transformation that loses least for that N, under a name of its own beside the recipe's."""
    compared = Compared(recipe(tmp_path), ["qrpo", "qrpo-for-16"], [0.2])
    own, other = (compared.recipe.policies[name] for name in ("qrpo-0.2", "qrpo-for-16-0.2"))
    assert own.shaping.name == aware_transform(BestOfN(2), 0.2, 6)
    assert other.shaping.name == aware_transform(BestOfN(16), 0.2, 6) != own.shaping.name


def test_a_policy_of_the_recipe_is_not_overwritten(tmp_path: Path) -> None:
    """A name that the recipe gave to something else is refused."""
    own = recipe(tmp_path)
    taken = own.model_copy(update={"policies": own.policies | {"qrpo-1": read_solver(kl_budget=0.3)}})
    with pytest.raises(ConfigError, match="another policy of the name qrpo-1; rename it"):
        Compared(taken, ["qrpo"], [1.0])


def test_the_help_lists_the_methods(main: Any) -> None:
    """Each method is there with its line, and no line is wider than a terminal."""
    code, out, _ = main("compare", "--help")
    assert code == 0
    assert all(name in out and method.about in out for name, method in METHODS.items())
    assert max(map(len, out.splitlines())) <= 80


def test_by_default_methods_end_within_the_range_compared(finished: dict[str, Any]) -> None:
    """Without budgets, the KL of each budget lies between the KLs of two policies of every method that can have it."""
    console = Console(file=io.StringIO(), width=200)
    results = compare_methods(recipe(finished["root"]), methods=["qrpo", "ipo"], console=console)
    assert results["budgets"] == [0.5, 1.0]
    spent = {m: [p["kl"]["mean"] for p in results["policies"].values() if p["method"] == m] for m in ("qrpo", "ipo")}
    assert len(results["policies"]) > 4
    for at in results["matched"]:
        assert not at["not_bracketed"]
        assert all(min(kls) <= at["kl"] <= max(kls) for kls in spent.values())


def test_a_policy_that_ran_away_has_no_place_in_theory_and_the_table_says_why(finished: dict[str, Any]) -> None:
    """Beyond the largest KL whose optimum is known the numbers are absent, and the others of the table stay."""
    won = {"mean": 0.9, "low": 0.8, "high": 0.95}
    lost = placed_in_theory(won, won, WorstOfN(4), 400.0)
    assert {lost[name] for name in ("identity", "optimum", "share", "efficiency")} == {None}
    assert "known up to a KL of 160.1 nats" in lost["none"]
    results = finished["results"]
    name, *_ = results["policies"]
    runaway = {"kl": 400.0, "win_rate": won} | lost
    policies = results["policies"] | {name: results["policies"][name] | {"captured": {"test": runaway}}}
    text = "\n".join(sheet.markdown() for sheet in sheets(results | {"policies": policies}))
    assert f"{name} on test prompts spent 400 nats, for which there is no theory: the optimum for worst-of-4" in text
