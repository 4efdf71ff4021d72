"""Laws: what a policy is trained towards, as the log-ratio log π*/π_ref of every stored rollout.

A law is made from rewards alone: `tilted` and `optimum` spend a KL budget or take a β, `best_of` is what Best-of-n
serves. Solvers read its log-ratios, on-policy solvers its shaping and β.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import kl_div

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array, as_rewards, not_finite, reward_table, stacked, tied_prompts
from infalign.method.procedures import BestOfN, RankProcedure, Standard
from infalign.method.shapings import Shaping, shape_rollouts
from infalign.method.transforms import Log, Ranked

KLOver = Literal["rollouts", "classes", "ranks"]
MakesLaw = TypeVar("MakesLaw", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, eq=False)
class Law:
    """The law π* of a policy, over the K stored rollouts of each of P prompts.

    Where K differs between prompts, the arrays are object arrays with a row of K for each prompt. ``kl`` is the mean KL
    to the reference in nats, over the K ``rollouts``, over ``classes`` of equal rewards, or of continuous ``ranks``
    where no rewards of a prompt tie.

    >>> best_of([[0.1, 0.5, 0.3]], 2)
    Law(shaping=Ranked(transform=Log()), beta=1.0, kl=0.1931471805599453, kl_over='ranks')
    """

    log_ratios_PK: Array = field(repr=False)  # T = log π*/π_ref; −∞ for what π* never says
    rewards_PK: Array = field(repr=False)
    shaping: Shaping  # the reward of a new response, by the sorted rewards of its prompt's rollouts
    beta: float  # the weight of the KL beside the shaped rewards: what a trainer takes
    kl: float
    kl_over: KLOver

    def __post_init__(self) -> None:
        of_ratios, of_rewards = np.shape(self.log_ratios_PK), np.shape(self.rewards_PK)
        if of_ratios != of_rewards:
            raise DataError(f"a law needs a log-ratio for each reward, found shapes {of_ratios} and {of_rewards}")

    @property
    def procedure(self) -> RankProcedure:
        """What is to serve the policy, as far as the law knows: one sample."""
        return Standard()

    @property
    def paper_beta(self) -> float:
        """The paper's β, for its unnormalized Φ."""
        return self.beta * self.shaping.scale

    @property
    def probabilities_PK(self) -> Array:
        """What π* gives each rollout, where the reference gives each 1/K; over classes they need not sum to 1."""
        return stacked([np.exp(row) / row.size for row in self.log_ratios_PK])

    @property
    def shaped_PK(self) -> Array:
        """The rewards of the rollouts for a trainer: shaped among the rollouts of their prompt."""
        return shape_rollouts(self.shaping, self.rewards_PK)


def of_rewarded(make: MakesLaw) -> MakesLaw:
    """Let a function that makes a law leave out prompts whose rewards are all NaN: their log-ratios are NaN too."""

    @wraps(make)
    def made(rewards_PK: Any, *arguments: Any, **options: Any) -> Any:
        rewards_PK = [*(rewards_PK.values() if isinstance(rewards_PK, Mapping) else rewards_PK)]
        rows = [as_rewards(row) for row in rewards_PK]
        kept = np.array([row.size == 0 or not np.isnan(row).all() for row in rows], bool)
        if kept.all() or not kept.any():
            return make(rewards_PK, *arguments, **options)
        if odd := not_finite([row if keep else row.ravel()[:0] for row, keep in zip(rows, kept, strict=True)]):
            raise DataError(f"rewards must be finite, found {odd}")
        law = make([row for row, keep in zip(rows, kept, strict=True) if keep], *arguments, **options)
        of_kept = iter(law.log_ratios_PK)
        log_ratios_PK = stacked([next(of_kept) if keep else row for row, keep in zip(rows, kept, strict=True)])
        return replace(law, log_ratios_PK=log_ratios_PK, rewards_PK=stacked(rows))

    return cast(MakesLaw, made)


@of_rewarded
def best_of(rewards_PK: ArrayLike, n: int) -> Law:
    """Return the law of what Best-of-``n`` serves of the K rollouts, the mean over all sets of n; ties share it.

    Where rewards do not tie, its KL is log n − (n − 1)/n nats and log at β = 1/(n − 1) the shaping whose optimum it is;
    where they do, that shaping goes further. Raises ConfigError for n < 2, DataError for fewer rollouts than n and for
    rewards that are not finite.

    >>> np.exp(best_of([[0.1, 0.5, 0.3]], 2).log_ratios_PK).round(3)  # its probabilities × K
    array([[0., 2., 1.]])
    """
    if n < 2:
        raise ConfigError(f"Best-of-n needs an n of at least 2, found {n}")
    rewards = reward_table(rewards_PK)
    with np.errstate(divide="ignore"):
        log_ratios_PK = np.log(BestOfN(n).weights(rewards) * rewards.shape[1])
    tied_P = tied_prompts(np.sort(rewards, axis=1))
    kl_P = np.where(tied_P, kl_div(np.exp(log_ratios_PK), 1.0).mean(axis=1), np.log(n) - (n - 1) / n)
    over: KLOver = "rollouts" if tied_P.any() else "ranks"
    return Law(log_ratios_PK, rewards, Ranked(Log()), 1.0 / (n - 1), float(kl_P.mean()), over)
