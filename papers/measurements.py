"""What is measured for the claims of the paper: quantities of policies, and numbers of each seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from drawings import Point, analytic_points
from hacking import Hacking
from run_files import column, records, reference_rewards
from seeds import Quantity, Seed, Trained, lead, over_seeds

from infalign import Estimate, Samples, calibrate, rewind_draws

K = 100  # the paper's rollouts per prompt
USUAL_KL = (0.1, 3.0)  # nats: where theory's transformations are compared


@dataclass(frozen=True)
class Measurement:
    """What was measured for a claim: by seed, or an exact number; ``note`` says what of, or why there is nothing."""

    seeds: Sequence[Trained] = ()
    note: str = ""
    exact: float | None = None

    def estimate(self) -> Estimate | None:
        """Return the mean with its interval over seeds and prompts; None if nothing was measured."""
        if self.exact is not None:
            return Estimate(self.exact, self.exact, self.exact)
        return over_seeds(self.seeds) if self.seeds else None


class RawReward(Quantity):
    """The reward above the reference's, in standard deviations of the reference's rewards within prompts."""

    label: ClassVar[str] = "raw reward above the reference, sd"

    def of(self, seed: Seed, name: str) -> np.ndarray:
        """Return each prompt's mean reward above the reference's."""
        base = seed.evaluated.column("reference", "reward")
        own = seed.evaluated.column(name, "reward").mean(axis=1)
        return np.asarray((own - base.mean(axis=1)) / np.sqrt(base.var(axis=1, ddof=1).mean()))


class RewindDraws(Quantity):
    """How many draws the recipe's Rewind-and-Repeat takes."""

    label: ClassVar[str] = "draws per response"

    def of(self, seed: Seed, name: str) -> np.ndarray:
        """Return the expected number of draws to each prompt."""
        own, base = (
            Samples(values, values) for values in (seed.evaluated.column(m, "reward") for m in (name, "reference"))
        )
        return rewind_draws(base if name == "reference" else own, base, seed.recipe.rewind)


def lead_over_best(seeds: Sequence[Seed], ours: str, others: Sequence[str], quantity: Quantity) -> Measurement:
    """Return how far a method is above the best of others, each at a KL that the two spend, the mean over the budgets.

    A method that spends little does so lower the KL of no pair but its own. The best is the one over which the lead is
    smallest: one method in all seeds, chosen by these very numbers, which favors it a little. Budgets at which the two
    cannot be compared do not count.
    """
    for seed in seeds:
        if reason := quantity.lacks(seed.recipe):
            return Measurement(note=reason)
        if ours not in seed.by_method or seed.by_method.keys().isdisjoint(others):
            return Measurement(note=f"{ours} or all that it is compared with was left out")
    leads = {other: [mean_lead(seed, ours, other, quantity) for seed in seeds] for other in others}
    over = {other: known for other, found in leads.items() if len(known := [one for one in found if one]) == len(seeds)}
    if not over:
        return Measurement(note=f"in some seed {ours} spends no KL that another method spends too; give more budgets")
    best = min(over, key=lambda other: float(np.mean([one.mean for one in over[other]])))
    missed = [other for other in others if other not in over]
    return Measurement(over[best], f"{ours} over {best}" + (f"; not compared: {', '.join(missed)}" if missed else ""))


def mean_lead(seed: Seed, ours: str, other: str, quantity: Quantity) -> Trained | None:
    """Return a method's lead over another, the mean over the budgets at which they can be compared, if there is one."""
    if other not in seed.by_method:
        return None
    found = []
    for names in seed.policies.by_budget.values():
        both = [name for name in names if name in seed.by_method[ours] or name in seed.by_method[other]]
        median = float(np.median([seed.kl(name).mean() for name in both]))
        if matched := lead((seed, ours), (seed, other), quantity, median):
            found.append(matched)
    if not found:
        return None
    shifts = np.mean([(own.shift, -its.shift) for own, its in found], axis=0)
    return seed.trained(np.mean([own.values - its.values for own, its in found], axis=0), *shifts)


