"""The policies of some methods at some KL budgets, as policies of a recipe."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from methods import METHODS, read_method
from pydantic import ValidationError
from run_files import Recipe, reference_rewards

from infalign import ConfigError

BUDGETS = (0.5, 1.0)  # nats, by default
MIN_KL = 1e-3  # nats; with less a policy has learned nothing
MAX_KL_RATIO = 4.0  # between what is compared, and by which a budget is changed at most
OVERSHOOT = 1.2  # by how much a further budget of a method aims beyond the KL that it is to bracket


class MethodPolicies:
    """The policies of some methods at some budgets; ``more_budgets`` has further budgets by method.

    They are called METHOD-BUDGET, such as qrpo-0_5 at 0.5 nats, or METHOD-nN if their strength is the n of Best-of-n:
    the n whose KL is nearest to the budget, so that two budgets may share a policy. Raises ConfigError for settings
    that a method cannot have.
    """

    def __init__(
        self,
        source: Recipe,
        methods: Sequence[str],
        budgets: Sequence[float],
        more_budgets: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self.source, self.budgets, self.more_budgets = source, budgets, more_budgets or {}
        self.by_method: dict[str, list[str]] = {method: [] for method in methods}
        self.by_budget: dict[float, list[str]] = {budget: [] for budget in budgets}
        policies = {}
        for method, names in self.by_method.items():
            to_best_of_n = read_method(method).to_best_of_n
            for budget in (*budgets, *self.more_budgets.get(method, ())):
                policy = _policy_at(source, method, budget)
                name = f"{method}-n{policy.n}" if to_best_of_n else f"{method}-{budget:.15g}".replace(".", "_")
                if source.policies.get(name, policy).model_dump() != policy.model_dump():
                    raise ConfigError(f"the recipe already has another policy named {name}; rename that policy")
                policies[name] = policy
                if name not in names:
                    names.append(name)
                if budget in budgets:
                    self.by_budget[budget].append(name)
        self.recipe = source.model_copy(update={"policies": policies})

    def law_at(self, name: str, nats: float) -> Any:
        """Return theory's law of a policy at this KL; None if there is none."""
        aim = self.recipe.policies[name].aim(self.recipe.procedure)
        return None if aim is None else aim.rank_law(nats)

    def bracketed(self, spent: Mapping[str, float]) -> "MethodPolicies":
        """Return the policies with which every method has some on both sides of the median KL for each budget.

        ``spent`` is the mean KL of each policy. A policy's KL is taken as proportional to its budget, and the median is
        overshot by a fifth. A method that cannot have the budget, because the rollouts cannot spend it, gets none, nor
        does one that learned nothing from its smallest budget get a lower one.
        """
        more = {method: list(own) for method, own in self.more_budgets.items()}
        medians = [float(np.median([spent[name] for name in names])) for names in self.by_budget.values()]
        for method, names in self.by_method.items():
            kls = [max(spent[name], MIN_KL) for name in names]
            budgets = [*self.budgets, *self.more_budgets.get(method, [])]
            lower = min(budgets) * max(min(medians) / max(min(kls), min(medians)) / OVERSHOOT, 1 / MAX_KL_RATIO)
            upper = max(budgets) * min(
                max(medians) / max(min(max(kls), max(medians)), MIN_KL) * OVERSHOOT, MAX_KL_RATIO
            )
            for missing, budget in ((min(kls) > min(medians), lower), (max(kls) < max(medians), upper)):
                if missing and _can_spend(self.source, method, rounded := float(f"{budget:.3g}")):
                    more.setdefault(method, []).append(rounded)
        return MethodPolicies(self.source, list(self.by_method), self.budgets, more)


def check_budgets(budgets: Sequence[float] | None) -> tuple[float, ...]:
    """Return KL budgets, `BUDGETS` for None, in order. Raises ConfigError for one that is not positive."""
    given = BUDGETS if budgets is None else budgets
    if not given or not all(0 < budget < math.inf for budget in given):
        raise ConfigError(f"KL budgets must be positive numbers of nats such as 0.5 and 1; found {list(given)}")
    return tuple(sorted(set(given)))


def possible_methods(
    recipe: Recipe, budgets: Sequence[float], names: Collection[str] = METHODS
) -> tuple[list[str], dict[str, str]]:
    """Return those of some methods for which the recipe has all settings, and why the others are left out."""
    on_policy = any(policy.draws_per_response for policy in recipe.policies.values())
    chosen, left_out = [], {}
    for name in names:
        try:
            if read_method(name).generates and not on_policy:
                raise ConfigError("the recipe has no on-policy policy to take its fit from; name it to use defaults")
            MethodPolicies(recipe, [name], budgets)
            chosen.append(name)
        except ConfigError as error:
            left_out[name] = str(error)
    return chosen, left_out


def _policy_at(recipe: Recipe, method: str, budget: float) -> Any:
    """Return the policy of a method at a budget, checked as part of the recipe."""
    settings = {"policies": {method: read_method(method).settings(recipe, budget)}}
    try:
        return Recipe.model_validate(recipe.model_dump() | settings).policies[method]
    except ValidationError as error:
        reasons = (
            f"{'.'.join(map(str, e['loc']))} {e['msg'].removeprefix('Value error, ')}".lstrip() for e in error.errors()
        )
        raise ConfigError(f"at {budget:g} nats: {'; '.join(reasons)}") from error


def _can_spend(recipe: Recipe, method: str, budget: float) -> bool:
    """Return whether a method may have a budget with the run's rollouts."""
    try:
        aim = _policy_at(recipe, method, budget).aim(recipe.procedure)
        if aim is not None:
            aim.law(reference_rewards(recipe.run_dir))
    except ConfigError:
        return False
    return True
