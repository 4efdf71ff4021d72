"""Several methods trained from one run directory, on the same rollouts, and compared at the same KL.

A method is a solver with what it optimises, but without its strength, which is a KL budget. Its policies are ordinary
units of the pipeline, so that data, models, rollouts, calibration and the reference's evaluation are done once, for a
run and for all comparisons in its directory.
"""

import csv
import difflib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from pydantic import ValidationError
from rich.console import Console

from infalign import pipeline
from infalign.calibration import Array
from infalign.choose import parse_aim, sweep
from infalign.config import ON_POLICY, TO_BEST_OF_N, Policy, Recipe
from infalign.data import write_text
from infalign.errors import ConfigError
from infalign.evaluation import Samples, best_of_n_kl, best_of_n_kl_bound, matched, win_rates, win_rates_of
from infalign.figures import COLOURS, INK, PAPER, QUIET, panels, plot_line, save, style
from infalign.optimum import optimal
from infalign.procedures import BestOfN, Standard, WorstOfN, of_best, parse_procedure
from infalign.report import MARKERS, SPOKEN, gain, plain_table, share
from infalign.results import estimated, wins_of
from infalign.rollouts import read_rollouts
from infalign.stages.evaluate import samples_of
from infalign.stages.laws import method_law
from infalign.stages.layout import Layout, parts, records
from infalign.stages.models import reward_names
from infalign.stages.sampling import Prompts, train_prompts
from infalign.theory import Law, Served, law_at_kl
from infalign.transforms import Identity, Log

Numbers = dict[str, Any]

AWARE = "aware"  # the paper's transformation for the recipe's procedure
LONGER, FASTER = 3, 2.5  # on-policy training against offline: the log's RLOO at the KL of its QRPO
LEAST_KL = 1e-3  # nats, below which nothing was learnt
LEAST_GAP = 0.002  # between the win rates of identity and optimum, for a share of it to mean anything
LEAST_REACHED = 0.25  # of the median KL, by a method that is compared there
ITSELF = "best-of-n"
DRAWS = {"bond": 3}  # responses that are generated for one that is trained on; else 1


@dataclass(frozen=True)
class Method:
    """A solver, the transformation that it optimises and its options: a policy of a recipe without its strength."""

    about: str
    solver: str
    transform: str | None = None  # None: the solver has its own
    options: Mapping[str, bool] = field(default_factory=dict)
    ours: bool = False  # optimises the served win rate by our transformation or directly; the others are baselines

    @property
    def generates(self) -> bool:
        """Whether it draws responses while it trains."""
        return self.solver in ON_POLICY and not self.options.get("stored", False)

    def settings(self, recipe: Recipe, budget: float) -> Numbers:
        """Return the settings of its policy at a KL of ``budget`` nats: strength, transformation, options and fit."""
        own = {} if self.transform is None else {"transform": self.transform}
        if self.transform == AWARE:
            own = {"transform": aware_transform(_extreme(recipe))}
        strength = {"n": nearest_n(budget)} if self.solver in TO_BEST_OF_N else {"kl_budget": budget}
        return {"solver": self.solver, **own, **self.options, **strength, **_fit(recipe, self)}