@cache
def theory_points() -> list[Point]:
    """Return theory's curves."""
    return analytic_points()


def least_lead_in_theory(procedure: str, ours: str, others: Sequence[str], seeds: Sequence[Seed]) -> Measurement:
    """Return how much more a transformation wins than the best of others, at the KL where that is least."""
    points = [point for point in theory_points() if point.procedure == procedure]
    wins = {(point.transform, round(point.kl, 6)): point.win_rate for point in points}
    usual = [kl for name, kl in wins if name == ours and USUAL_KL[0] <= kl <= USUAL_KL[1]]
    return Measurement(exact=min(wins[ours, kl] - max(wins[other, kl] for other in others) for kl in usual))


def miscalibration(seeds: Sequence[Seed]) -> Measurement:
    """Return how far the rank of a rollout among all prompts' rewards is from its rank among its own prompt's.

    What the same numbers give if they are dealt to the prompts at random is subtracted: with K rollouts per prompt,
    ranks within it are not exact either.
    """

    def of(seed: Seed) -> Trained:
        rewards_PK = reference_rewards(seed.recipe.run_dir)
        everyone = np.sort(rewards_PK, axis=None)

        def distance(dealt_PK: np.ndarray) -> np.ndarray:
            within = calibrate(dealt_PK, np.sort(dealt_PK, axis=1))
            among_all = calibrate(dealt_PK.ravel(), everyone).reshape(dealt_PK.shape)
            return np.asarray(np.abs(within - among_all).mean(axis=1))

        dealt = np.random.default_rng(0).permutation(rewards_PK.ravel()).reshape(rewards_PK.shape)
        prompts = column(seed.root / "calibrated.parquet", "prompt_id")
        return Trained(prompts, distance(rewards_PK) - distance(dealt).mean())

    return Measurement([of(seed) for seed in seeds], "mean distance of ranks, chance subtracted")


def decided_rightly(model: str, above: str | None, seeds: Sequence[Seed]) -> Measurement:
    """Return the share of inverted test pairs that a model decides rightly, or how far that is above another's."""
    found = []
    for seed in seeds:
        prompt_ids, right = Hacking(seed.recipe).decisions()
        found.append(Trained(prompt_ids, right[model]["inverted"] - (right[above]["inverted"] if above else 0.0)))
    return Measurement(found)


def calibration_cost(trained: str, seeds: Sequence[Seed]) -> Measurement:
    """Return the seconds of calibration with the paper's K by those of training a policy of a method, the mean.

    Calibration is drawing, scoring and ranking the rollouts, which takes time in proportion to K.
    """
    found = []
    for seed in seeds:
        if trained not in seed.by_method:
            return Measurement(note=f"{trained} was not trained")
        made = records(seed.root)
        drawn = [name for name in made if name.startswith(("rollout-", "score-"))]
        spent = sum(made[name]["seconds"] for name in [*drawn, "calibrate"])
        training = np.mean([made[f"train-{name}"]["seconds"] for name in seed.by_method[trained]])
        found.append(Trained((), np.array([spent * K / seed.recipe.rollout.k / training])))
    return Measurement(found, f"from K = {seeds[0].recipe.rollout.k}")


def draws_saved(ours: str, seeds: Sequence[Seed]) -> Measurement:
    """Return how many draws fewer a method's policies take than the reference, the mean over its budgets."""
    if any(ours not in seed.by_method for seed in seeds):
        return Measurement(note=f"{ours} was not trained")
    found = []
    for seed in seeds:
        own = np.mean([seed.values(RewindDraws(), name) for name in seed.by_method[ours]], axis=0)
        found.append(seed.trained(seed.values(RewindDraws(), "reference") - own))
    return Measurement(found, f"{ours}, mean over its budgets")


def raw_reward_bought(ours: str, other: str, seeds: Sequence[Seed]) -> Measurement:
    """Return how much more raw reward a method has than another at one KL."""
    return lead_over_best(seeds, ours, [other], RawReward())
