"""Several methods trained from one run directory, on the same rollouts, and compared at the same KL."""

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from rich.console import Console

from infalign.core.errors import ConfigError
from infalign.core.storage import write_text
from infalign.evaluation.best_of_n import best_of_n_kl, best_of_n_kl_bound
from infalign.evaluation.matched import Matched, widened
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import win_rates, win_rates_of
from infalign.experiments.comparison_tables import as_csv, plot_win_rates, sheets
from infalign.experiments.methods import (
    ITSELF,
    Compared,
    bracketing_budgets,
    extreme_procedure,
    method_of,
    possible_methods,
)
from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN, Served, Standard, WorstOfN, is_extreme, of_best
from infalign.method.transforms import Identity, Log
from infalign.pipeline.ownership import claim
from infalign.pipeline.records import records
from infalign.pipeline.units import Unit
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.report.evaluated import Evaluated
from infalign.report.one_kl import AtOneKL
from infalign.sampling.prompts import Prompts
from infalign.sampling.rollouts import read_rollouts
from infalign.steps import whole_run
from infalign.steps.dry_run import print_plan
from infalign.steps.evaluate import evaluations_on
from infalign.steps.run import Run, rollout_parts
from infalign.theory.law import Law, law_at_kl
from infalign.theory.optimum import optimal
from infalign.training.solvers.base import Solver

Numbers = dict[str, Any]
Wins = Mapping[str, Mapping[str, Mapping[str, Array]]]  # win rates (P,) by policy, judge and name of the procedure
BUDGETS = (0.5, 1.0)  # nats, by default
SPLITS = ("train", "test")  # whose prompts policies are evaluated on
ROUNDS = 2  # of further budgets
LEAST_GAP = 0.002  # between the win rates of identity and optimum; a share of a smaller gap is meaningless


def compare_methods(
    recipe: Recipe, *, methods: Sequence[str] | None = None, budgets: Sequence[float] | None = None, console: Console
) -> Numbers:
    """Train each of the methods (`method_of`) at each KL budget in the recipe's run directory and return all numbers.

    By default ``methods`` are all for which the recipe's own policies give the settings. Offline methods take fit and
    guide of the recipe's first offline policy, methods that generate the fit of its first on-policy policy; without
    one, three times the epochs and 2.5 times the learning rate of a policy without a guide. Finished work is not
    repeated; the run's results, report and recipe do not change.

    Without ``budgets`` they are `BUDGETS`, and a method all of whose policies spend more, or less, than half of the
    methods do for a budget gets a further budget of its own on the other side, in up to `ROUNDS` rounds.

    The numbers are stored in the folder ``compare`` of the run directory: comparison.json, .csv and .md, and the win
    rates against KL by each judge as .svg and .png. Raises ConfigError for an unknown method, a budget that is not
    positive, a procedure other than best-of-N or worst-of-N, and settings that a method cannot have.
    """
    chosen, unique = _asked(recipe, methods, budgets, console)
    compared = train_methods(recipe, chosen, unique, rounds=ROUNDS if budgets is None else 0, console=console)
    results = measured_comparison(compared)
    folder = Path(recipe.run_dir) / "compare"
    pictures = (f"win-rate-by-kl-{judge}{ending}" for judge in results["judges"] for ending in (".svg", ".png"))
    claim(folder, ("comparison.json", "comparison.csv", "comparison.md", *pictures))
    write_text(folder / "comparison.json", json.dumps(results, indent=1))
    write_text(folder / "comparison.csv", as_csv(results))
    write_text(folder / "comparison.md", "\n".join(sheet.markdown() for sheet in sheets(results)))
    for judge in results["judges"]:
        plot_win_rates(results, judge, folder)
    return results


def print_comparison_plan(
    recipe: Recipe, *, methods: Sequence[str] | None, budgets: Sequence[float] | None, console: Console
) -> None:
    """Print what a comparison would do and cost, but for further budgets, which depend on the KL that is spent."""
    compared = Compared(recipe, *_asked(recipe, methods, budgets, console))
    print_plan(compared.recipe, console, partial(wanted_units, splits=SPLITS))


