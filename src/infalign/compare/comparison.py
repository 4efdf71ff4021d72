"""Methods trained from one run directory, on the same rollouts, and compared at the same KL."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from rich.console import Console

from infalign.compare.methods import BEST_OF_N, extreme_procedure, read_method
from infalign.compare.policies import MethodPolicies, check_budgets, possible_methods
from infalign.compare.tables import draw_win_rates, make_sheets
from infalign.core.errors import ConfigError
from infalign.core.storage import write_text
from infalign.evaluation.best_of_n import best_of_n_kl, best_of_n_kl_bound
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import win_rates_of
from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN, Served, Standard, WorstOfN, is_extreme, of_best
from infalign.method.transforms import Identity
from infalign.pipeline.ownership import claim
from infalign.pipeline.records import records
from infalign.pipeline.units import Unit
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.report.equal_kl import AtOneKL, Matched
from infalign.report.scored_samples import ScoredSamples
from infalign.sampling.prompts import PromptTable
from infalign.sampling.rollouts import read_rollouts
from infalign.steps import whole_run
from infalign.steps.evaluate import evaluations
from infalign.steps.run import Run
from infalign.theory.law import law_at_kl
from infalign.theory.optimum import optimal
from infalign.training.solvers.base import Solver

Numbers = dict[str, Any]
Wins = dict[str, dict[str, Array]]  # win rates (P,) by judge and name of the procedure
ROUNDS = 2  # of further budgets
MIN_GAP = 0.002  # between the win rates of identity and optimum; a share of a smaller gap is meaningless


def compare_methods(
    recipe: Recipe, *, methods: Sequence[str] | None = None, budgets: Sequence[float] | None = None, console: Console
) -> Numbers:
    """Train each of the methods (`read_method`) at each KL budget in the recipe's run directory; return all numbers.

    By default ``methods`` are all for which the recipe's own policies give the settings. Offline methods take fit and
    guide of the recipe's first offline policy, methods that generate the fit of its first on-policy policy; without
    one, three times the epochs and 2.5 times the learning rate of a policy without a guide. Finished work is not
    repeated; the run's results, report and recipe do not change.

    Without ``budgets`` they are `policies.BUDGETS`, and a method all of whose policies spend more, or less, than half
    of the methods do for a budget gets a further budget of its own on the other side, in up to `ROUNDS` rounds.

    The numbers are stored in the folder ``compare`` of the run directory: comparison.json and .md, and the win rates
    against KL by each judge as .svg and .png. Raises ConfigError for an unknown method, a budget that is not
    positive, a procedure other than best-of-N or worst-of-N, and settings that a method cannot have.
    """
    policies = choose_policies(recipe, methods, budgets, console)
    policies = train_methods(policies, rounds=ROUNDS if budgets is None else 0, console=console)
    results = Comparison(policies).measure()
    folder = Path(recipe.run_dir) / "compare"
    figures = [f"win-rate-by-kl-{judge}{ending}" for judge in results["judges"] for ending in (".svg", ".png")]
    claim(folder, ("comparison.json", "comparison.md", *figures))
    write_text(folder / "comparison.json", json.dumps(results, indent=1))
    write_text(folder / "comparison.md", "\n".join(sheet.to_markdown() for sheet in make_sheets(results)))
    for judge in results["judges"]:
        draw_win_rates(results, judge, folder)
    return results


def choose_policies(
    recipe: Recipe, methods: Sequence[str] | None, budgets: Sequence[float] | None, console: Console
) -> MethodPolicies:
    """Return the policies of a comparison, and print which methods are left out. Raises as `compare_methods`."""
    extreme_procedure(recipe)
    budgets = check_budgets(budgets)
    left_out: Mapping[str, str] = {}
    if methods is None:
        methods, left_out = possible_methods(recipe, budgets)
    for name, reason in left_out.items():
        console.print(f"left out: {name}: {reason}", highlight=False, soft_wrap=True)
    return MethodPolicies(recipe, list(dict.fromkeys(methods)), budgets)


def comparison_units(run: Run) -> list[Unit]:
    """Return the units of a comparison: all up to the policies, and their evaluation."""
    return [*whole_run.units(run, until="train"), *evaluations(run)]


def train_methods(policies: MethodPolicies, *, rounds: int = ROUNDS, console: Console) -> MethodPolicies:
    """Train the policies and evaluate them. Return them with those of further budgets.

    In up to ``rounds`` rounds a method that has policies on one side only of the median KL for a budget gets another.
    """
    while True:
        with whole_run.open_run(policies.recipe) as run:
            # The results, report and recorded recipe of the run are not overwritten: they may be for other policies.
            whole_run.do_units(run, comparison_units(run), until="evaluate", console=console)
        if not rounds:
            return policies
        evaluated = ScoredSamples.of(policies.recipe, run.layout)
        kls = {name: float(evaluated.kl(name).mean()) for name in policies.recipe.policies}
        wider = policies.bracketed(kls | {name: best_of_n_kl_bound(n) for name, n in policies.best_of_n.items()})
        if wider.recipe.policies.keys() == policies.recipe.policies.keys():
            return policies
        policies, rounds = wider, rounds - 1


class Comparison:
    """The evaluated policies of some methods.

    All intervals are over test prompts. Responses are selected by ``reward`` and judged by each reward source in turn.
    """

    def __init__(self, policies: MethodPolicies) -> None:
        recipe, n = policies.recipe, extreme_procedure(policies.recipe).n
        self.policies, self.recipe, self.layout = policies, recipe, Layout(Path(recipe.run_dir))
        self.evaluated, self.records = ScoredSamples.of(recipe, self.layout), records(self.layout.root)
        self.served: list[Served] = [Standard(), BestOfN(n), WorstOfN(n)]
        self.kls = {name: self.evaluated.kl(name) for name in recipe.policies}
        self.wins: dict[str, Wins] = {name: self.evaluated.wins(name, self.served) for name in recipe.policies}
        for name, n in policies.best_of_n.items():
            self.kls[name], self.wins[name] = serve_best_of_n(recipe, self.evaluated, n, self.served)

    def measure(self) -> Numbers:
        """Return win rates, KL and cost of every policy, and the comparison of the methods at the KL of each budget."""
        recipe, methods = self.recipe, self.policies.by_method
        return {
            "procedure": recipe.procedure.name,
            "procedures": [procedure.name for procedure in self.served],
            "judges": list(self.evaluated.sources),
            "seed": recipe.seed,
            "confidence": recipe.evaluate.confidence,
            "prompts": recipe.evaluate.prompts,
            "samples": recipe.evaluate.samples,
            "budgets": list(self.policies.budgets),
            "methods": {name: read_method(name).about for name in methods},
            "policies": {name: self._policy(name, method) for method, names in methods.items() for name in names},
            "shared_cost": self._shared_cost(),
            "matched": [self.at_budget(budget) for budget in self.policies.budgets],
        }

    def _policy(self, name: str, method: str) -> Numbers:
        """Return what a policy spends, wins and costs, and how much of theory's gain it achieves."""
        wins = {
            judge: {procedure: self.evaluated.intervals.of_shares(values) for procedure, values in rates.items()}
            for judge, rates in self.wins[name].items()
        }
        found: Numbers = {"method": method, "kl": self.evaluated.intervals.of(self.kls[name]), "win_rates": wins}
        if name in self.policies.best_of_n:
            n = self.policies.best_of_n[name]
            return found | {"n": n, "kl_bound": best_of_n_kl_bound(n)}
        policy, record = self.recipe.policies[name], self.records[f"train-{name}"]
        procedure, kl = self.evaluated.procedure, max(found["kl"]["mean"], 1e-6)
        by_reward = wins["reward"]
        return found | {
            "settings": policy.model_dump(mode="json", exclude_defaults=True),
            "cost": training_cost(record, policy),
            "captured": place_in_theory(by_reward[procedure.name], by_reward["standard"], procedure, kl),
        }

    def _shared_cost(self) -> Numbers:
        """Return the cost of the rollouts that all methods share: responses, tokens, seconds until they are ranked."""
        tokens, k, parts = 0, self.recipe.rollout.k, Run.of(self.recipe).rollout_parts
        for part, table in enumerate(parts):
            rollouts = read_rollouts(self.layout.rollouts(part), table.read().prompt_ids, k)
            tokens += pc.sum(pc.list_value_length(rollouts["token_ids"])).as_py()
        names = [f"{work}-{part}" for work in ("rollout", "score") for part in range(len(parts))]
        return {
            "responses": k * self.records["calibrate"]["summary"]["prompts"],
            "generated_tokens": tokens,
            "seconds": round(sum(self.records[name]["seconds"] for name in [*names, "calibrate"]), 2),
        }

    def at_budget(self, budget: float) -> Numbers:
        """Return the methods at the median KL spent for a budget, with win rates, theory and gains.

        Between a method's budgets the win rate is interpolated, and the intervals contain the error of that. Methods
        that are not comparable (`AtOneKL`) have no win rate.
        """
        median = float(np.median([self.kls[name].mean() for name in self.policies.by_budget[budget]]))
        at = AtOneKL.of(self.policies.by_method, self.kls, self.policies.law_at, median=median)
        found: Numbers = {"budget": budget, "median": at.median, "left_out": at.left_out, "kl": at.kl}
        found |= {"not_bracketed": at.not_bracketed, "win_rates": {}, "theory": {}, "gains": {}}
        if at.kl is None:
            return found
        found["theory"] = at.theory(self.served)
        for judge in self.evaluated.sources:
            matched = {
                served.name: at.win_rates({name: won[judge][served.name] for name, won in self.wins.items()}, served)
                for served in self.served
            }
            found["gains"][judge] = {served: self._gains(methods) for served, methods in matched.items()}
            found["win_rates"][judge] = {
                served: {method: m.estimate(self.evaluated.intervals) for method, m in methods.items()}
                for served, methods in matched.items()
            }
        return found

    def _gains(self, found: Mapping[str, Matched]) -> Numbers:
        """Return the trained baseline with the highest mean, and how far each of our methods is above it, by prompt."""
        ours = [method for method in found if read_method(method).ours]
        baselines = [method for method in found if method not in ours and method != BEST_OF_N]
        if not baselines:
            return {"baseline": None, "gain": {}}
        best = max(baselines, key=lambda method: float(found[method].values.mean()))
        return {"baseline": best, "gain": {m: found[m].gain_over(found[best], self.evaluated.intervals) for m in ours}}