METHODS = {
    "qrpo": Method("QRPO on the procedure's transformation", "qrpo", AWARE, ours=True),
    "qrpo-identity": Method("QRPO on the identity: ordinary RLHF on the win rate", "qrpo", "identity"),
    "resample": Method("fine-tuning on weighted rollouts, same transformation", "resample", AWARE),
    "ipo": Method("IPO on pairs of rollouts", "ipo"),
    "ipo-averaged": Method("IPO with log-ratios a token, as TRL has them", "ipo", options={"length_averaged": True}),
    "bonbon": Method("BoNBoN: the best and the worst of n, the paper's loss", "bonbon"),
    "bonbon-code": Method("BoNBoN, the loss of its code", "bonbon", options={"released_code": True}),
    "bon-sft": Method("fine-tuning on the best of n", "bon-sft"),
    "grpo-once": Method("GRPO, one outer iteration on the K rollouts", "grpo", "raw", {"stored": True}),
    "rloo": Method("RLOO on the procedure's transformation", "rloo", AWARE, ours=True),
    "rloo-identity": Method("RLOO on the identity", "rloo", "identity"),
    "rloo-raw": Method("RLOO on the reward as it is", "rloo", "raw"),
    "rloo-raw-prompt": Method("RLOO on the reward standardised by prompt", "rloo", "raw-prompt"),
    "rloo-par": Method("RLOO on preference as reward", "rloo", "par"),
    "rloo-lsc": Method("RLOO on the log-sigmoid of the centred reward", "rloo", "lsc:0.85"),
    "ppo": Method("PPO on the procedure's transformation", "ppo", AWARE, ours=True),
    "ppo-identity": Method("PPO on the identity", "ppo", "identity"),
    "ppo-raw": Method("PPO on the reward as it is", "ppo", "raw"),
    "grpo": Method("GRPO without group statistics, same transformation", "grpo", AWARE, ours=True),
    "grpo-raw": Method("GRPO without group statistics, on the reward as it is", "grpo", "raw"),
    "grpo-shipped": Method("GRPO on the reward as it is, TRL's defaults", "grpo", "raw", {"shipped": True}),
    "maxk": Method("policy gradient of the served win rate itself", "maxk", ours=True),
    "bond": Method("J-BOND: towards Best-of-2 of a moving anchor", "bond"),
    ITSELF: Method("Best-of-n itself: no training, n draws for one response", ITSELF),
}
FAMILIES = {  # the colour of a solver
    "qrpo": COLOURS[1],
    "rloo": COLOURS[0],
    "ppo": COLOURS[2],
    "grpo": COLOURS[3],
    "maxk": COLOURS[5],
    "ipo": COLOURS[4],
    "resample": QUIET,
    "bonbon": INK,
    "bon-sft": INK,
    "bond": INK,
    ITSELF: QUIET,
}


def compare_methods(
    recipe: Recipe, *, methods: Sequence[str] | None = None, budgets: Sequence[float], console: Console
) -> Numbers:
    """Train each of the `METHODS` at each KL budget in the recipe's run directory and return all numbers.

    Without ``methods`` it is all that the recipe's own policies give the settings for. Fit settings are those of the
    recipe's first offline policy, for methods that generate those of its first on-policy one; without one, three times
    the epochs and 2.5 times the learning rate of the offline. Work that is done is not repeated; the run's results,
    report and recipe do not change.

    The numbers are kept in the folder ``compare`` of the run directory: comparison.json, .csv and .md, and the win
    rates against KL by each judge as .svg and .png. Raises ConfigError for an unknown method, a budget that is not
    positive, a procedure other than best-of-N or worst-of-N, and settings that a method cannot have.
    """
    _extreme(recipe)
    unique = sorted(set(budgets))
    if not unique or not all(0 < budget < math.inf for budget in unique):
        raise ConfigError(f"KL budgets are {list(budgets)}; give positive numbers of nats such as 0.5 and 1")
    if methods is None:
        chosen, left_out = default_methods(recipe, unique)
        for name, reason in left_out.items():
            console.print(f"left out: {name}: {reason}", highlight=False, soft_wrap=True)
    else:
        chosen = [_known(name) for name in dict.fromkeys(methods)]
    compared = Compared(recipe, tuple(chosen), tuple(unique))
    pipeline.evaluate_policies(compared.recipe, console=console)
    results = summarise(compared)
    folder = Path(recipe.run_dir) / "compare"
    folder.mkdir(exist_ok=True)
    write_text(folder / "comparison.json", json.dumps(results, indent=1))
    write_text(folder / "comparison.csv", _csv(results))
    write_text(folder / "comparison.md", "\n".join(sheet.markdown() for sheet in sheets(results)))
    for judge in results["judges"]:
        draw(results, judge, folder)
    return results


