"""Methods that can be compared: a solver with its objective, but without its strength, which is a KL budget.

Their policies are ordinary units of the pipeline, so that data, models, rollouts, calibration and the reference's
evaluation are shared by a run and all comparisons in its directory.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from infalign.core.display import QUIET
from infalign.core.errors import ConfigError
from infalign.core.spelling import hint
from infalign.evaluation.best_of_n import best_of_n_kl_bound
from infalign.evaluation.matched import FAR, LEAST_KL
from infalign.method.procedures import Extreme, is_extreme
from infalign.method.transforms import Tabulated
from infalign.recipe.layout import Layout
from infalign.recipe.reading import untagged
from infalign.recipe.resolved import reference_rewards
from infalign.recipe.settings import Recipe
from infalign.training.solvers import KINDS, read_solver
from infalign.training.solvers.base import Offline, Solver, ToBestOfN

AWARE = "aware"  # the best transformation for the recipe's procedure, K and the budget
LONGER, FASTER = 3, 2.5  # on-policy relative to offline fit settings, from RLOO measured at the KL of QRPO
ITSELF = "best-of-n"
OVERSHOT = 1.2  # by how much a further budget of a method aims beyond the KL that it is to bracket


@dataclass(frozen=True)
class Method:
    """A solver, the transformation that it optimises and its options: a policy of a recipe, without its strength."""

    about: str
    solver: str | None  # None if nothing is trained
    transform: str | None = None  # None if the solver has a fixed one
    options: Mapping[str, bool] = field(default_factory=dict)
    ours: bool = False  # if it optimises the served win rate, by our transformation or directly; else a baseline
    n: int | None = None  # the N that its transformation is for, if not that of the recipe's procedure

    @cached_property
    def example(self) -> Solver | None:
        """The solver with its options, at an arbitrary strength; None if nothing is trained."""
        if self.solver is None:
            return None
        strength = {"n": 2} if self.to_best_of_n else {"kl_budget": 0.1}
        return read_solver(solver=self.solver, **self.options, **strength)

    @property
    def to_best_of_n(self) -> bool:
        """Whether its strength is the n of Best-of-n."""
        return self.solver is not None and issubclass(KINDS[self.solver], ToBestOfN)

    @property
    def generates(self) -> bool:
        """Whether it draws responses while it trains."""
        return self.example is not None and self.example.generates

    @property
    def colour(self) -> str:
        """The colour of its solver in figures."""
        return QUIET if self.solver is None else KINDS[self.solver].colour

    def settings(self, recipe: Recipe, budget: float) -> dict[str, Any]:
        """Return the settings of its policy at a KL of ``budget`` nats: strength, transformation, options and fit."""
        own = {} if self.transform is None else {"transform": self.transform}
        if self.transform == AWARE:
            served = extreme_procedure(recipe)
            aim = served if self.n is None else replace(served, n=self.n)
            own = {"transform": aware_transform(aim, budget, recipe.rollout.k)}
        strength = {"n": nearest_n(budget)} if self.to_best_of_n else {"kl_budget": budget}
        return {"solver": self.solver, **own, **self.options, **strength, **_fit(recipe, self)}


METHODS = {
    "qrpo": Method("QRPO on the procedure's transformation", "qrpo", AWARE, ours=True),
    "qrpo-identity": Method("QRPO on the identity: ordinary RLHF on the win rate", "qrpo", "identity"),
    "qrpo-raw": Method("QRPO on the reward as it is: ordinary RLHF", "qrpo", "raw"),
    "qrpo-raw-prompt": Method("QRPO on the reward standardised by prompt", "qrpo", "raw-prompt"),
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
    ITSELF: Method("Best-of-n itself: no training, n draws for one response", None),
}


def method_of(name: str) -> Method:
    """Return the method that ``name`` spells: one of `METHODS`, or one on the procedure's transformation for another N.

    Raises ConfigError for an unknown name.

    >>> method_of("qrpo-for-32").about
    "QRPO on the procedure's transformation, for N = 32"
    """
    if name in METHODS:
        return METHODS[name]
    if (match := re.fullmatch(r"(.+)-for-(\d+)", name)) and match[1] in METHODS:
        method, n = METHODS[match[1]], int(match[2])
        if method.transform != AWARE:
            raise ConfigError(f"{name} is none: {match[1]} has the same transformation for every N")
        return replace(method, about=f"{method.about}, for N = {n}", n=n)
    raise ConfigError(f"unknown method {name!r}; {hint(name, METHODS)}")


class Compared:
    """The policies of some methods at some budgets, as policies of the recipe; ``more`` has further budgets by method.

    They are called METHOD-BUDGET, or METHOD-nN if their strength is the n of Best-of-n: the n whose KL is nearest to
    the budget, so that two budgets may share a policy. A policy that tells them of ranks comes with them and is no
    method. Best-of-n itself is not a policy of the recipe: its responses are selected from one half of the reference's
    samples, and the other half is the base.
    """

    def __init__(
        self,
        recipe: Recipe,
        methods: Sequence[str],
        budgets: Sequence[float],
        more: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self.budgets, self.more = budgets, more or {}
        self.by_method: dict[str, list[str]] = {method: [] for method in methods}
        self.by_budget: dict[float, list[str]] = {budget: [] for budget in budgets}
        self.itself: dict[str, int] = {}
        if ITSELF in methods:
            largest = recipe.evaluate.samples // 2 // extreme_procedure(recipe).n
            if largest < 2:
                raise ConfigError(
                    f"{ITSELF} served by {recipe.procedure.name} needs evaluate.samples of at least "
                    f"{4 * extreme_procedure(recipe).n}, found {recipe.evaluate.samples}"
                )
            for budget in budgets:
                n = min(nearest_n(budget), largest)
                self.itself[f"best-of-{n}"] = n
                self.by_budget[budget].append(f"best-of-{n}")
            self.by_method[ITSELF] = list(self.itself)
        policies: dict[str, Solver] = {}
        trained = [method for method in methods if method != ITSELF]
        alone = [(budget, [method]) for method, own in self.more.items() for budget in own]
        for budget, together in [*((budget, trained) for budget in budgets), *alone]:
            for method, policy in _checked(recipe, together, budget).items():
                name = f"{method}-n{policy.n}" if isinstance(policy, ToBestOfN) else f"{method}-{budget:g}"
                if recipe.policies.get(name, policy).model_dump() != policy.model_dump():
                    raise _taken(name)
                if name not in policies:
                    self.by_method[method].append(name)
                policies[name] = policy
                if budget in budgets:
                    self.by_budget[budget].append(name)
        self.recipe = recipe.model_copy(update={"policies": policies})


def bracketing_budgets(recipe: Recipe, compared: Compared, spent: Mapping[str, float]) -> dict[str, list[float]]:
    """Return the further budgets, by method, with which every method has policies on both sides of the median KLs.

    ``spent`` is the mean KL of each policy. A policy's KL is taken as proportional to its budget, and the median is
    overshot by a fifth. A method that cannot have the budget, because the rollouts cannot spend it, gets none, nor does
    one that learnt nothing from its smallest budget get a lower one.
    """
    more = {method: list(own) for method, own in compared.more.items()}
    medians = [float(np.median([spent[name] for name in names])) for names in compared.by_budget.values()]
    for method, names in compared.by_method.items():
        if method == ITSELF:
            continue
        kls = [max(spent[name], LEAST_KL) for name in names]
        budgets = [*compared.budgets, *compared.more.get(method, [])]
        lower = min(budgets) * max(min(medians) / max(min(kls), min(medians)) / OVERSHOT, 1 / FAR)
        upper = max(budgets) * min(max(medians) / max(min(max(kls), max(medians)), LEAST_KL) * OVERSHOT, FAR)
        for missing, budget in ((min(kls) > min(medians), lower), (max(kls) < max(medians), upper)):
            if missing and _can_have(recipe, method, rounded := float(f"{budget:.3g}")):
                more.setdefault(method, []).append(rounded)
    return more


def _can_have(recipe: Recipe, method: str, budget: float) -> bool:
    references = partial(reference_rewards, Layout(Path(recipe.run_dir)))
    try:
        for policy in _checked(recipe, [method], budget).values():
            policy.raw_beta(recipe.procedure, references)
    except ConfigError:
        return False
    return True


@cache
def aware_transform(procedure: Extreme, kl: float, rollouts: int) -> str:
    """Return the name of the transformation that loses least at ``kl`` nats with K ``rollouts`` (`theory.choose`).

    The optimum of exact ranks has no name. Raises ConfigError for a KL that the rollouts cannot spend.

    >>> from infalign import BestOfN
    >>> aware_transform(BestOfN(4), 0.5, 100)
    'exp:13'
    """
    from infalign.theory.choose import rank  # with SciPy's solvers, which the help does not need

    candidates = rank(procedure, kl=kl, rollouts=rollouts).candidates  # the best first
    return next(one.transform.name for one in candidates if not isinstance(one.transform, Tabulated))


def nearest_n(kl: float) -> int:
    """Return the n ≥ 2 whose Best-of-n has the KL, log n − (n − 1)/n, nearest to ``kl`` nats.

    >>> [nearest_n(kl) for kl in (0.01, 0.5, 1.0)]
    [2, 3, 6]
    """

    below = 2
    while best_of_n_kl_bound(below + 1) <= kl:
        below += 1
    return min(below, below + 1, key=lambda n: abs(best_of_n_kl_bound(n) - kl))


def extreme_procedure(recipe: Recipe) -> Extreme:
    """Return the procedure that methods are compared for. Raises ConfigError unless it is best- or worst-of-N."""
    if not is_extreme(recipe.procedure):
        raise ConfigError(
            f"methods are compared for best-of-N or worst-of-N, and the recipe's procedure is {recipe.procedure.name}; "
            "change procedure, for example --set procedure=best-of-4"
        )
    return recipe.procedure


def possible_methods(
    recipe: Recipe, budgets: Sequence[float], names: Collection[str] = METHODS
) -> tuple[list[str], dict[str, str]]:
    """Return those of some methods for which the recipe has all settings, and why the others are left out."""
    own = any(policy.generates for policy in recipe.policies.values())
    chosen, left_out = [], {}
    for name in names:
        try:
            if method_of(name).generates and not own:
                raise ConfigError("the recipe has no on-policy policy to take its fit from; name it to use defaults")
            if name == ITSELF:
                Compared(recipe, [name], budgets)
            for budget in budgets if name != ITSELF else []:
                _checked(recipe, [name], budget)
            chosen.append(name)
        except ConfigError as error:
            left_out[name] = str(error)
    return chosen, left_out


def _checked(recipe: Recipe, methods: Sequence[str], budget: float) -> dict[str, Solver]:
    """Return the policy of each method at a budget, checked as part of the recipe."""
    if not methods:
        return {}
    settings = {name: method_of(name).settings(recipe, budget) for name in methods}
    try:
        return dict(Recipe.model_validate(recipe.model_dump() | {"policies": settings}).policies)
    except ValidationError as error:
        reasons = (
            f"{'.'.join(map(str, untagged(e['loc'])))} {e['msg'].removeprefix('Value error, ')}".lstrip()
            for e in error.errors()
        )
        raise ConfigError(f"at {budget:g} nats: {'; '.join(reasons)}") from error


def _taken(name: str) -> ConfigError:
    return ConfigError(f"the recipe has another policy of the name {name}; rename it")


def _fit(recipe: Recipe, method: Method) -> dict[str, Any]:
    """Return how a method is trained, from the recipe's first policy of its kind.

    All offline solvers share the form of the first one, with its guide if any, and those of its kind its loss. What
    trains one language model takes the fit of a policy that is one, if there is such a policy.
    """
    policies = [policy for policy in recipe.policies.values() if policy.generates == method.generates]
    if method.generates and policies:
        return policies[0].model_dump(include={"fit", "generations"})
    offline = [policy for policy in policies if isinstance(policy, Offline)]
    if not (method.generates or offline):
        raise ConfigError(f"{method.solver} takes its fit from an offline policy, and the recipe has none; add one")
    if method.solver is not None and issubclass(KINDS[method.solver], Offline):
        shared = {"fit", "guide", "loss"} if offline[0].solver == method.solver else {"fit", "guide"}
        return offline[0].model_dump(include=shared)
    from_rollouts = [policy for policy in recipe.policies.values() if not policy.generates]
    fit = min(from_rollouts, key=lambda policy: getattr(policy, "guide", None) is not None).fit
    if not method.generates:
        return {"fit": fit.model_dump()}
    return {"fit": fit.model_dump() | {"epochs": LONGER * fit.epochs, "learning_rate": FASTER * fit.learning_rate}}