def _asked(
    recipe: Recipe, methods: Sequence[str] | None, budgets: Sequence[float] | None, console: Console
) -> tuple[list[str], tuple[float, ...]]:
    """Return the methods and budgets of a comparison, and print what is left out. Raises as `compare_methods`."""
    extreme_procedure(recipe)
    unique = checked_budgets(budgets)
    if methods is not None:
        return list(dict.fromkeys(methods)), unique
    chosen, left_out = possible_methods(recipe, unique)
    for name, reason in left_out.items():
        console.print(f"left out: {name}: {reason}", highlight=False, soft_wrap=True)
    return list(chosen), unique


def checked_budgets(budgets: Sequence[float] | None) -> tuple[float, ...]:
    """Return KL budgets, `BUDGETS` for None, in order. Raises ConfigError for one that is not positive."""
    given = BUDGETS if budgets is None else budgets
    if not given or not all(0 < budget < math.inf for budget in given):
        raise ConfigError(f"KL budgets are {list(given)}; give positive numbers of nats such as 0.5 and 1")
    return tuple(sorted(set(given)))


def train_methods(
    recipe: Recipe,
    methods: Sequence[str],
    budgets: Sequence[float],
    *,
    more: Mapping[str, Sequence[float]] | None = None,
    rounds: int = ROUNDS,
    splits: Sequence[str] = SPLITS,
    console: Console,
) -> Compared:
    """Train methods at each of some KL budgets, evaluate them on the prompts of ``splits``, and return their policies.

    ``more`` has further budgets by method. In up to ``rounds`` rounds a method that has policies on one side only of
    the median KL for a budget gets another.
    """
    compared = Compared(recipe, methods, budgets, more)
    _train_and_evaluate(compared, splits, console)
    for _ in range(rounds):
        wider = Compared(recipe, methods, budgets, bracketing_budgets(recipe, compared, _spent(compared)))
        if wider.recipe.policies.keys() == compared.recipe.policies.keys():
            break
        compared = wider
        _train_and_evaluate(compared, splits, console)
    return compared


def wanted_units(run: Run, splits: Sequence[str]) -> list[Unit]:
    """Return the units of a comparison: all up to the policies, and their evaluation on the prompts of ``splits``."""
    return [*whole_run.units(run, until="train"), *(unit for split in splits for unit in evaluations_on(run, split))]


def _train_and_evaluate(compared: Compared, splits: Sequence[str], console: Console) -> None:
    with whole_run.open_run(compared.recipe) as run:
        # The results, report and recorded recipe of the run are not overwritten: they may be for other policies.
        whole_run.do_units(run, wanted_units(run, splits), until="evaluate", console=console)


def _spent(compared: Compared) -> dict[str, float]:
    """Return the mean KL of every policy in nats; of Best-of-n itself the bound."""
    evaluated = Evaluated.of(compared.recipe, Layout(Path(compared.recipe.run_dir)))
    kls = {name: float(evaluated.kl(name).mean()) for name in compared.recipe.policies}
    return kls | {name: best_of_n_kl_bound(n) for name, n in compared.itself.items()}


def measured_comparison(compared: Compared) -> Numbers:
    """Return win rates, KL and cost of every policy, and the comparison of the methods at the KL of each budget.

    All intervals are over test prompts. Responses are selected by ``reward`` and judged by each reward source in turn.
    """
    recipe, layout = compared.recipe, Layout(Path(compared.recipe.run_dir))
    evaluated, n = Evaluated.of(recipe, layout), extreme_procedure(recipe).n
    served: list[Served] = [Standard(), BestOfN(n), WorstOfN(n)]
    made = records(layout.root)
    kls, wins = sampled(compared, evaluated, served)
    methods = {name: method for method, names in compared.by_method.items() for name in names}
    policies: Numbers = {
        name: {
            "method": method,
            "kl": evaluated.estimated(kls[name]),
            "win_rates": {
                judge: {procedure: evaluated.estimated_share(values) for procedure, values in rates.items()}
                for judge, rates in wins[name].items()
            },
        }
        for name, method in methods.items()
    }
    for name in policies.keys() & recipe.policies.keys():
        policy = recipe.policies[name]
        policies[name] |= {
            "settings": policy.model_dump(mode="json", exclude_defaults=True),
            "key": made[f"train-{name}"]["key"],
            "cost": training_cost(made[f"train-{name}"], policy),
            "captured": {split: _captured(evaluated, name, split) for split in SPLITS},
        }
    for name, n in compared.itself.items():
        policies[name] |= {"n": n, "kl_bound": best_of_n_kl_bound(n)}
    return {
        "procedure": recipe.procedure.name,
        "procedures": [procedure.name for procedure in served],
        "judges": list(next(iter(wins.values()))),
        "seed": recipe.seed,
        "confidence": recipe.evaluate.confidence,
        "prompts": recipe.evaluate.prompts,
        "samples": recipe.evaluate.samples,
        "budgets": list(compared.budgets),
        "methods": {name: method_of(name).about for name in compared.by_method},
        "policies": policies,
        "shared_cost": _shared_cost(recipe, layout, made),
        "matched": [_matched(compared, evaluated, served, budget, kls, wins) for budget in compared.budgets],
    }