class Compared:
    """The policies of some methods at some budgets, as policies of the recipe.

    They are called METHOD-BUDGET, and METHOD-nN if their strength is the n of Best-of-n: the n whose KL is nearest to
    the budget, so that two budgets may share a policy. Best-of-n itself is none of the recipe's policies: what it
    serves is picked from the reference's samples, half of them, and the other half is the base.
    """

    def __init__(self, recipe: Recipe, methods: Sequence[str], budgets: Sequence[float]) -> None:
        self.budgets = budgets
        self.by_method: dict[str, list[str]] = {method: [] for method in methods}
        self.by_budget: dict[float, list[str]] = {budget: [] for budget in budgets}
        self.itself: dict[str, int] = {}
        if ITSELF in methods:
            largest = recipe.evaluate.samples // 2 // _extreme(recipe).n
            if largest < 2:
                raise ConfigError(
                    f"{ITSELF} served by {recipe.procedure} needs evaluate.samples of at least "
                    f"{4 * _extreme(recipe).n}, found {recipe.evaluate.samples}"
                )
            for budget in budgets:
                n = min(nearest_n(budget), largest)
                self.itself[f"best-of-{n}"] = n
                self.by_budget[budget].append(f"best-of-{n}")
            self.by_method[ITSELF] = list(self.itself)
        policies: dict[str, Policy] = {}
        for budget in budgets:
            for method, policy in _checked(recipe, [m for m in methods if m != ITSELF], budget).items():
                name = f"{method}-{budget:g}" if policy.n is None else f"{method}-n{policy.n}"
                if recipe.policies.get(name, policy) != policy:
                    raise ConfigError(f"the recipe has another policy of the name {name}; rename it")
                if name not in policies:
                    self.by_method[method].append(name)
                policies[name] = policy
                self.by_budget[budget].append(name)
        self.recipe = recipe.model_copy(update={"policies": policies})


def aware_transform(procedure: BestOfN | WorstOfN) -> str:
    """Return the paper's transformation: e^{5u} for two samples, e^{10u} for more; −e^{−5u}, −e^{−10u} for the worst.

    >>> aware_transform(BestOfN(4)), aware_transform(WorstOfN(2))
    ('exp:10', 'exp:-5')
    """
    steepness = 5 if procedure.n == 2 else 10
    return f"exp:{steepness if isinstance(procedure, BestOfN) else -steepness}"


def nearest_n(kl: float) -> int:
    """Return the n ≥ 2 whose Best-of-n has the KL, log n − (n − 1)/n, nearest to ``kl`` nats.

    >>> [nearest_n(kl) for kl in (0.01, 0.5, 1.0)]
    [2, 3, 6]
    """

    below = 2
    while best_of_n_kl_bound(below + 1) <= kl:
        below += 1
    return min(below, below + 1, key=lambda n: abs(best_of_n_kl_bound(n) - kl))


def _extreme(recipe: Recipe) -> BestOfN | WorstOfN:
    procedure = parse_procedure(recipe.procedure)
    if not isinstance(procedure, (BestOfN, WorstOfN)):
        raise ConfigError(
            f"methods are compared for best-of-N or worst-of-N, and the recipe's procedure is {recipe.procedure}; "
            "change procedure, for example --set procedure=best-of-4"
        )
    return procedure


def _known(name: str) -> str:
    if name in METHODS:
        return name
    near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(METHODS)}"
    raise ConfigError(f"unknown method {name!r}; {hint}")


def default_methods(recipe: Recipe, budgets: Sequence[float]) -> tuple[list[str], dict[str, str]]:
    """Return the methods that the recipe has all settings for, and why others are left out."""
    own = any(_generates(policy) for policy in recipe.policies.values())
    chosen, left_out = [], {}
    for name, method in METHODS.items():
        try:
            if method.generates and not own:
                raise ConfigError("the recipe has no on-policy policy to take its fit from; name it to use defaults")
            if name == ITSELF:
                Compared(recipe, [name], budgets)
            for budget in budgets if name != ITSELF else []:
                _checked(recipe, [name], budget)
            chosen.append(name)
        except ConfigError as error:
            left_out[name] = str(error)
    return chosen, left_out


def _checked(recipe: Recipe, methods: Sequence[str], budget: float) -> dict[str, Policy]:
    """Return the policy of each method at a budget, checked as part of the recipe."""
    if not methods:
        return {}
    settings = {name: METHODS[name].settings(recipe, budget) for name in methods}
    try:
        return Recipe.model_validate(recipe.model_dump() | {"policies": settings}).policies
    except ValidationError as error:
        reasons = (
            f"{'.'.join(map(str, e['loc']))} {e['msg'].removeprefix('Value error, ')}".lstrip() for e in error.errors()
        )
        raise ConfigError(f"at {budget:g} nats: {'; '.join(reasons)}") from error


