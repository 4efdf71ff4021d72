"""All numbers of an evaluated run with their intervals, beside what theory gives."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from infalign.errors import DataError
from infalign.evaluation.diagnostics import uniformity
from infalign.evaluation.intervals import estimate
from infalign.evaluation.length import length_controlled
from infalign.evaluation.matched import matched
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import rewind_draws, tie_rate, win_rates_of
from infalign.method.calibration import Array, calibrate
from infalign.method.procedures import BestOfN, Procedure, RewindAndRepeat, Standard, WorstOfN, parse_procedure
from infalign.progress import OnProgress
from infalign.runs.layout import Layout
from infalign.runs.recipe import Policy, Recipe
from infalign.runs.stages.evaluate import samples_of
from infalign.runs.stages.laws import method_law, policy_beta
from infalign.runs.stages.models import reward_names
from infalign.storage import write_text


def write_results(recipe: Recipe, root: Path, *, on_progress: OnProgress) -> dict[str, Any]:
    """Write ``results.json`` and return its headline numbers.

    Responses are selected by ``reward``, as they would be when served, and judged by each reward source in turn. With
    ``reward`` itself as the judge the numbers compare with the theory; the judge and the gold say what was gained.
    """
    sources = reward_names(recipe)
    base = {source: samples_of(recipe, root, "reference", source) for source in sources}
    reference = Samples(base["reward"], base["reward"])
    rewind = parse_procedure(recipe.evaluate.rewind)
    assert isinstance(rewind, RewindAndRepeat)
    aim, served = parse_procedure(recipe.procedure), procedures(recipe)
    base_length = samples_of(recipe, root, "reference", "length")
    policies: dict[str, Any] = {}
    aimed: dict[str, dict[str, Array]] = {}  # win rates under the recipe's procedure
    for step, (name, policy) in enumerate(recipe.policies.items()):
        on_progress(step, len(recipe.policies), name)
        own = {source: samples_of(recipe, root, name, source) for source in sources}
        wins = wins_of(recipe, root, name, served)
        aimed[name] = {source: by_procedure[recipe.procedure] for source, by_procedure in wins.items()}
        kl = samples_of(recipe, root, name, "kl")
        length = samples_of(recipe, root, name, "length")
        pairs = {
            source: (
                Samples(own["reward"], own[source], length),
                Samples(base["reward"], base[source], base_length),
            )
            for source in sources
        }
        draws = rewind_draws(Samples(own["reward"], own["reward"]), reference, rewind)
        policies[name] = {
            "method": policy.method,
            "transform": policy.transform,
            "solver": policy.solver,
            "kl_budget": policy.kl_budget,
            "beta": policy_beta(recipe, root, name),
            "kl": estimated(recipe, kl.mean(axis=1)),
            "kl_per_token": float(kl.sum() / length.sum()),
            "length": estimated(recipe, length.mean(axis=1)),
            "rewind_draws": estimated(recipe, draws),
            "win_rates": {
                source: {procedure: estimated(recipe, values) for procedure, values in by_procedure.items()}
                for source, by_procedure in wins.items()
            },
            "at_equal_length": {source: _at_equal_length(recipe, *pairs[source], aim) for source in sources},
            "ties": {source: estimated(recipe, tie_rate(*pairs[source])) for source in sources},
            "theory": _theory(recipe, policy, float(kl.mean())),
        }
    selected = base["reward"]
    half = selected.shape[1] // 2
    check = calibrate(selected[:, half:], np.sort(selected[:, :half], axis=1))
    results = {
        "procedure": recipe.procedure,
        "confidence": recipe.evaluate.confidence,
        "prompts": len(selected),
        "samples": recipe.evaluate.samples,
        "judges": sources,
        "policies": policies,
        "matched": _matched(recipe, root, aimed),
        "pareto": {
            source: {name: _pareto(policies, source, name) for name in drawn_procedures(recipe)} for source in sources
        },
        "base": {
            "length": estimated(recipe, base_length.mean(axis=1)),
            "rewind_draws": estimated(recipe, rewind_draws(reference, reference, rewind)),
            "calibrated_mean": estimated(recipe, check.mean(axis=1)),
            "distance_from_uniform": uniformity(check),
        },
    }
    write_text(Layout(root).results, json.dumps(results, indent=1))
    return {name: p["win_rates"]["judge"][recipe.procedure] for name, p in policies.items()}


def wins_of(recipe: Recipe, root: Path, name: str, served: Sequence[Procedure]) -> dict[str, dict[str, Array]]:
    """Return a policy's win rates against the reference, both served alike: by judge and procedure's name, (P,) each.

    Responses are selected by ``reward`` and judged by each reward source of the recipe.
    """
    found: dict[str, dict[str, Array]] = {}
    for judge in reward_names(recipe):
        policy, base = (
            Samples(samples_of(recipe, root, model, "reward"), samples_of(recipe, root, model, judge))
            for model in (name, "reference")
        )
        rates = win_rates_of(policy, base, served)
        found[judge] = dict(zip((procedure.name for procedure in served), rates, strict=True))
    return found


def procedures(recipe: Recipe) -> list[Procedure]:
    """Return what is evaluated: standard, Best- and Worst-of-N for every N up to max_n, rewind, the recipe's aim."""
    many = range(2, recipe.evaluate.max_n + 1)
    named = [parse_procedure(name) for name in (recipe.evaluate.rewind, recipe.procedure)]
    found: list[Procedure] = [Standard(), *map(BestOfN, many), *map(WorstOfN, many), *named]
    return list({procedure.name: procedure for procedure in found}.values())


