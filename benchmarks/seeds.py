"""One recipe trained from several seeds: values by test prompt, and means with intervals over seeds and prompts.

The one module for this, of leads.py, forms.py, controls.py and on_policy.py and of `papers/`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from best_of_n import BEST_OF_N, largest_n, serve_best_of_n
from method_policies import MIN_KL, MethodPolicies
from methods import nearest_n
from run_files import Evaluated, Recipe, load_recipe
from scipy.special import stdtrit

from infalign import (
    BestOfN,
    ConfigError,
    DataError,
    Estimate,
    WorstOfN,
    estimate,
    law_at_kl,
    parse_procedure,
    rank_optimum,
    win_rates_of,
)
from infalign.report.equal_kl import AtOneKL, Matched, matched  # methods are compared as in a report

DEFAULT_SEEDS = ("0", "1", "2")
SPOKEN = {"reward": "the reward itself", "judge": "the judge", "gold": "the gold reward"}
MIN_GAP = 0.002  # between the win rates of identity and optimum; a share of a smaller gap is meaningless


def read_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the seeds, by default 0, 1 and 2, and the settings ``key=value`` of a recipe."""
    seeds, settings = ([word for word in words if ("=" in word) is setting] for setting in (False, True))
    return seeds or [*DEFAULT_SEEDS], settings


def recipe_of_seed(name: str, folder: Path, seed: str, settings: Sequence[str] = ()) -> Recipe:
    """Return a recipe with another seed, in the run directory seed-N of ``folder``."""
    return load_recipe(name, [f"run_dir={folder / f'seed-{seed}'}", f"seed={seed}", *settings])


@dataclass(frozen=True, slots=True)
class Trained:
    """What one seed's training gave: a value for each of its test prompts, or one value and no prompts.

    ``shifts`` are how far interpolation may have moved the mean, each in part or in full (`matched.Matched`).
    """

    prompt_ids: Sequence[str]
    values: np.ndarray
    shifts: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """The mean over prompts."""
        return float(self.values.mean())


def over_seeds(seeds: Sequence[Trained], *, confidence: float = 0.95) -> Estimate:
    """Return the mean over seeds with an interval for another training, evaluated on other prompts.

    It is as wide as two intervals together, their half widths added in squares: Student's over the seeds' means, and
    that over prompts (`intervals.estimate`) of each prompt's mean over the seeds that have it. If value = μ + a_seed +
    b_prompt + noise, the first holds the variance of a and of the noise, the second that of b and of the noise: all of
    it, and the noise twice, so the interval covers at least its confidence. Mean shifts by interpolation come on top.

    Raises DataError for fewer than two seeds.
    """
    if len(seeds) < 2:
        raise DataError(f"an interval over trainings needs at least 2 seeds, found {len(seeds)}")
    means = np.array([seed.mean for seed in seeds])
    mean = float(means.mean())
    of_seeds = stdtrit(len(seeds) - 1, 0.5 + confidence / 2.0) * means.std(ddof=1) / np.sqrt(len(seeds))
    by_prompt: dict[str, list[float]] = {}
    for seed in seeds:
        for prompt, value in zip(seed.prompt_ids, seed.values if seed.prompt_ids else (), strict=True):
            by_prompt.setdefault(prompt, []).append(float(value))
    below, above = 0.0, 0.0
    if by_prompt:
        of_prompts = estimate([np.mean(values) for values in by_prompt.values()], confidence=confidence)
        below, above = of_prompts.mean - of_prompts.low, of_prompts.high - of_prompts.mean
    shifts = np.array([seed.shifts for seed in seeds]).mean(axis=0)
    low = mean - np.hypot(of_seeds, below) + np.minimum(shifts, 0.0).sum()
    high = mean + np.hypot(of_seeds, above) + np.maximum(shifts, 0.0).sum()
    return Estimate(mean, float(low), float(high))


