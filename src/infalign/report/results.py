"""All numbers of an evaluated run with their intervals, next to theory's predictions."""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any, TypedDict, cast

from infalign.core.display import Interval
from infalign.core.errors import DataError
from infalign.core.progress import OnProgress
from infalign.core.storage import write_text
from infalign.evaluation.diagnostics import agreement
from infalign.evaluation.length import length_controlled
from infalign.evaluation.pass_at_k import Metric
from infalign.evaluation.samples import Samples
from infalign.evaluation.win_rates import rewind_draws, tie_rate
from infalign.method.calibration import Array
from infalign.method.procedures import BestOfN, Standard
from infalign.pipeline.units import Summary
from infalign.recipe.layout import Layout
from infalign.recipe.stored_laws import law_numbers
from infalign.report.equal_kl import MAX_EXTRAPOLATION, AtOneKL, HasWinRates
from infalign.report.scored_samples import ScoredSamples
from infalign.training.solvers.base import Solver

FORMAT = 8  # of the numbers; increase it when they change their form, and they are computed anew


class Rate(TypedDict):
    """pass@k of a model, and its leads by the other's name: at one KL (``kl``), None where two are not comparable."""

    mean: float
    low: float
    high: float
    over: dict[str, Any]


class OfSamples(TypedDict):
    """What the samples of a policy say; win rates by judge and procedure, lengths in tokens, the KL in nats."""

    kl: Interval
    length: Interval
    rewind_draws: Interval
    win_rates: dict[str, dict[str, Interval]]
    at_equal_length: dict[str, Interval]
    ties: dict[str, Interval]


class OfPolicy(OfSamples):
    """The same of a run's own policy, how it was trained, and what theory says of its KL."""

    method: str
    transform: str
    solver: str
    kl_budget: float | None
    beta: float | None
    theory: dict[str, float] | None


class OfMethods(TypedDict):
    """What one judge says of the methods at one KL: win rates, and the gain of the first over each other."""

    win_rates: dict[str, Interval]
    gain_over: dict[str, Interval]


class Compared(TypedDict):
    """The methods at one KL (`AtOneKL`)."""

    kl: float
    first: str
    left_out: Mapping[str, float]
    not_bracketed: Mapping[str, float]
    judges: dict[str, OfMethods]
    theory: dict[str, float]


class OfReference(TypedDict):
    """Tokens and draws of the reference, and how its ranks by the reward agree with those by other judges."""

    length: Interval
    rewind_draws: Interval
    agreement: dict[str, Interval]


class Truth(TypedDict):
    """By what a response is right, from which reward on, and the k of pass@k that is served."""

    by: str
    threshold: float | None
    served: int | None


class PassAtK(TypedDict, total=False):
    """pass@k by model and k, and by whose truth; empty if it is not known what is right."""

    pass_at_k: dict[str, dict[str, Rate]]
    truth: Truth


class Results(PassAtK):
    """``results.json``: all numbers of a run, over ``prompts`` test prompts × ``samples``."""

    format: int
    procedure: str
    confidence: float
    prompts: int
    samples: int
    judges: list[str]
    policies: dict[str, OfPolicy]
    matched: Compared | None
    base: OfReference