def _fit(recipe: Recipe, method: Method) -> Numbers:
    own = [policy for policy in recipe.policies.values() if _generates(policy) == method.generates]
    if own:
        return own[0].model_dump(include={"fit", "generations"} if method.generates else {"fit"})
    if not method.generates:
        raise ConfigError(f"{method.solver} takes its fit from an offline policy, and the recipe has none; add one")
    fit = next(iter(recipe.policies.values())).fit
    return {"fit": fit.model_dump() | {"epochs": LONGER * fit.epochs, "learning_rate": FASTER * fit.learning_rate}}


def _generates(policy: Policy) -> bool:
    return policy.solver in ON_POLICY and not policy.stored


# Numbers


def summarise(compared: Compared) -> Numbers:
    """Return win rates, KL and cost of every policy, and the comparison of the methods at the KL of each budget.

    All intervals are over test prompts. Responses are selected by ``reward`` and judged by each reward source in turn.
    """
    recipe, root = compared.recipe, Path(compared.recipe.run_dir)
    n = _extreme(recipe).n
    served: list[Served] = [Standard(), BestOfN(n), WorstOfN(n)]
    made = records(root)
    kls = {name: samples_of(recipe, root, name, "kl").mean(axis=1) for name in recipe.policies}
    wins = {name: wins_of(recipe, root, name, served) for name in recipe.policies}
    for name, n in compared.itself.items():
        kls[name], wins[name] = _served_itself(recipe, root, n, served)
    methods = {name: method for method, names in compared.by_method.items() for name in names}
    policies: Numbers = {
        name: {
            "method": method,
            "kl": estimated(recipe, kls[name]),
            "win_rates": {
                judge: {procedure: estimated(recipe, values) for procedure, values in rates.items()}
                for judge, rates in wins[name].items()
            },
        }
        for name, method in methods.items()
    }
    for name, policy in recipe.policies.items():
        policies[name] |= {
            "settings": policy.model_dump(mode="json", exclude_defaults=True),
            "key": made[f"train-{name}"]["key"],
            "cost": training_cost(made[f"train-{name}"], policy),
            "captured": {split: _captured(recipe, root, name, split) for split in ("train", "test")},
        }
    for name, n in compared.itself.items():
        policies[name] |= {"n": n, "kl_bound": best_of_n_kl_bound(n)}
    return {
        "procedure": recipe.procedure,
        "procedures": [procedure.name for procedure in served],
        "judges": list(next(iter(wins.values()))),
        "seed": recipe.seed,
        "confidence": recipe.evaluate.confidence,
        "prompts": recipe.evaluate.prompts,
        "samples": recipe.evaluate.samples,
        "budgets": list(compared.budgets),
        "methods": {name: METHODS[name].about for name in compared.by_method},
        "policies": policies,
        "shared_cost": _shared_cost(recipe, root, made),
        "matched": [_matched(compared, served, budget, kls, wins) for budget in compared.budgets],
    }


def _served_itself(
    recipe: Recipe, root: Path, n: int, served: Sequence[Served]
) -> tuple[Array, dict[str, dict[str, Array]]]:
    """Return the KL (P,) of Best-of-n to the reference, estimated, and its win rates by judge and procedure."""
    prompt_ids = Prompts.read(Layout(root).data / "test_prompts.parquet", recipe.evaluate.prompts).prompt_ids
    rollouts = read_rollouts(Layout(root).evaluation("reference") / "samples", prompt_ids, recipe.evaluate.samples)
    reward = samples_of(recipe, root, "reference", "reward")
    kl = best_of_n_kl(reward, rollouts["logprob"].to_numpy().reshape(reward.shape), n)
    half = reward.shape[1] // 2
    wins: dict[str, dict[str, Array]] = {}
    for judge in reward_names(recipe):
        judged = samples_of(recipe, root, "reference", judge)
        ours, base = (Samples(reward[:, part], judged[:, part]) for part in (slice(half), slice(half, None)))
        inner = [BestOfN(n), *(of_best(p, n) for p in served if isinstance(p, (BestOfN, WorstOfN)))]  # first: standard
        names = (procedure.name for procedure in served)
        wins[judge] = dict(zip(names, win_rates_of(ours, base, inner, served), strict=True))
    return kl, wins


