"""All numbers of an evaluated run with their intervals, beside what theory gives."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from infalign.calibration import Array, calibrate
from infalign.config import Recipe
from infalign.data import write_text
from infalign.errors import DataError
from infalign.evaluation import (
    Samples,
    estimate,
    length_controlled,
    matched,
    rewind_draws,
    tie_rate,
    uniformity,
    win_rates_of,
)
from infalign.jobs import Report
from infalign.procedures import BestOfN, Procedure, RewindAndRepeat, Standard, WorstOfN, parse_procedure
from infalign.stages import Layout, policy_beta, reward_names, samples_of
from infalign.theory import law_at_kl
from infalign.transforms import parse_transform


def summarise(recipe: Recipe, root: Path, *, report: Report) -> dict[str, Any]:
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
    wins: dict[str, dict[str, dict[str, Array]]] = {}
    for step, (name, policy) in enumerate(recipe.policies.items()):
        report(step, len(recipe.policies), name)
        own = {source: samples_of(recipe, root, name, source) for source in sources}
        wins[name] = {
            source: dict(
                zip(
                    (procedure.name for procedure in served),
                    win_rates_of(Samples(own["reward"], own[source]), Samples(base["reward"], base[source]), served),
                    strict=True,
                )
            )
            for source in sources
        }
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
            "transform": policy.transform,
            "solver": policy.solver,
            "kl_budget": policy.kl_budget,
            "beta": policy_beta(policy),
            "kl": _estimate(recipe, kl.mean(axis=1)),
            "kl_per_token": float(kl.sum() / length.sum()),
            "length": _estimate(recipe, length.mean(axis=1)),
            "rewind_draws": _estimate(recipe, draws),
            "win_rates": {
                source: {procedure: _estimate(recipe, values) for procedure, values in by_procedure.items()}
                for source, by_procedure in wins[name].items()
            },
            "at_equal_length": {source: _at_equal_length(recipe, *pairs[source], aim) for source in sources},
            "ties": {source: _estimate(recipe, tie_rate(*pairs[source])) for source in sources},
            "theory": _theory(policy.transform, float(kl.mean()), recipe.procedure),
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
        "matched": _matched(recipe, root, wins),
        "pareto": {
            source: {name: _pareto(policies, source, name) for name in drawn_procedures(recipe)} for source in sources
        },
        "base": {
            "length": _estimate(recipe, base_length.mean(axis=1)),
            "rewind_draws": _estimate(recipe, rewind_draws(reference, reference, rewind)),
            "calibrated_mean": _estimate(recipe, check.mean(axis=1)),
            "distance_from_uniform": uniformity(check),
        },
    }
    write_text(Layout(root).results, json.dumps(results, indent=1))
    return {name: p["win_rates"]["judge"][recipe.procedure] for name, p in policies.items()}


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
        return _estimate(recipe, length_controlled([(policy, base)], procedure))
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


def _theory(transform: str, kl: float, procedure: str) -> dict[str, float]:
    """Return what a policy that is free for every prompt would reach with this transformation at this KL."""
    law = law_at_kl(parse_transform(transform), kl=max(kl, 1e-6))
    return {"kl": kl, "standard": law.win_rate(Standard()), procedure: law.win_rate(parse_procedure(procedure))}


def _theoretical_gain(transform: str, procedure: str, kl: float) -> float:
    return _theory(transform, kl, procedure)[procedure] - 0.5


def _matched(recipe: Recipe, root: Path, wins: dict[str, dict[str, dict[str, Array]]]) -> dict[str, Any] | None:
    """Return the win rates of every transformation at one KL, the largest that all reach, and their paired differences.

    Along one transformation's budgets the win rate is interpolated (`evaluation.matched`).
    """
    methods: dict[str, list[str]] = {}
    for name, policy in recipe.policies.items():
        methods.setdefault(f"{policy.transform} ({policy.solver})", []).append(name)
    if len(methods) < 2:
        return None
    kls = {name: samples_of(recipe, root, name, "kl").mean(axis=1) for name in recipe.policies}
    kl = min(max(float(kls[name].mean()) for name in names) for names in methods.values())
    gains = {
        method: partial(_theoretical_gain, recipe.policies[names[0]].transform, recipe.procedure)
        for method, names in methods.items()
    }
    rows: dict[str, Any] = {}
    for judge in reward_names(recipe):
        values = {
            method: matched([(kls[name], wins[name][judge][recipe.procedure]) for name in names], kl, gains[method])
            for method, names in methods.items()
        }
        first, *others = values
        rows[judge] = {
            "win_rates": {method: _estimate(recipe, v) for method, v in values.items()},
            "gain_over": {other: _estimate(recipe, values[first] - values[other]) for other in others},
        }
    theory = {
        method: _theory(recipe.policies[names[0]].transform, kl, recipe.procedure)[recipe.procedure]
        for method, names in methods.items()
    }
    return {"kl": kl, "first": next(iter(methods)), "judges": rows, "theory": theory}


def _estimate(recipe: Recipe, values: Array) -> dict[str, float]:
    return estimate(values, confidence=recipe.evaluate.confidence, seed=recipe.seed).as_dict()


def read_results(root: Path) -> dict[str, Any]:
    """Return the numbers that `summarise` wrote."""
    return dict(json.loads(Layout(root).results.read_text()))