def write_results(evaluated: ScoredSamples, solvers: Mapping[str, Solver], *, on_progress: OnProgress) -> Summary:
    """Write ``results.json`` and return its headline numbers.

    Responses are selected by ``reward``, as they would be when served, and judged by each reward source in turn. With
    ``reward`` itself as the judge the numbers compare with theory; the judge and the gold measure the actual gain.
    """
    sources, aim = evaluated.sources, evaluated.procedure
    served, reference = evaluated.procedures(), evaluated.judged_by("reward", "reference")
    selected = reference.selected
    policies = dict[str, OfPolicy]()
    wins: dict[str, dict[str, dict[str, Array]]] = {}  # by policy, judge and procedure
    for step, (name, policy) in enumerate(solvers.items()):
        on_progress(step, len(solvers), name)
        wins[name] = evaluated.wins(name, served)
        policies[name] = _policy_numbers(evaluated, name, policy, wins[name])
    results: Results = {
        "format": FORMAT,
        "procedure": aim.name,
        "confidence": evaluated.intervals.level,
        "prompts": len(selected),
        "samples": evaluated.samples,
        "judges": list(sources),
        "policies": policies,
        "matched": _matched(evaluated, solvers, wins),
        "base": {
            "length": evaluated.intervals.of(evaluated.column("reference", "length").mean(axis=1)),
            "rewind_draws": evaluated.intervals.of(rewind_draws(reference, reference, evaluated.rewind)),
            "agreement": {
                other: evaluated.intervals.of(rhos)
                for other in (*sources, "length")
                if other != "reward" and (rhos := agreement(selected, evaluated.column("reference", other))).size > 1
            },
        },
        **pass_at_k(evaluated, [*solvers], lambda name, kl: evaluated.curve_at(solvers[name], kl)),
    }
    write_text(evaluated.layout.results, json.dumps(results, indent=1))
    if "truth" in results and (k := results["truth"]["served"]):
        passed = {name: by_k[str(k)] for name, by_k in results["pass_at_k"].items()}
        return {f"{name} pass@{k}": {end: of[end] for end in ("mean", "low", "high")} for name, of in passed.items()}
    return {name: p["win_rates"][unseen(results)[0]][aim.name] for name, p in policies.items()}


def pass_at_k(
    evaluated: ScoredSamples, policies: Sequence[str], law_at: Callable[[str, float], HasWinRates | None]
) -> PassAtK:
    """Return pass@k of the reference and each policy, and by whose truth; nothing if it is not known what is right.

    A policy's leads ``over`` the reference are at the KL that it spent, over other policies at one KL (`AtOneKL`).
    """
    names = ("reference", *policies)
    right = {name: correct_PM for name in names if (correct_PM := evaluated.correct(name)) is not None}
    if len(right) < len(names):
        return {}
    kls = {name: evaluated.kl(name) for name in policies}
    pairs = {pair: AtOneKL.of({name: [name] for name in pair}, kls, law_at) for pair in permutations(policies, 2)}
    rates: dict[str, dict[str, Rate]] = {name: {} for name in right}
    powers = {2**power for power in range(evaluated.samples.bit_length())}
    for k in sorted(powers | ({evaluated.pass_at} if evaluated.pass_at else set())):
        metric = Metric.parse(f"pass@{k}")
        passed = {name: metric.of_prompts(rewards_PM) for name, rewards_PM in right.items()}
        for name, values in passed.items():
            over = {"reference": evaluated.intervals.of_differences(values - passed["reference"])}
            rate, leads = evaluated.intervals.of_shares(values), over if name in policies else {}
            rates[name][f"{k}"] = {"mean": rate["mean"], "low": rate["low"], "high": rate["high"], "over": {**leads}}
        for (name, other), at in pairs.items():
            both = at.matched(passed, BestOfN(k), passed["reference"])
            comparable = len(both) == 2
            lead = {"kl": at.kl, **both[name].gain_over(both[other], evaluated.intervals)} if comparable else None
            rates[name][f"{k}"]["over"][other] = lead
    served = evaluated.pass_at if evaluated.truth == "reward" else None
    return {"pass_at_k": rates, "truth": {"by": evaluated.truth, "threshold": evaluated.threshold, "served": served}}


def unseen(results: Results) -> list[str]:
    """Return the judges that training has not seen; the reward itself where there is no other."""
    return results["judges"][1:] or results["judges"]


def _policy_numbers(
    evaluated: ScoredSamples, name: str, policy: Solver, wins: Mapping[str, Mapping[str, Array]]
) -> OfPolicy:
    """Return the numbers of one policy."""
    of_law = evaluated.layout.law(policy.data_needs.teacher or name)  # bond has none, or an old one of its name
    numbers = sample_numbers(evaluated, name, wins)
    kl, shown = numbers["kl"]["mean"], (Standard(), evaluated.procedure)
    law = evaluated.law_at(policy, kl)  # of an unrestricted policy of the method
    return {
        "method": policy.method,
        "transform": policy.transformation,
        "solver": policy.solver,
        "kl_budget": policy.budget,
        "beta": law_numbers(of_law)["paper_beta"] if policy.aim() is not None and of_law.exists() else None,
        **numbers,
        "theory": None if law is None else {"kl": kl} | {served.name: law.win_rate(served) for served in shown},
    }