def serve_best_of_n(recipe: Recipe, evaluated: ScoredSamples, n: int, served: Sequence[Served]) -> tuple[Array, Wins]:
    """Return the estimated KL (P,) of Best-of-n to the reference, and its win rates by judge and procedure.

    Served by a procedure that is not extreme, it is served once.
    """
    prompt_ids = PromptTable(evaluated.layout.prompts("test"), recipe.evaluate.prompts).read().prompt_ids
    rollouts = read_rollouts(evaluated.layout.evaluation("reference") / "samples", prompt_ids, evaluated.samples)
    reward = evaluated.column("reference", "reward")
    logprobs = rollouts["logprob"].to_numpy().reshape(-1, evaluated.samples)[evaluated.kept]
    kl = best_of_n_kl(reward, logprobs, n)
    half = reward.shape[1] // 2
    wins: Wins = {}
    for judge in evaluated.sources:
        judged = evaluated.column("reference", judge)
        ours, base = (Samples(reward[:, part], judged[:, part]) for part in (slice(half), slice(half, None)))
        inner = [of_best(p, n) if is_extreme(p) else BestOfN(n) for p in served]
        names = (procedure.name for procedure in served)
        wins[judge] = dict(zip(names, win_rates_of(ours, base, inner, served), strict=True))
    return kl, wins