def estimated(seeds: Sequence[Trained]) -> dict[str, float]:
    """Return a mean with its 95 % interval over seeds and prompts, of one seed over prompts."""
    if len(seeds) > 1:
        return over_seeds(seeds).as_dict()
    found, shifts = estimate(seeds[0].values), np.array(seeds[0].shifts)
    low, high = found.low + np.minimum(shifts, 0.0).sum(), found.high + np.maximum(shifts, 0.0).sum()
    return Estimate(found.mean, float(low), float(high)).as_dict()


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval (Student's) of one number per seed, 0 if there is one seed."""
    if len(values) == 1:
        return 0.0
    found = over_seeds([Trained((), np.array([value])) for value in values])
    return found.high - found.mean


def mean_over_seeds(values: Sequence[float], digits: int = 2) -> str:
    """Return the mean of one number per seed with half the width of its interval, if there is one."""
    mean = f"{np.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {half_width(values):.{digits}f}"


@dataclass(frozen=True)
class Quantity:
    """A number of a policy by test prompt; ``scale`` multiplies it on axes, ``start`` is its value at a KL of 0."""

    scale: ClassVar[float] = 1.0
    start: ClassVar[float] = 0.0
    label: ClassVar[str]

    def lacks(self, recipe: Recipe) -> str:
        """Return why a recipe's evaluation cannot give it, "" if it can."""
        return ""

    def of(self, seed: "Seed", name: str) -> np.ndarray:
        """Return the value (P,) of a policy for each test prompt."""
        raise NotImplementedError

    def gain(self, at: AtOneKL, method: str) -> Callable[[float], float]:
        """Return the value above ``start`` as a function of the KL, by which it is interpolated."""
        return np.sqrt


@dataclass(frozen=True)
class WinRate(Quantity):
    """The win rate against the reference, both served by a procedure, by a judge."""

    procedure: Any
    judge: str
    scale: ClassVar[float] = 100.0
    start: ClassVar[float] = 0.5

    @property
    def label(self) -> str:
        """``best-of-4 by the judge, %``."""
        return f"{self.procedure.name} by {SPOKEN[self.judge]}, %"

    def lacks(self, recipe: Recipe) -> str:
        """Return what the recipe's judges or samples do not allow."""
        if self.judge not in recipe.rewards:
            return f"the recipe has no {self.judge}"
        if isinstance(self.procedure, BestOfN | WorstOfN) and self.procedure.n > recipe.evaluate.samples:
            found = recipe.evaluate.samples
            return f"{self.procedure.name} needs evaluate.samples of at least {self.procedure.n}, found {found}"
        return ""

    def of(self, seed: "Seed", name: str) -> np.ndarray:
        """Return each prompt's win rate."""
        evaluated = seed.evaluated
        if name in seed.best_of_n:
            return seed.serve_best_of_n(name, self.procedure)[1][self.judge][self.procedure.name]
        ours, base = (evaluated.judged_by(self.judge, model) for model in (name, "reference"))
        return win_rates_of(ours, base, [self.procedure])[0]

    def gain(self, at: AtOneKL, method: str) -> Callable[[float], float]:
        """Return theory's gain of the method's transformation."""
        return at.gain(method, self.procedure)


@dataclass(frozen=True)
class Seed:
    """A seed's recipe, in a run directory of its own, with the policies of methods that were trained there."""

    recipe: Recipe
    policies: MethodPolicies | None = None  # None where no methods are compared
    with_best_of_n: bool = False  # whether Best-of-n itself is one of the methods
    _values: dict[tuple[Quantity, str], np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_run(cls, run_dir: Path) -> "Seed":
        """Return the seed of a finished run, by the recipe that is recorded there."""
        return cls(load_recipe(run_dir / "recipe.yaml"))

    @property
    def root(self) -> Path:
        """The run directory."""
        return Path(self.recipe.run_dir)

    @cached_property
    def evaluated(self) -> Evaluated:
        """The scored samples of its models."""
        return Evaluated(self.recipe)

    @property
    def best_of_n(self) -> Mapping[str, int]:
        """The names of Best-of-n itself, with n: the nearest to each budget in KL for which there are samples."""
        budgets = self.policies.budgets if self.policies is not None and self.with_best_of_n else ()
        return {f"best-of-{n}": n for budget in budgets if (n := min(nearest_n(budget), largest_n(self.recipe)))}

    @property
    def by_method(self) -> Mapping[str, Sequence[str]]:
        """The names of the policies of each method."""
        trained = {} if self.policies is None else self.policies.by_method
        return trained | ({BEST_OF_N: [*self.best_of_n]} if self.with_best_of_n else {})

    def law_at(self, name: str, nats: float) -> Any:
        """Return theory's law of a policy at so many nats; None if there is none."""
        assert self.policies is not None
        return self.policies.law_at(name, nats)

    def serve_best_of_n(self, name: str, procedure: Any) -> tuple[np.ndarray, dict[str, dict[str, np.ndarray]]]:
        """Return KL (P,) and win rates by judge and procedure of Best-of-n itself."""
        return serve_best_of_n(self.evaluated, self.best_of_n[name], [procedure])

    def kl(self, name: str) -> np.ndarray:
        """Return a policy's KL (P,) to the reference in nats; of Best-of-n itself the estimate."""
        return (
            self.serve_best_of_n(name, parse_procedure("standard"))[0]
            if name in self.best_of_n
            else self.evaluated.kl(name)
        )

    def values(self, quantity: Quantity, name: str) -> np.ndarray:
        """Return a quantity (P,) of a policy; it is computed once."""
        if (quantity, name) not in self._values:
            self._values[quantity, name] = quantity.of(self, name)
        return self._values[quantity, name]

    def trained(self, values_P: np.ndarray, *shifts: float) -> Trained:
        """Return values for the test prompts, with their ids."""
        return Trained(self.evaluated.prompt_ids, values_P, shifts)


def share_of_gap(seed: Seed, name: str) -> np.ndarray | None:
    """Return where a policy's win rates (P,) by the reward lie between theory's identity (0) and optimum (1) at its KL.

    The KL is taken as exact. None for a policy that has not moved, where the gap is too small to have shares, or the KL
    beyond that of any known optimum.
    """
    procedure, kl = seed.recipe.procedure, float(seed.kl(name).mean())
    if kl < MIN_KL:
        return None
    try:
        identity, optimum = law_at_kl("identity", kl=kl).win_rate(procedure), rank_optimum(procedure, kl=kl).win_rate
    except ConfigError:  # a policy that ran away
        return None
    if optimum - identity <= MIN_GAP:
        return None
    return np.asarray((seed.values(WinRate(procedure, "reward"), name) - identity) / (optimum - identity))


Side = tuple[Seed, str]  # a method of a seed


def lead(ours: Side, theirs: Side, quantity: Quantity, kl: float) -> tuple[Matched, Matched] | None:
    """Return a quantity of two methods at the KL that both reach, ``kl`` nats or less, of each above its start.

    The two may be of different runs on the same prompts. None where one of them has no policy that spends about so
    much.
    """
    seeds = {"ours": ours[0], "theirs": theirs[0]}
    sides = {
        side: [(side, name) for name in seed.by_method[method]]
        for side, (seed, method) in {"ours": ours, "theirs": theirs}.items()
    }
    kls = {key: seeds[key[0]].kl(key[1]) for keys in sides.values() for key in keys}
    at = AtOneKL.of(sides, kls, lambda key, nats: seeds[key[0]].law_at(key[1], nats), median=kl)
    if at.kl is None or at.methods.keys() != sides.keys():
        return None
    both = []
    for side, keys in at.methods.items():
        spent = [(kls[key], 0.5 + seeds[side].values(quantity, key[1]) - quantity.start) for key in keys]
        both.append(matched(spent, at.kl, quantity.gain(at, side)))
    return both[0], both[1]