def sampled(compared: Compared, evaluated: Evaluated, served: Sequence[Served]) -> tuple[dict[str, Array], Wins]:
    """Return the KL (P,) of every policy and of Best-of-n itself, and their win rates, served in each way."""
    names = list(compared.recipe.policies)
    kls = {name: evaluated.kl(name) for name in names}
    wins = {name: evaluated.wins(name, served) for name in names}
    for name, n in compared.itself.items():
        kls[name], wins[name] = served_itself(compared.recipe, evaluated, n, served)
    return kls, wins


def served_itself(
    recipe: Recipe, evaluated: Evaluated, n: int, served: Sequence[Served]
) -> tuple[Array, dict[str, dict[str, Array]]]:
    """Return the estimated KL (P,) of Best-of-n to the reference, and its win rates by judge and procedure.

    Served by a procedure that is not extreme, it is served once.
    """
    prompt_ids = Prompts.read(evaluated.layout.prompts("test"), recipe.evaluate.prompts).prompt_ids
    rollouts = read_rollouts(evaluated.layout.evaluation("reference") / "samples", prompt_ids, evaluated.samples)
    reward = evaluated.column("reference", "reward")
    kl = best_of_n_kl(reward, rollouts["logprob"].to_numpy().reshape(reward.shape), n)
    half = reward.shape[1] // 2
    wins: dict[str, dict[str, Array]] = {}
    for judge in evaluated.sources:
        judged = evaluated.column("reference", judge)
        ours, base = (Samples(reward[:, part], judged[:, part]) for part in (slice(half), slice(half, None)))
        inner = [of_best(p, n) if is_extreme(p) else BestOfN(n) for p in served]
        names = (procedure.name for procedure in served)
        wins[judge] = dict(zip(names, win_rates_of(ours, base, inner, served), strict=True))
    return kl, wins


def _captured(evaluated: Evaluated, name: str, split: str) -> Numbers:
    """Return how much of theory's gain a policy achieves on the prompts of a split, by the reward it was trained on.

    ``efficiency`` is the standard win rate's gain over ½ relative to the largest possible at this KL, the identity's:
    KL spent on noise lowers it, and at small KL it is the correlation of log π/π_ref with the rank. ``share`` is
    (win rate − identity's) / (optimum's − identity's) of the recipe's procedure; None where these two are within
    `LEAST_GAP` of each other. The policy's KL is treated as exact. For a KL beyond that of any known optimum, as a
    policy that ran away has it, there are None, and ``none`` is the reason.
    """
    procedure = evaluated.procedure
    own, base = (
        Samples(values, values)
        for values in (evaluated.column(model, "reward", split) for model in (name, "reference"))
    )
    kl = float(evaluated.kl(name, split).mean())
    won, won_plain = (evaluated.estimated_share(win_rates(own, base, served)) for served in (procedure, Standard()))
    return {"kl": kl, "win_rate": won} | placed_in_theory(won, won_plain, procedure, max(kl, 1e-6))


def placed_in_theory(won: Mapping[str, float], won_plain: Mapping[str, float], procedure: Served, kl: float) -> Numbers:
    """Return theory's win rates at a KL, and where win rates under a procedure and plainly lie; see `_captured`."""
    try:
        best, optimum = law_at_kl(Identity(), kl=kl), optimal(procedure, kl=kl).win_rate
    except ConfigError as error:
        return dict.fromkeys(("identity", "optimum", "share", "efficiency")) | {"none": str(error)}
    identity = best.win_rate(procedure)
    gap = optimum - identity
    return {
        "identity": identity,
        "optimum": optimum,
        "share": _placed(won, identity, gap) if gap > LEAST_GAP else None,
        "efficiency": _placed(won_plain, 0.5, best.win_rate(Standard()) - 0.5),
    }