def _captured(recipe: Recipe, root: Path, name: str, split: str) -> Numbers:
    """Return how much of what theory promises arrives, on the prompts of a split, by the reward it was trained on.

    ``efficiency`` is the standard win rate's gain over ½ relative to the most that this KL can buy, the identity's: it
    falls with KL that is spent on noise, and at small KL is the correlation of log π/π_ref with the rank. ``share`` is
    (win rate − identity's) / (optimum's − identity's) of the recipe's procedure; None where these two are within
    `LEAST_GAP` of each other. The policy's KL counts as exact.
    """
    procedure = _extreme(recipe)
    own, base = (
        Samples(values, values)
        for values in (samples_of(recipe, root, model, "reward", split) for model in (name, "reference"))
    )
    kl = float(samples_of(recipe, root, name, "kl", split).mean())
    found = estimated(recipe, win_rates(own, base, procedure))
    best = law_at_kl(Identity(), kl=max(kl, 1e-6))
    identity, optimum = best.win_rate(procedure), optimal(procedure, kl=max(kl, 1e-6)).win_rate
    gap = optimum - identity
    return {
        "kl": kl,
        "win_rate": found,
        "identity": identity,
        "optimum": optimum,
        "share": _placed(found, identity, gap) if gap > LEAST_GAP else None,
        "efficiency": _placed(
            estimated(recipe, win_rates(own, base, Standard())), 0.5, best.win_rate(Standard()) - 0.5
        ),
    }


def _placed(e: Mapping[str, float], start: float, length: float) -> Numbers:
    """Return where an estimate with its interval lies on a line from 0 at ``start`` to 1 at ``start + length``."""
    return {end: (e[end] - start) / length for end in ("mean", "low", "high")}


def training_cost(record: Numbers, policy: Policy) -> Numbers:
    """Return tokens generated in a training, its seconds and the most bytes of memory, from the record of its unit.

    TRL logs the mean length of completions since the last row; steps after the last row count with the mean of all.
    """
    history = record["summary"]["history"]
    rows = [row for row in history if "completions/mean_length" in row]
    tokens = 0.0
    if _generates(policy):
        steps = np.diff([0, *(row["step"] for row in rows)])
        length = np.average([row["completions/mean_length"] for row in rows], weights=steps)
        tokens = float(length) * policy.fit.batch_size * history[-1]["step"] * DRAWS.get(policy.solver, 1)
    return {
        "generated_tokens": round(tokens),
        "seconds": record["seconds"],
        "peak_memory": history[-1]["train_peak_memory"],
    }


def _shared_cost(recipe: Recipe, root: Path, made: Mapping[str, Numbers]) -> Numbers:
    """Return what the rollouts that all methods share have cost: responses, tokens, seconds of drawing and ranking."""
    tokens = 0
    for part in range(parts(recipe)):
        prompt_ids = train_prompts(recipe, root, part).prompt_ids
        rollouts = read_rollouts(Layout(root).rollouts(part), prompt_ids, recipe.rollout.k)
        tokens += pc.sum(pc.list_value_length(rollouts["token_ids"])).as_py()
    names = [f"{work}-{part}" for work in ("rollout", "score") for part in range(parts(recipe))]
    return {
        "responses": recipe.rollout.k * made["calibrate"]["summary"]["prompts"],
        "generated_tokens": tokens,
        "seconds": round(sum(made[name]["seconds"] for name in [*names, "calibrate"]), 2),
    }


