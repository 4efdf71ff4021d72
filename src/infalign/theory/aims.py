"""Aims: what is wanted of a policy before there are rewards, and the laws that this becomes on rewards.

An aim has a KL budget in nats, or the paper's β, or is Best-of-n itself. Its law of continuous ranks depends on nothing
else; its law over stored rollouts takes their rewards.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cache
from typing import ClassVar, Self

import numpy as np
from numpy.typing import ArrayLike

from infalign.core.errors import ConfigError
from infalign.method.calibration import Array, reward_table, tied_prompts
from infalign.method.laws import KLOver, Law, best_of, of_rewarded
from infalign.method.optimum import Goal, Optimal, optimum
from infalign.method.procedures import RankProcedure, Served, Standard, rewinds
from infalign.method.roots import check_strength, find_log_beta
from infalign.method.shapings import Shaping, as_shaping, budget_beta, log_ratios, mean_kl, shape_rollouts
from infalign.method.transforms import Log, Ranked, Transformation
from infalign.theory.law import RankLaw, aligned_law, law_at_kl
from infalign.theory.optimum import rank_optimum


@dataclass(frozen=True, kw_only=True)
class Aim(ABC):
    """What is wanted of a policy, at a budget of ``kl`` nats or the paper's ``beta``."""

    kl: float | None = None
    beta: float | None = None
    by_procedure: ClassVar[bool] = False  # whether it differs between procedures

    @property
    @abstractmethod
    def name(self) -> str:
        """The spelling for recipes and figures."""

    @property
    def transform(self) -> Transformation | None:
        """The transformation of the rank, if that is all that it looks at."""
        return None

    def at(self, procedure: Served, kl: float | None, beta: float | None) -> Self:
        """Return it for what a procedure serves, at a strength."""
        return replace(self, kl=kl, beta=beta)

    @abstractmethod
    def law(self, rewards_PK: ArrayLike) -> Law:
        """Return the law of stored rewards. Raises ConfigError for a budget that they cannot spend, with the most."""

    @abstractmethod
    def shaping_named(self, name: str) -> Shaping:
        """Return the shaping of its law, which has this name."""

    def rank_law(self, kl: float | None = None) -> RankLaw | None:
        """Return the exact law of continuous ranks, at its own strength or at ``kl`` nats; None where there is none."""
        try:
            return _solved(self, self.kl if kl is None else kl)
        except ConfigError:
            return None

    def check(self) -> None:
        """Raise ConfigError for a budget that continuous ranks cannot spend."""
        if self.kl is not None:
            _solved(self, self.kl)

    def _rank_law(self, kl: float | None) -> RankLaw | None:
        if self.transform is None:
            return None
        return law_at_kl(self.transform, kl=kl) if kl is not None else aligned_law(self.transform, beta=self.beta or 0)


@cache  # a recipe asks for few, and for each several times
def _solved(aim: Aim, kl: float | None) -> RankLaw | None:
    return aim._rank_law(kl)


@dataclass(frozen=True)
class Tilt(Aim):
    """π_ref·e^{s/β}/Z for a shaping s of the reward."""

    shaping: Shaping

    @property
    def name(self) -> str:
        return self.shaping.name

    @property
    def transform(self) -> Transformation | None:
        return self.shaping.transform

    def law(self, rewards_PK: ArrayLike) -> Law:
        beta = None if self.beta is None else self.beta / self.shaping.scale
        return tilted(rewards_PK, self.shaping, kl=self.kl, beta=beta)

    def shaping_named(self, name: str) -> Shaping:
        return self.shaping


@dataclass(frozen=True, kw_only=True)
class Best(Tilt):
    """What Best-of-``n`` serves: of continuous ranks, log at β = 1/(n − 1), a KL of log n − (n − 1)/n nats."""

    n: int
    shaping: Shaping = field(default=Ranked(Log()))

    def law(self, rewards_PK: ArrayLike) -> Law:
        return best_of(rewards_PK, self.n)

    def _rank_law(self, kl: float | None) -> RankLaw | None:
        return Tilt(self.shaping, beta=1.0 / (self.n - 1))._rank_law(kl)


