"""Reward shapings: what a reward becomes, given the K reference rewards of its prompt.

InfAlign's shaping is Φ of the rank, :class:`Ranked`. The others use the rollouts without ranking: the reward as it is,
standardized, PAR and LSC. Their spread depends on the reward model, so theory has no β for them;
:func:`budget_beta` finds it on the rollouts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, kl_div, log_expit, logsumexp

from infalign.core.errors import ConfigError
from infalign.core.spelling import did_you_mean
from infalign.method.calibration import Array, as_rewards, calibrate, stacked
from infalign.method.roots import LOWEST_LOG_BETA, find_log_beta
from infalign.method.transforms import SPELLINGS as TRANSFORMATIONS
from infalign.method.transforms import Ranked, Transformation, parse_transform, spelled_by


class Shaping(Protocol):
    """A function of a reward and its prompt's reference rewards, with a name.

    What users type and read as β goes with ``scale`` times the shaped reward: with the paper's raw Φ.
    """

    @property
    def name(self) -> str:
        """The spelling for the command line and reports."""

    @property
    def scale(self) -> float:
        """The β that users type, divided by the β that goes with the shaped rewards."""

    @property
    def transform(self) -> Transformation | None:
        """The transformation of a shaping by the rank, None for another one."""

    def __call__(self, rewards: ArrayLike, reference_rewards_K: Array) -> Array:
        """Return the shaped ``rewards``, of any shape, of one prompt with sorted references; the result is finite.

        Raises DataError as `calibrate` does: for rewards that are not finite, for fewer than 2 or unsorted references.
        """


class NotByRank:
    """Base of the shapings that do not look at ranks alone."""

    __slots__ = ()
    transform = None
    scale = 1.0


@dataclass(frozen=True, slots=True)
class Raw(NotByRank):
    """The reward as it is. A shift of all rewards changes nothing, and a scale changes nothing but β."""

    name = "raw"

    def __call__(self, rewards: ArrayLike, reference_rewards_K: Array) -> Array:
        return _checked(rewards, reference_rewards_K)


@dataclass(frozen=True, slots=True)
class RawPerPrompt(NotByRank):
    """(r − mean)/sd, with the mean and the population standard deviation of the prompt's reference rewards.

    Where all references are equal it is r − mean, which is 0 for each of them.
    """

    name = "raw-prompt"

    def __call__(self, rewards: ArrayLike, reference_rewards_K: Array) -> Array:
        above_mean = _checked(rewards, reference_rewards_K) - np.mean(reference_rewards_K)
        spread = np.std(reference_rewards_K) if np.ptp(reference_rewards_K) > 0 else 1.0
        return np.asarray(above_mean / spread)


@dataclass(frozen=True, slots=True)
class PAR(NotByRank):
    """Preference as reward: (1/K)·Σ_i σ(r − r_i), in (0, 1) (Fu et al. 2025, arXiv 2502.18770)."""

    name = "par"

    def __call__(self, rewards: ArrayLike, reference_rewards_K: Array) -> Array:
        return np.asarray(expit(_checked(rewards, reference_rewards_K)[..., None] - reference_rewards_K).mean(axis=-1))


@dataclass(frozen=True, slots=True)
class LSC(NotByRank):
    """Log-sigmoid of the centered reward: log σ(r − q), with q a quantile of the prompt's reference rewards.

    Wang et al. 2024, arXiv 2402.00742. Between two references the quantile is interpolated. Raises ConfigError
    for one outside [0, 1].
    """

    quantile: float = 0.85

    def __post_init__(self) -> None:
        if not 0 <= self.quantile <= 1:
            raise ConfigError(f"lsc:Q needs a quantile Q from 0 to 1, found {self.quantile:g}")

    @property
    def name(self) -> str:
        return f"lsc:{self.quantile:.15g}"

    def __call__(self, rewards: ArrayLike, reference_rewards_K: Array) -> Array:
        centered = _checked(rewards, reference_rewards_K) - np.quantile(reference_rewards_K, self.quantile)
        return np.asarray(log_expit(centered))


def parse_shaping(name: str) -> Shaping:
    """Return the shaping that ``name`` spells: ``raw``, ``raw-prompt``, ``par``, ``lsc:0.85`` or a transformation's.

    Raises ConfigError, with all spellings, for a name that is none.
    """
    if shaping := spelled_by(SPELLINGS, name):
        return shaping
    if name.endswith(".json") or spelled_by(TRANSFORMATIONS, name) is not None:
        return Ranked(parse_transform(name))
    if name.partition(":")[0] == "optimal":
        raise ConfigError(
            "optimal needs the rewards of a run: in a recipe, write transform: optimal, optimal:reward or "
            "optimal:win-rate; for a trainer, what infalign export --transform optimal prints; in Python, use the "
            "shaping of infalign.optimum(rewards, procedure, kl=...)"
        )
    raise ConfigError(
        f"unknown transformation {name!r}; known: {', '.join(TRANSFORMATIONS)}, a table's FILE.json, and, not based "
        f"on ranks, {', '.join(SPELLINGS)}{did_you_mean(name, [*TRANSFORMATIONS, *SPELLINGS], after='; ')}"
    )


SPELLINGS: dict[str, Callable[..., Shaping]] = {
    "raw": Raw,
    "raw-prompt": RawPerPrompt,
    "par": PAR,
    "lsc:Q (for example lsc:0.85)": LSC,
}


def as_shaping(shaping: Transformation | Shaping | str) -> Shaping:
    """Return a shaping as it is, a transformation as the shaping by the rank, and what a text spells."""
    if isinstance(shaping, str):
        return parse_shaping(shaping)
    return Ranked(shaping) if isinstance(shaping, Transformation) else shaping


def shape_rollouts(shaping: Shaping, rewards_PK: Array) -> Array:
    """Return the shaped rewards (P, K) of rollouts whose references are all K of their prompt, themselves included.

    A prompt that a reward function left out, a row of NaN, stays one.
    """
    return stacked([row if np.isnan(row).all() else shaping(row, np.sort(row)) for row in rewards_PK])


def log_ratios(shaped_PK: Array, beta: float) -> Array:
    """Return log π*/π_ref = s/β − log Z, shape (P, K), with Z = mean e^{s/β} over the K rollouts of the prompt.

    ``beta`` goes with the shaped rewards: it is the β that users type, divided by the shaping's scale.
    """
    shaped_PK = np.asarray(shaped_PK, float)  # differences of unsigned ones wrap around
    exponent_PK = (shaped_PK - shaped_PK.max(axis=1, keepdims=True)) / beta
    log_total_P = logsumexp(exponent_PK, axis=1, keepdims=True)
    return np.asarray(exponent_PK - (log_total_P - np.log(shaped_PK.shape[1])))


def mean_kl(shaped_PK: Array, beta: float) -> float:
    """Return the mean KL in nats of the laws ∝ e^{s/β} over the K rollouts of each prompt to the uniform ones."""
    return float(kl_div(np.exp(log_ratios(shaped_PK, beta)), 1.0).mean())


def budget_beta(shaped_PK: Array, kl: float) -> float:
    """Return the β at which the laws ∝ e^{s/β} over the K rollouts of each prompt spend ``kl`` nats on average.

    KL is to the uniform law over the rollouts. Multiply the β by the shaping's scale for the one that users type.
    Raises ConfigError for a budget that is not positive, or that the rollouts cannot spend: as β → 0 they reach log K,
    less the log of the number that tie at the top.
    """
    shaped_PK = np.asarray(shaped_PK, float)
    spread = float(np.ptp(shaped_PK, axis=1).max(initial=0.0)) or 1.0
    scaled_PK = shaped_PK / spread
    root = find_log_beta(lambda x: mean_kl(scaled_PK, np.exp(x)), kl) if kl > 0 else None
    if root is None or not root.found:
        raise ConfigError(
            f"{shaped_PK.shape[1]} rollouts per prompt cannot spend a KL of {kl:g} nats; it must be positive and "
            f"below {mean_kl(scaled_PK, np.exp(LOWEST_LOG_BETA)):.4g} (the mean of log K minus the log of ties at the "
            "top): lower the budget or sample more rollouts"
        )
    return spread * float(np.exp(root.log_beta))


def _checked(rewards: ArrayLike, reference_rewards_K: Array) -> Array:
    """Return the rewards as a new array; raises DataError where calibration does."""
    calibrate(rewards, reference_rewards_K)
    return as_rewards(rewards).copy()