def place_in_theory(won: Mapping[str, float], won_plain: Mapping[str, float], procedure: Served, kl: float) -> Numbers:
    """Return theory's win rates at a KL, which is treated as exact, and where win rates by the reward lie.

    ``efficiency`` is the standard win rate's gain over ½ (``won_plain``) relative to the largest possible at this KL,
    the identity's: KL spent on noise lowers it, and at small KL it is the correlation of log π/π_ref with the rank.
    ``share`` is (win rate − identity's) / (optimum's − identity's) of the procedure (``won``); None where these two are
    within `MIN_GAP` of each other. For a KL beyond that of any known optimum, as a policy that ran away has it, all are
    None, and ``none`` is the reason.
    """
    try:
        best, optimum = law_at_kl(Identity(), kl=kl), optimal(procedure, kl=kl).win_rate
    except ConfigError as error:
        return dict.fromkeys(("identity", "optimum", "share", "efficiency")) | {"none": str(error)}
    identity = best.win_rate(procedure)
    gap, gain = optimum - identity, best.win_rate(Standard()) - 0.5
    share = {end: (value - identity) / gap for end, value in won.items()} if gap > MIN_GAP else None
    efficiency = {end: (value - 0.5) / gain for end, value in won_plain.items()}
    return {"identity": identity, "optimum": optimum, "share": share, "efficiency": efficiency}


def training_cost(record: Numbers, policy: Solver) -> Numbers:
    """Return the generated tokens, seconds and peak memory in bytes of a training, from the record of its unit.

    TRL logs the mean completion length since the previous row; steps after the last row count with the overall mean.
    """
    history = record["summary"]["history"]
    rows = [row for row in history if "completions/mean_length" in row]
    tokens = 0.0
    if policy.generates:
        steps = np.diff([0, *(row["step"] for row in rows)])
        length = np.average([row["completions/mean_length"] for row in rows], weights=steps)
        tokens = float(length) * policy.fit.batch_size * history[-1]["step"] * policy.draws_per_response
    return {
        "generated_tokens": round(tokens),
        "seconds": record["seconds"],
        "peak_memory": history[-1]["train_peak_memory"],
    }