def _matched(
    compared: Compared,
    served: Sequence[Served],
    budget: float,
    kls: Mapping[str, Array],
    wins: Mapping[str, Mapping[str, Mapping[str, Array]]],
) -> Numbers:
    """Return the methods at one KL: the median that they spent for ``budget``, or the largest that all of them reach.

    What a trained policy spends is not its budget. A method that reaches less than a quarter of the median is left out,
    with the KL that it reaches; it would take all others down with it. Along a method's budgets the win rate is
    interpolated (`evaluation.matched`), by theory's curve of what it optimises, or of the identity if theory has none.
    """
    recipe = compared.recipe
    reached = {method: max(float(kls[name].mean()) for name in names) for method, names in compared.by_method.items()}
    median = float(np.median([kls[name].mean() for name in compared.by_budget[budget]]))
    names = {m: names for m, names in compared.by_method.items() if reached[m] >= LEAST_REACHED * median}
    left_out = {method: reached[method] for method in reached.keys() - names.keys()}
    found: Numbers = {"budget": budget, "median": median, "left_out": dict(sorted(left_out.items()))}
    if median < LEAST_KL:
        return found | {"kl": None, "win_rates": {}, "theory": {}, "gains": {}}
    kl = min(median, *(reached[method] for method in names))

    @cache
    def law(method: str, nats: float) -> Law | None:
        if method == ITSELF:
            return law_at_kl(Log(), kl=max(nats, 1e-6))
        policy = recipe.policies[names[method][0]]
        return method_law(policy.solver, policy.transform, _extreme(recipe), max(nats, 1e-6))

    def at_kl(method: str, judge: str, procedure: Served) -> Array:
        def theory_gain(nats: float) -> float:
            known = law(method, nats) or law_at_kl(Identity(), kl=max(nats, 1e-6))
            return known.win_rate(procedure) - 0.5

        return matched([(kls[name], wins[name][judge][procedure.name]) for name in names[method]], kl, theory_gain)

    win_rates: Numbers = {}
    gains: Numbers = {}
    for judge in next(iter(wins.values())):
        values = {procedure.name: {method: at_kl(method, judge, procedure) for method in names} for procedure in served}
        win_rates[judge] = {
            procedure: {method: estimated(recipe, v) for method, v in by_method.items()}
            for procedure, by_method in values.items()
        }
        gains[judge] = {procedure: _gains(recipe, by_method) for procedure, by_method in values.items()}
    laws = {method: known for method in names if (known := law(method, kl)) is not None}
    theory = {p.name: {method: known.win_rate(p) for method, known in laws.items()} for p in served}
    return found | {"kl": kl, "win_rates": win_rates, "theory": theory, "gains": gains}


def _gains(recipe: Recipe, values: Mapping[str, Array]) -> Numbers:
    """Return the trained baseline with the highest mean, and how far each of our methods is above it, by prompt."""
    baselines = [method for method in values if not METHODS[method].ours and method != ITSELF]
    if not baselines:
        return {"baseline": None, "gain": {}}
    best = max(baselines, key=lambda method: float(values[method].mean()))
    ours = (method for method in values if METHODS[method].ours)
    return {"baseline": best, "gain": {method: estimated(recipe, values[method] - values[best]) for method in ours}}


# Words and pictures


