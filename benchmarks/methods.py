"""Methods that can be compared: a solver with its objective, but without its strength, which is a KL budget."""

import math
import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from run_files import Recipe

from infalign import BestOfN, ConfigError, Tabulated, WorstOfN, choose

TO_BEST_OF_N, GENERATING = ("bon-sft", "bonbon"), ("rloo", "ppo", "grpo", "maxk", "bond")  # solvers
AWARE = "aware"  # the best transformation for the recipe's procedure, K and the budget
EPOCHS_FACTOR, LEARNING_RATE_FACTOR = 3, 2.5  # on-policy relative to offline, from RLOO measured at the KL of QRPO


@dataclass(frozen=True)
class Method:
    """A solver and the transformation that it optimizes: a policy of a recipe, without its strength."""

    about: str
    solver: str
    transform: str | None = None  # None if the solver has a fixed one
    ours: bool = False  # if it optimizes the served win rate, by our transformation or directly; else a baseline
    n: int | None = None  # the N that its transformation is for, if not that of the recipe's procedure

    @property
    def to_best_of_n(self) -> bool:
        """Whether its strength is the n of Best-of-n."""
        return self.solver in TO_BEST_OF_N

    @property
    def generates(self) -> bool:
        """Whether it draws responses while it trains."""
        return self.solver in GENERATING

    def settings(self, recipe: Recipe, budget: float) -> dict[str, Any]:
        """Return the settings of its policy at a KL of ``budget`` nats: strength, transformation and fit."""
        fixed = {} if self.transform is None else {"transform": self.transform}
        if self.transform == AWARE:
            served = extreme_procedure(recipe)
            served = served if self.n is None else replace(served, n=self.n)
            candidates = choose(served, kl=budget, rollouts=recipe.rollout.k).candidates
            fixed = {"transform": next(c.transform.name for c in candidates if not isinstance(c.transform, Tabulated))}
        strength = {"n": nearest_n(budget)} if self.to_best_of_n else {"kl_budget": budget}
        return {"solver": self.solver, **fixed, **strength, **self._fit(recipe)}

    def _fit(self, recipe: Recipe) -> dict[str, Any]:
        """Return how it is trained, from the recipe's first policy of its kind.

        All offline solvers share fit and guide of the first one, and those of its kind its loss. What trains one
        language model takes the fit of a policy that is one, if there is such a policy.
        """
        policies = list(recipe.policies.values())
        on_policy = [policy for policy in policies if policy.draws_per_response]
        offline = [policy for policy in policies if policy.has_objective]
        if self.generates and on_policy:
            return on_policy[0].model_dump(include={"fit", "generations"})
        if not (self.generates or offline):
            raise ConfigError(f"{self.solver} takes its fit from an offline policy, and the recipe has none; add one")
        if not self.generates:
            shared = {"fit", "guide", "loss"} if offline[0].solver == self.solver else {"fit", "guide"}
            return offline[0].model_dump(include=shared)
        from_rollouts = [policy for policy in policies if not policy.draws_per_response]
        fit = min(from_rollouts, key=lambda policy: getattr(policy, "guide", None) is not None).fit
        fit = fit.with_learning_rate(pretrained=recipe.policy.model is not None, adapter=fit.lora is not None)
        longer = {
            "epochs": EPOCHS_FACTOR * fit.passes,
            "learning_rate": LEARNING_RATE_FACTOR * (fit.learning_rate or 0.0),
        }
        return {"fit": fit.model_dump() | (longer if self.generates else {})}


METHODS = {
    "qrpo": Method("QRPO on the procedure's transformation", "qrpo", AWARE, ours=True),
    "qrpo-identity": Method("QRPO on the identity: RLHF on the win rate", "qrpo", "identity"),
    "qrpo-raw": Method("QRPO on the raw reward: ordinary RLHF", "qrpo", "raw"),
    "qrpo-raw-prompt": Method("QRPO on the reward standardized per prompt", "qrpo", "raw-prompt"),
    "resample": Method("fine-tuning on weighted rollouts, same transformation", "resample", AWARE),
    "ipo": Method("IPO on pairs of rollouts", "ipo"),
    "bonbon": Method("BoNBoN: the best and the worst of n, the paper's loss", "bonbon"),
    "bon-sft": Method("fine-tuning on the best of n", "bon-sft"),
    "rloo": Method("RLOO on the procedure's transformation", "rloo", AWARE, ours=True),
    "rloo-identity": Method("RLOO on the identity", "rloo", "identity"),
    "rloo-raw": Method("RLOO on the raw reward", "rloo", "raw"),
    "rloo-raw-prompt": Method("RLOO on the reward standardized per prompt", "rloo", "raw-prompt"),
    "rloo-par": Method("RLOO on the preference probability (PAR)", "rloo", "par"),
    "rloo-lsc": Method("RLOO on the log-sigmoid of the centered reward", "rloo", "lsc:0.85"),
    "ppo": Method("PPO on the procedure's transformation", "ppo", AWARE, ours=True),
    "ppo-identity": Method("PPO on the identity", "ppo", "identity"),
    "ppo-raw": Method("PPO on the raw reward", "ppo", "raw"),
    "grpo": Method("GRPO without group statistics, same transformation", "grpo", AWARE, ours=True),
    "grpo-raw": Method("GRPO without group statistics, on the raw reward", "grpo", "raw"),
    "maxk": Method("policy gradient of the served win rate itself", "maxk", ours=True),
    "bond": Method("J-BOND: toward Best-of-2 of a moving anchor", "bond"),
}


def read_method(name: str) -> Method:
    """Return the method that ``name`` spells: one of `METHODS`, or one on the procedure's transformation for another N.

    Raises ConfigError for an unknown name.

    >>> read_method("qrpo-for-32").about
    "QRPO on the procedure's transformation, for N = 32"
    """
    if name in METHODS:
        return METHODS[name]
    if (match := re.fullmatch(r"(.+)-for-(\d+)", name)) and match[1] in METHODS:
        method, n = METHODS[match[1]], int(match[2])
        if method.transform != AWARE:
            raise ConfigError(f"{name} does not exist: {match[1]} has the same transformation for every N")
        return replace(method, about=f"{method.about}, for N = {n}", n=n)
    close = get_close_matches(name, METHODS, n=1)
    known = f"did you mean {close[0]}?" if close else f"known: {', '.join(METHODS)}"
    raise ConfigError(f"unknown method {name!r}; {known}")


def extreme_procedure(recipe: Recipe) -> BestOfN | WorstOfN:
    """Return the recipe's procedure. Raises ConfigError unless it is best- or worst-of-N."""
    if not isinstance(recipe.procedure, BestOfN | WorstOfN):
        raise ConfigError(
            "methods can be compared for best-of-N or worst-of-N, but the recipe's procedure is "
            f"{recipe.procedure.name}; change it, for example with --set procedure=best-of-4"
        )
    return recipe.procedure


def nearest_n(kl: float) -> int:
    """Return the n ≥ 2 whose Best-of-n has the KL, log n − (n − 1)/n, nearest to ``kl`` nats.

    >>> [nearest_n(kl) for kl in (0.01, 0.5, 1.0)]
    [2, 3, 6]
    """
    n = 2
    while abs(_best_of_n_kl(n + 1) - kl) < abs(_best_of_n_kl(n) - kl):
        n += 1
    return n


def _best_of_n_kl(n: int) -> float:
    return math.log(n) - (n - 1) / n
