"""One recipe trained from several seeds, each in a run directory of its own, and what their evaluations say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from infalign.core.storage import listed, read_table
from infalign.evaluation.intervals import Estimate
from infalign.evaluation.matched import Matched
from infalign.evaluation.samples import Samples
from infalign.evaluation.seeds import Trained, over_seeds
from infalign.evaluation.win_rates import rewind_draws, win_rates
from infalign.experiments.compare import at_one_kl, served_itself
from infalign.experiments.methods import Compared
from infalign.method.calibration import Array
from infalign.method.procedures import Served, Standard, is_extreme
from infalign.recipe.layout import Layout
from infalign.recipe.settings import Recipe
from infalign.report.evaluated import Evaluated
from infalign.report.one_kl import AtOneKL
from infalign.report.words import SPOKEN


class Quantity(Protocol):
    """What figures draw against KL; ``scale`` is by what values are multiplied on the axis: 100 for shares."""

    scale: ClassVar[float] = 1.0

    @property
    def label(self) -> str:
        """What the axis says."""

    def lacks(self, recipe: Recipe) -> str:
        """Return why a recipe's evaluation cannot give it, "" if it can."""
        return ""

    def of(self, seed: "Seed", name: str) -> Array:
        """Return the value (P,) of a policy for each test prompt."""


@dataclass(frozen=True)
class WinRate(Quantity):
    """The win rate against the reference, both served by a procedure, by a judge."""

    procedure: Served
    judge: str
    scale: ClassVar[float] = 100.0
    start: ClassVar[float] = 0.5  # at a KL of 0

    @property
    def label(self) -> str:
        """``win rate as best-of-4 by the judge, %``."""
        return f"{self.procedure.name} by {SPOKEN[self.judge]}, %"

    def lacks(self, recipe: Recipe) -> str:
        """Return what the recipe's judges or samples do not allow."""
        if self.judge not in recipe.rewards:
            return f"the recipe has no {self.judge}"
        if is_extreme(self.procedure) and self.procedure.n > recipe.evaluate.samples:
            found = recipe.evaluate.samples
            return f"{self.procedure.name} needs evaluate.samples of at least {self.procedure.n}, found {found}"
        return ""

    def of(self, seed: "Seed", name: str) -> Array:
        """Return each prompt's win rate."""
        evaluated = seed.evaluated
        if name in seed.itself:
            _, wins = served_itself(seed.recipe, evaluated, seed.itself[name], [self.procedure])
            return wins[self.judge][self.procedure.name]
        return win_rates(
            evaluated.judged_by(self.judge, name), evaluated.judged_by(self.judge, "reference"), self.procedure
        )

    def gain(self, at: AtOneKL, method: str) -> Callable[[float], float]:
        """Return theory's gain of the method's transformation."""
        return at.gain(method, self.procedure)


@dataclass(frozen=True)
class RawReward(Quantity):
    """The reward above the reference's, in standard deviations of the reference's rewards within prompts."""

    start: ClassVar[float] = 0.0
    label: ClassVar[str] = "raw reward above the reference, sd"

    def of(self, seed: "Seed", name: str) -> Array:
        """Return each prompt's mean reward above the reference's."""
        base = seed.evaluated.column("reference", "reward")
        own = seed.evaluated.column(name, "reward").mean(axis=1)
        return np.asarray((own - base.mean(axis=1)) / np.sqrt(base.var(axis=1, ddof=1).mean()))

    def gain(self, at: AtOneKL, method: str) -> Callable[[float], float]:
        """Return √KL, as which rewards rise."""
        return np.sqrt


@dataclass(frozen=True)
class RewindDraws(Quantity):
    """How many draws the recipe's Rewind-and-Repeat takes."""

    label: ClassVar[str] = "draws a response"

    def of(self, seed: "Seed", name: str) -> Array:
        """Return the expected number of draws to each prompt."""
        base = seed.evaluated.column("reference", "reward")
        reference = Samples(base, base)
        if name == "reference":
            return rewind_draws(reference, reference, seed.evaluated.rewind)
        own = seed.evaluated.column(name, "reward")
        return rewind_draws(Samples(own, own), reference, seed.evaluated.rewind)