def sample_numbers(evaluated: ScoredSamples, name: str, wins: Mapping[str, Mapping[str, Array]]) -> OfSamples:
    """Return what the samples of a model say: KL, length, win rates and ties."""
    pairs = {
        source: (evaluated.judged_by(source, name), evaluated.judged_by(source, "reference"))
        for source in evaluated.sources
    }
    return {
        "kl": evaluated.intervals.of(evaluated.kl(name)),
        "length": evaluated.intervals.of(evaluated.column(name, "length").mean(axis=1)),
        "rewind_draws": evaluated.intervals.of(rewind_draws(*pairs["reward"], evaluated.rewind)),
        "win_rates": {
            source: {procedure: evaluated.intervals.of_shares(values) for procedure, values in by_procedure.items()}
            for source, by_procedure in wins.items()
        },
        "at_equal_length": {source: _at_equal_length(evaluated, pairs[source]) for source in evaluated.sources},
        "ties": {source: evaluated.intervals.of_shares(tie_rate(*pairs[source])) for source in evaluated.sources},
    }


def _at_equal_length(evaluated: ScoredSamples, pair: tuple[Samples, Samples]) -> Interval:
    try:
        found = evaluated.intervals.of(length_controlled([pair], evaluated.procedure))
        return {key: min(max(value, 0.0), 1.0) for key, value in found.items()}
    except DataError as error:
        return {"none": str(error)}


def at_one_kl(evaluated: ScoredSamples, solvers: Mapping[str, Solver]) -> AtOneKL:
    """Return a run's methods at one KL; a student is left out if it spends less than 1/1.25 of the median."""
    methods = dict[str, list[str]]()
    for name, policy in solvers.items():
        methods.setdefault(policy.method, []).append(name)
    students = {policy.method: MAX_EXTRAPOLATION for policy in solvers.values() if policy.data_needs.teacher in solvers}
    kls = {name: evaluated.kl(name) for name in solvers}
    return AtOneKL.of(methods, kls, lambda name, nats: evaluated.law_at(solvers[name], nats), far=students)


def _matched(
    evaluated: ScoredSamples, solvers: Mapping[str, Solver], wins: dict[str, dict[str, dict[str, Array]]]
) -> Compared | None:
    """Return the win rates of the methods at one KL (`AtOneKL`), and their paired differences.

    The intervals contain the error of interpolation; methods that are not comparable have no win rate. None for one
    method, or if none has learned.
    """
    aim, at = evaluated.procedure, at_one_kl(evaluated, solvers)
    if len({policy.method for policy in solvers.values()}) < 2 or at.kl is None:
        return None
    first = next(iter(solvers.values())).method
    rows = dict[str, OfMethods]()
    for judge in evaluated.sources:
        by_method = at.matched({name: by_judge[judge][aim.name] for name, by_judge in wins.items()}, aim)
        rows[judge] = {
            "win_rates": {method: m.estimate(evaluated.intervals) for method, m in by_method.items()},
            "gain_over": {
                other: by_method[first].gain_over(m, evaluated.intervals)
                for other, m in by_method.items()
                if first in by_method and other != first
            },
        }
    return {
        "kl": at.kl,
        "first": first,
        "left_out": at.left_out,
        "not_bracketed": at.not_bracketed,
        "judges": rows,
        "theory": at.theory(aim),
    }


def read_results(root: Path) -> Results:
    """Return the numbers that `write_results` wrote. Raises DataError for a damaged file and for another format."""
    path = Layout(root).results
    try:
        results = cast(Results, dict(json.loads(path.read_bytes())))
    except (ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and rerun the recipe") from error
    if results.get("format") != FORMAT:
        raise DataError(f"{path} was written by another version of infalign; rerun the recipe to write it again")
    return results