def _placed(e: Mapping[str, float], start: float, length: float) -> Numbers:
    """Return an estimate with its interval, rescaled to 0 at ``start`` and 1 at ``start + length``."""
    return {end: (e[end] - start) / length for end in ("mean", "low", "high")}


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
        tokens = float(length) * policy.fit.batch_size * history[-1]["step"] * policy.draws
    return {
        "generated_tokens": round(tokens),
        "seconds": record["seconds"],
        "peak_memory": history[-1]["train_peak_memory"],
    }


def _shared_cost(recipe: Recipe, layout: Layout, made: Mapping[str, Numbers]) -> Numbers:
    """Return the cost of the rollouts that all methods share: responses, tokens, seconds of drawing and scoring."""
    tokens, parts = 0, rollout_parts(recipe, layout)
    for part, table in enumerate(parts):
        rollouts = read_rollouts(layout.rollouts(part), table.read().prompt_ids, recipe.rollout.k)
        tokens += pc.sum(pc.list_value_length(rollouts["token_ids"])).as_py()
    names = [f"{work}-{part}" for work in ("rollout", "score") for part in range(len(parts))]
    return {
        "responses": recipe.rollout.k * made["calibrate"]["summary"]["prompts"],
        "generated_tokens": tokens,
        "seconds": round(sum(made[name]["seconds"] for name in [*names, "calibrate"]), 2),
    }


def at_one_kl(compared: Compared, budget: float, kls: Mapping[str, Array]) -> AtOneKL:
    """Return the methods at the median KL spent for ``budget``: what a policy spends differs from its budget."""
    recipe = compared.recipe

    @cache
    def law_at(name: str, nats: float) -> Law | None:
        policy = recipe.policies.get(name)
        return law_at_kl(Log(), kl=nats) if policy is None else policy.law_at(recipe.procedure, nats)

    median = float(np.median([kls[name].mean() for name in compared.by_budget[budget]]))
    return AtOneKL.of(compared.by_method, kls, law_at, median=median)


def _matched(
    compared: Compared,
    evaluated: Evaluated,
    served: Sequence[Served],
    budget: float,
    kls: Mapping[str, Array],
    wins: Wins,
) -> Numbers:
    """Return the methods at the KL spent for ``budget`` (`AtOneKL`), with win rates, theory and gains.

    Between a method's budgets the win rate is interpolated, and the intervals contain the error of that. Methods that
    are not comparable have no win rate.
    """
    at = at_one_kl(compared, budget, kls)
    found: Numbers = {"budget": budget, "median": at.median, "left_out": at.left_out, "kl": at.kl}
    found |= {"not_bracketed": at.not_bracketed}
    if at.kl is None:
        return found | {"win_rates": {}, "theory": {}, "gains": {}}
    win_rates: Numbers = {}
    gains: Numbers = {}
    for judge in next(iter(wins.values())):
        values = {p.name: {method: _wins(at, method, wins, judge, p) for method in at.methods} for p in served}
        win_rates[judge] = {
            procedure: {
                method: widened(evaluated.estimated_share(m.values), m.shift, least=0.0)
                for method, m in by_method.items()
            }
            for procedure, by_method in values.items()
        }
        gains[judge] = {procedure: _gains(evaluated, by_method) for procedure, by_method in values.items()}
    laws = {method: known for method in at.methods if (known := at.law(method, at.kl)) is not None}
    theory = {p.name: {method: known.win_rate(p) for method, known in laws.items()} for p in served}
    return found | {"win_rates": win_rates, "theory": theory, "gains": gains}


def _wins(at: AtOneKL, method: str, wins: Wins, judge: str, procedure: Served) -> Matched:
    by_policy = {name: wins[name][judge][procedure.name] for name in at.methods[method]}
    return at.matched(method, by_policy, at.gain(method, procedure))


def _gains(evaluated: Evaluated, found: Mapping[str, Matched]) -> Numbers:
    """Return the trained baseline with the highest mean, and how far each of our methods is above it, by prompt."""
    baselines = [method for method in found if not method_of(method).ours and method != ITSELF]
    if not baselines:
        return {"baseline": None, "gain": {}}
    best = max(baselines, key=lambda method: float(found[method].values.mean()))
    gains = {
        method: widened(evaluated.estimated(m.values - found[best].values), m.shift, -found[best].shift)
        for method, m in found.items()
        if method_of(method).ours
    }
    return {"baseline": best, "gain": gains}