@dataclass(frozen=True)
class Sheet:
    """A table with the sentences above and below it."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]
    notes: list[str]

    def print_to(self, console: Console) -> None:
        """Print it; rows whose first cell is empty belong to the one before."""
        table = plain_table(*self.columns)
        for before, row in pairwise([[""], *self.rows]):
            if row[0] and not before[0]:
                table.add_section()
            table.add_row(*row)
        console.print(f"\n[bold]{self.title}[/]", highlight=False)
        if self.rows:
            console.print(table)
        for note in self.notes:
            console.print(note, highlight=False)

    def markdown(self) -> str:
        """Return it as Markdown."""
        ruled = [self.columns, ["---"] * len(self.columns), *self.rows] if self.rows else []
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in ruled)
        return "\n\n".join(filter(None, [f"## {self.title}", table, *self.notes])) + "\n"


def sheets(results: Numbers) -> list[Sheet]:
    """Return the tables of a comparison: policies, their cost, the methods and our gains at the KL of each budget."""
    found = [*(_policies(results, judge) for judge in results["judges"]), _shares(results), _costs(results)]
    for at in results["matched"]:
        found += [_at_one_kl(results, at), *_above_baselines(results, at)]
    return found


def print_methods(results: Numbers, console: Console) -> None:
    """Print the tables of a comparison."""
    for sheet in sheets(results):
        sheet.print_to(console)


def _policies(results: Numbers, judge: str) -> Sheet:
    rows = []
    for name, policy in results["policies"].items():
        shares = (share(policy["win_rates"][judge][procedure]) for procedure in results["procedures"])
        rows.append([name, _plus_minus(policy["kl"]), *shares])
    columns = ("policy", "KL, nats", *(f"{procedure}, %" for procedure in results["procedures"]))
    notes = [
        f"{results['prompts']} test prompts × {results['samples']} samples, {results['confidence']:.0%} intervals."
    ]
    notes += [
        f"{name} itself: its KL is estimated from the probabilities of what it serves, and at most "
        f"{policy['kl_bound']:.2f} nats; {policy['n']} draws for each response, no training."
        for name, policy in results["policies"].items()
        if "n" in policy
    ]
    return Sheet(f"Win rate against the reference, both served alike, by {SPOKEN[judge]}", columns, rows, notes)


def _plus_minus(e: Mapping[str, float]) -> str:
    """Return an estimate with the larger half of its interval: ``0.93 ± 0.05``."""
    return f"{e['mean']:.2f} ± {max(e['high'] - e['mean'], e['mean'] - e['low']):.2f}"


def _shares(results: Numbers) -> Sheet:
    rows = []
    for name, policy in results["policies"].items():
        for split, found in policy.get("captured", {}).items():
            placed = (_interval(found[key]) for key in ("efficiency", "share"))
            rows.append([name if split == "train" else "", split, f"{found['kl']:.2f}", *placed])
    columns = ("policy", "prompts", "KL, nats", "efficiency", "share of the gap")
    notes = [
        "Efficiency: the gain of the standard win rate over one half, by the reward, relative to the most that this KL "
        "can buy. At small KL it is the correlation of log π/π_ref with the rank; the rest of the KL is noise.",
        f"Share: where the {results['procedure']} win rate lies between what theory gives at this KL, to a policy that "
        "is free for every prompt, for the identity (0) and for the optimum (1).",
    ]
    return Sheet("How much of what theory promises arrives", columns, rows, notes)


def _interval(e: Mapping[str, float] | None) -> str:
    return "–" if e is None else f"{e['mean']:.2f} ({e['low']:.2f} to {e['high']:.2f})".replace("-", "−")


def _costs(results: Numbers) -> Sheet:
    rows = []
    for name, policy in results["policies"].items():
        if "cost" not in policy:  # Best-of-n itself
            continue
        cost = policy["cost"]
        tokens, memory = f"{cost['generated_tokens']:,}", f"{cost['peak_memory'] / 2**20:,.0f}"
        rows.append([name, tokens, f"{cost['seconds']:,.1f}", memory])
    shared = results["shared_cost"]
    note = (
        f"Before all of them, once: {shared['responses']:,} rollouts of {shared['generated_tokens']:,} tokens, "
        f"{shared['seconds']:,.1f} s with scores and calibration."
    )
    held = "Peak memory is that of the training process with its libraries, on a GPU that of its tensors."
    columns = ("policy", "generated tokens", "seconds", "peak memory, MiB")
    return Sheet("What training cost, besides the shared rollouts", columns, rows, [note, held])


def _at_one_kl(results: Numbers, at: Numbers) -> Sheet:
    procedures, reached = results["procedures"], (f"{m} ({kl:.2f} nats)" for m, kl in at["left_out"].items())
    missing = f"Left out, since they reach less than a quarter of this median: {', '.join(reached)}."
    notes = [f"Half of the methods spent more than {at['median']:.2f} nats for this budget."]
    notes += [missing] if at["left_out"] else []
    if any(at["theory"].values()):
        notes.append(
            "Theory: the method's transformation at this KL, by the reward, if every prompt's policy were free."
        )
    columns = ("method", "judged by", *(f"{procedure}, %" for procedure in procedures))
    if at["kl"] is None:
        return Sheet(f"Budget {at['budget']:g} nats", columns, [], notes)
    rows = []
    for method in at["win_rates"][results["judges"][0]][procedures[0]]:
        for judge, wins in at["win_rates"].items():
            first = method if judge == results["judges"][0] else ""
            rows.append([first, judge, *(share(wins[procedure][method]) for procedure in procedures)])
        if method in at["theory"][procedures[0]]:
            rows.append(["", "theory", *(f"{100 * at['theory'][procedure][method]:.1f}" for procedure in procedures)])
    return Sheet(f"Budget {at['budget']:g} nats: the methods at {at['kl']:.2f} nats", columns, rows, notes)


def _above_baselines(results: Numbers, at: Numbers) -> list[Sheet]:
    """Return by each judge how far our methods are above the best trained baseline, if there are both."""
    note = (
        "The baseline is the trained one that came out best on these prompts, which favours it a little; the intervals "
        "do not allow for that choice."
    )
    found = []
    for judge, gains in at["gains"].items():
        by_procedure = [gains[procedure] for procedure in results["procedures"]]
        rows = [["baseline", *(str(one["baseline"]) for one in by_procedure)]]
        rows += [[method, *(gain(one["gain"][method]) for one in by_procedure)] for method in by_procedure[0]["gain"]]
        title = f"Points above the best baseline at {at['kl']:.2f} nats by {SPOKEN[judge]}"
        if len(rows) > 1:
            found.append(Sheet(title, ("method", *results["procedures"]), rows, []))
    return [*found[:-1], *(replace(last, notes=[note]) for last in found[-1:])]


def _csv(results: Numbers) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    three = ("", "_low", "_high")
    numbers = [f"{name}{end}" for name in ("kl", "win_rate") for end in three]
    writer.writerow(["policy", "method", "judge", "procedure", *numbers, "generated_tokens", "seconds", "peak_memory"])
    for name, policy in results["policies"].items():
        for judge, wins in policy["win_rates"].items():
            for procedure, e in wins.items():
                row = [name, policy["method"], judge, procedure, *policy["kl"].values(), *e.values()]
                writer.writerow([*row, *policy.get("cost", {}).values()])
    return text.getvalue()


def draw(results: Numbers, judge: str, folder: Path) -> None:
    """Draw win rate against KL by ``judge`` as win-rate-by-kl-JUDGE.svg and .png, a panel for each procedure.

    A colour is a solver's; our methods are filled. With the reward as judge the curves of identity and optimum are
    theory's. Raises ConfigError without matplotlib.
    """
    policies = results["policies"].values()
    most = 1.06 * max(policy["kl"]["high"] for policy in policies)
    with style():
        figure, grid = panels(1, 3, (10.0, 4.2))
        for axes, procedure in zip(grid, results["procedures"], strict=True):
            if judge == "reward":
                for aim, colour in {"identity": QUIET, "optimal": INK}.items():
                    points = sweep(parse_procedure(procedure), parse_aim(aim))[0]
                    plot_line(axes, points, colour, label=f"theory, {aim}")
                    axes.lines[-1].set(linestyle="--", linewidth=1)
            for method in results["methods"]:
                own = sorted((p for p in policies if p["method"] == method), key=lambda p: float(p["kl"]["mean"]))
                _draw_line(axes, method, own, judge, procedure, list(results["methods"]))
            axes.set(title=procedure, xlabel="KL to the reference, nats", xlim=(0, most))
            axes.autoscale_view(scalex=False)
        grid[0].set(ylabel=f"win rate by {SPOKEN[judge]}, %")
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right center", labelspacing=0.2)
        for ending in (".svg", ".png"):
            save(figure, folder / f"win-rate-by-kl-{judge}{ending}")


def _draw_line(
    axes: Any, method: str, policies: Sequence[Numbers], judge: str, procedure: str, methods: Sequence[str]
) -> None:
    """Draw a method's policies with both intervals, joined along the budgets."""
    solver = METHODS[method].solver
    alike = [name for name in methods if FAMILIES[METHODS[name].solver] == FAMILIES[solver]]
    colour, marker = FAMILIES[solver], MARKERS[alike.index(method) % len(MARKERS)]
    kl, wins = [policy["kl"] for policy in policies], [policy["win_rates"][judge][procedure] for policy in policies]
    for x, y in zip(kl, wins, strict=True):
        axes.plot([x["low"], x["high"]], [100 * y["mean"]] * 2, color=colour, linewidth=0.8)
        axes.plot([x["mean"]] * 2, [100 * y["low"], 100 * y["high"]], color=colour, linewidth=0.8)
    axes.plot(
        [x["mean"] for x in kl],
        [100 * y["mean"] for y in wins],
        color=colour,
        marker=marker,
        markersize=4,
        markerfacecolor=colour if METHODS[method].ours else PAPER,
        linewidth=1,
        label=method,
        zorder=3,
    )