@dataclass(frozen=True)
class StoredOptimum(Aim):
    """The optimum for a procedure on stored rewards, exact where they tie; unless they are 0 or 1 for an objective."""

    objective: Goal | None = None
    procedure: RankProcedure = field(default_factory=Standard)
    by_procedure: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "optimal" if self.objective is None else f"optimal:{self.objective}"

    def at(self, procedure: Served, kl: float | None, beta: float | None) -> Self:
        """Return it for what a procedure serves, at a strength. Raises ConfigError for Rewind-and-Repeat."""
        if rewinds(procedure):
            raise ConfigError(f"transform is {self.name}, which needs a procedure by rank, not {procedure.name}")
        return replace(self, procedure=procedure, kl=kl, beta=beta)

    def law(self, rewards_PK: ArrayLike) -> Law:
        return optimum(rewards_PK, self.procedure, kl=self.kl, beta=self.beta, objective=self.objective)

    def shaping_named(self, name: str) -> Shaping:
        shaping = Optimal.parse(name, self.procedure)
        assert shaping is not None, name
        return shaping


@dataclass(frozen=True)
class WinRateOptimum(StoredOptimum):
    """The optimum for the win rate; where no rewards tie, at the β of continuous ranks."""

    objective: Goal = "win-rate"
    name = "optimum"

    def law(self, rewards_PK: ArrayLike) -> Law:
        if self.kl is None or tied_prompts(np.sort(reward_table(rewards_PK), axis=1)).any():
            return super().law(rewards_PK)
        law = optimum(rewards_PK, self.procedure, beta=self._rank_law(self.kl).beta, objective=self.objective)
        return replace(law, kl=self.kl, kl_over="ranks")

    def _rank_law(self, kl: float | None) -> RankLaw:
        return rank_optimum(self.procedure, kl=kl, beta=self.beta if kl is None else None).law


@of_rewarded
def tilted(
    rewards_PK: ArrayLike,
    shaping: Shaping | Transformation | str,
    *,
    kl: float | None = None,
    beta: float | None = None,
) -> Law:
    """Return the law π_ref·e^{s/β}/Z of shaped rewards s over K stored rollouts of each of P prompts.

    ``shaping`` may be a spelling, such as ``"exp:10"`` or ``"raw"``. Give ``kl``, the mean KL in nats, or ``beta``, the
    weight of the KL beside the shaped rewards. Where rewards of a prompt tie, or the shaping is not of the rank, the KL
    is over the K rollouts; otherwise it is of continuous ranks, which K rollouts tell apart only to 1/K.

    Raises ConfigError for a budget that cannot be spent, DataError for rewards that are not finite.

    >>> law = tilted([[0, 0, 0, 1], [0, 1, 1, 1]], "raw", kl=0.2)
    >>> np.exp(law.log_ratios_PK).round(2)  # the probability of each rollout × K
    array([[0.52, 0.52, 0.52, 2.43],
           [0.27, 1.24, 1.24, 1.24]])
    """
    shaped_by = as_shaping(shaping)
    rewards = reward_table(rewards_PK)
    check_strength(kl, beta)
    law_beta, spent, over = _strength(shaped_by, np.sort(rewards, axis=1), kl, beta)
    return Law(log_ratios(shape_rollouts(shaped_by, rewards), law_beta), rewards, shaped_by, law_beta, spent, over)


def _strength(shaping: Shaping, sorted_PK: Array, kl: float | None, beta: float | None) -> tuple[float, float, KLOver]:
    """Return the trainer's β, the KL that it spends, and which KL that is: given one of both, the other."""
    transform, tied_P = shaping.transform, tied_prompts(sorted_PK)
    by_rollouts_P = np.full(len(tied_P), True) if transform is None else tied_P
    share, shaped_PK = float(by_rollouts_P.mean()), shape_rollouts(shaping, sorted_PK[by_rollouts_P])
    over: KLOver = "rollouts" if share else "ranks"

    def spent(beta: float) -> float:
        over_rollouts = share * mean_kl(shaped_PK, beta) if share else 0.0
        if transform is None or share == 1.0:
            return over_rollouts
        return over_rollouts + (1.0 - share) * aligned_law(transform, beta=beta * shaping.scale).kl

    if kl is None:
        return (given := float(beta or 0.0)), spent(given), over
    if transform is None or share == 1.0:
        return budget_beta(shaped_PK, kl), kl, over
    law_beta = law_at_kl(transform, kl=kl).beta / shaping.scale
    if share:
        root = find_log_beta(lambda x: spent(float(np.exp(x))), kl, start=float(np.log(law_beta)), step=0.5)
        if not root.found:
            raise ConfigError(f"{shaping.name} cannot spend {kl:g} nats on these rewards; the maximum is {root.kl:.4g}")
        law_beta = float(np.exp(root.log_beta))
    return law_beta, kl, over