@dataclass(frozen=True)
class Seed:
    """A seed's recipe, in a run directory of its own, with the methods that were trained there."""

    recipe: Recipe
    compared: Compared | None = None  # None where no figure compares methods
    _values: dict[tuple[Quantity, str], Array] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def recipe_of(cls, recipe: Recipe, number: int, output: Path) -> Recipe:
        """Return a recipe with another seed, in the folder seed-N of ``output``."""
        return recipe.model_copy(update={"seed": number, "run_dir": str(output / f"seed-{number}")})

    @property
    def layout(self) -> Layout:
        """The run directory."""
        return Layout(Path(self.recipe.run_dir))

    @cached_property
    def evaluated(self) -> Evaluated:
        """The scored samples of its models."""
        return Evaluated.of(self.recipe, self.layout)

    @cached_property
    def prompt_ids(self) -> list[str]:
        """The test prompts, in the order of all values."""
        path = self.layout.evaluation("reference") / "scores.parquet"
        return listed(read_table(path, ["prompt_id"]), "prompt_id")[:: self.evaluated.samples]

    @property
    def itself(self) -> Mapping[str, int]:
        """The names of Best-of-n itself, with n."""
        return {} if self.compared is None else self.compared.itself

    @property
    def trained_methods(self) -> frozenset[str]:
        """The methods that were trained."""
        return frozenset() if self.compared is None else frozenset(self.compared.by_method)

    def policies_of(self, method: str) -> Sequence[str]:
        """Return the names of a method's policies."""
        assert self.compared is not None
        return self.compared.by_method[method]

    def among(self, methods: Sequence[str]) -> Compared:
        """Return the policies of those of some methods that were trained."""
        assert self.compared is not None
        known = [method for method in methods if method in self.trained_methods]
        more = {method: own for method, own in self.compared.more.items() if method in known}
        return Compared(self.recipe, known, self.compared.budgets, more)

    def kl(self, name: str) -> Array:
        """Return a policy's KL (P,) to the reference in nats; of Best-of-n itself the estimate."""
        if name in self.itself:
            return served_itself(self.recipe, self.evaluated, self.itself[name], [Standard()])[0]
        return self.evaluated.kl(name)

    def values(self, quantity: Quantity, name: str) -> Array:
        """Return a quantity (P,) of a policy; it is computed once."""
        if (quantity, name) not in self._values:
            self._values[quantity, name] = quantity.of(self, name)
        return self._values[quantity, name]

    def trained(self, values_P: Array, *shifts: float) -> Trained:
        """Return values for the test prompts, with their ids."""
        return Trained(self.prompt_ids, values_P, shifts)


@dataclass(frozen=True)
class Measurement:
    """What was measured for a claim: by seed, or an exact number; ``note`` says what of, or why there is nothing."""

    seeds: Sequence[Trained] = ()
    note: str = ""
    exact: float | None = None

    def estimate(self, confidence: float) -> Estimate | None:
        """Return the mean with its interval over seeds and prompts; None if nothing was measured."""
        if self.exact is not None:
            return Estimate(self.exact, self.exact, self.exact)
        return over_seeds(self.seeds, confidence=confidence) if self.seeds else None


def lead(seeds: Sequence[Seed], ours: str, others: Sequence[str], quantity: WinRate | RawReward) -> Measurement:
    """Return how far a method is above the best of others, each at a KL that the two spend, the mean over the budgets.

    A method that spends little does so lower the KL of no pair but its own. The best is the one over which the lead is
    smallest: one method in all seeds, chosen by these very numbers, which favours it a little. Budgets at which the
    two cannot be compared do not count.
    """
    for seed in seeds:
        if reason := quantity.lacks(seed.recipe):
            return Measurement(note=reason)
        if ours not in seed.trained_methods or seed.trained_methods.isdisjoint(others):
            return Measurement(note=f"{ours} or all that it is compared with was left out")
    leads = {other: [_lead(seed, ours, other, quantity) for seed in seeds] for other in others}
    over = {other: known for other, found in leads.items() if len(known := [one for one in found if one]) == len(seeds)}
    if not over:
        return Measurement(note=f"in some seed {ours} spends no KL that another method spends too; give more budgets")
    best = min(over, key=lambda other: float(np.mean([one.values.mean() for one in over[other]])))
    missed = [other for other in others if other not in over]
    return Measurement(over[best], f"{ours} over {best}" + (f"; not compared: {', '.join(missed)}" if missed else ""))


def _lead(seed: Seed, ours: str, other: str, quantity: WinRate | RawReward) -> Trained | None:
    """Return a method's lead over another, the mean over the budgets at which they can be compared, if there is one."""
    compared = seed.among([ours, other])
    kls = {name: seed.kl(name) for names in compared.by_method.values() for name in names}
    found: list[tuple[Matched, Matched]] = []
    for budget in compared.budgets if other in compared.by_method else ():
        at = at_one_kl(compared, budget, kls)
        if at.kl is None or not {ours, other} <= at.methods.keys():
            continue
        above = {name: 0.5 + seed.values(quantity, name) - quantity.start for name in kls}
        found.append(
            (at.matched(ours, above, quantity.gain(at, ours)), at.matched(other, above, quantity.gain(at, other)))
        )
    if not found:
        return None
    shifts = np.mean([(own.shift, -its.shift) for own, its in found], axis=0)
    return seed.trained(np.mean([own.values - its.values for own, its in found], axis=0), *shifts)