def drawn_procedures(recipe: Recipe) -> list[str]:
    """Return the procedures whose win rates are drawn against KL: the recipe's aim first, standard, rewind."""
    return list(dict.fromkeys([recipe.procedure, "standard", recipe.evaluate.rewind]))


def _at_equal_length(
    recipe: Recipe, policy: Samples, base: Samples, procedure: Procedure
) -> dict[str, float] | dict[str, str]:
    """Return the length-controlled win rate with its interval, or why there is none."""
    try:
        return estimated(recipe, length_controlled([(policy, base)], procedure))
    except DataError as error:
        return {"none": str(error)}


def _pareto(policies: dict[str, Any], judge: str, procedure: str) -> list[str]:
    """Return the policies that no other beats in win rate at the same or a smaller KL, by ascending KL."""
    points = sorted((p["kl"]["mean"], -p["win_rates"][judge][procedure]["mean"], name) for name, p in policies.items())
    front: list[str] = []
    most = 0.5  # the reference itself
    for _, loss, name in points:
        if -loss > most:
            front.append(name)
            most = -loss
    return front


def _theory(recipe: Recipe, policy: Policy, kl: float) -> dict[str, float] | None:
    """Return what the method would reach at this KL if it were free for every prompt; None where theory has no law."""
    procedure = parse_procedure(recipe.procedure)
    law = method_law(policy.solver, policy.transform, procedure, max(kl, 1e-6))
    if law is None:
        return None
    return {"kl": kl, "standard": law.win_rate(Standard()), recipe.procedure: law.win_rate(procedure)}


def _theoretical_gain(recipe: Recipe, policy: Policy, kl: float) -> float:
    """Return theory's gain at a KL; for a method without a law the identity's, which only shapes the interpolation."""
    known = _theory(recipe, policy, kl) or _theory(recipe, Policy(kl_budget=1.0), kl)
    assert known is not None
    return known[recipe.procedure] - 0.5


def _matched(recipe: Recipe, root: Path, wins: dict[str, dict[str, Array]]) -> dict[str, Any] | None:
    """Return the win rates of every method at one KL, the largest that all reach, and their paired differences.

    Along one method's budgets the win rate is interpolated (`evaluation.matched`).
    """
    methods: dict[str, list[str]] = {}
    for name, policy in recipe.policies.items():
        methods.setdefault(policy.method, []).append(name)
    if len(methods) < 2:
        return None
    kls = {name: samples_of(recipe, root, name, "kl").mean(axis=1) for name in recipe.policies}
    kl = min(max(float(kls[name].mean()) for name in names) for names in methods.values())
    gains = {method: partial(_theoretical_gain, recipe, recipe.policies[names[0]]) for method, names in methods.items()}
    rows: dict[str, Any] = {}
    for judge in reward_names(recipe):
        values = {
            method: matched([(kls[name], wins[name][judge]) for name in names], kl, gains[method])
            for method, names in methods.items()
        }
        first, *others = values
        rows[judge] = {
            "win_rates": {method: estimated(recipe, v) for method, v in values.items()},
            "gain_over": {other: estimated(recipe, values[first] - values[other]) for other in others},
        }
    laws = {method: _theory(recipe, recipe.policies[names[0]], kl) for method, names in methods.items()}
    theory = {method: law[recipe.procedure] for method, law in laws.items() if law is not None}
    return {"kl": kl, "first": next(iter(methods)), "judges": rows, "theory": theory}


def estimated(recipe: Recipe, values: Array) -> dict[str, float]:
    """Return the mean over prompts with its interval, by the recipe's confidence and seed."""
    return estimate(values, confidence=recipe.evaluate.confidence, seed=recipe.seed).as_dict()


def read_results(root: Path) -> dict[str, Any]:
    """Return the numbers that `summarise` wrote."""
    return dict(json.loads(Layout(root).results.read_text()))
