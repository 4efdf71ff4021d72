"""The calibrated and transformed reward as a drop-in reward function for a trainer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from infalign.calibration import calibrate
from infalign.errors import DataError
from infalign.transforms import Transformation, at_ranks


@dataclass(frozen=True)
class CalibratedReward:
    """Φ∘Ĉ as a TRL reward function, for ``RLOOTrainer`` and ``GRPOTrainer`` alike.

    ``reward(prompts, responses)`` scores a whole batch at once; prompts are as the dataset has them (text or messages),
    responses are text. The dataset carries the column ``reference_rewards``: for each prompt the sorted rewards of its
    K reference rollouts under the same reward function.

    Raises DataError if the column is missing, or a reward is not finite (TRL would train on it in silence).
    """

    reward: Callable[[list[Any], list[str]], Sequence[float]]
    transform: Transformation

    @property
    def __name__(self) -> str:  # TRL logs the reward under this name
        return f"calibrated {self.transform.name}"

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        reference_rewards: list[list[float]] | None = None,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: object,
    ) -> list[float]:
        """Return Φ(Ĉ) for each completion; logs the mean of Ĉ, which is the standard win rate, as ``win_rate``."""
        if reference_rewards is None:
            raise DataError("the training dataset has no column reference_rewards; make it with `infalign calibrate`")
        responses = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        rewards = np.asarray(self.reward(prompts, responses), float)
        if rewards.shape != (len(responses),):
            raise DataError(f"the reward function returned shape {rewards.shape} for {len(responses)} responses")
        u = np.array([calibrate(r, reference) for r, reference in zip(rewards, reference_rewards, strict=True)])
        if log_metric is not None:
            log_metric("win_rate", float(u.mean()))
            log_metric("reward_model", float(rewards.mean()))
        phi = [at_ranks(self.transform, v, len(reference)) for v, reference in zip(u, reference_rewards, strict=True)]
        return [float(value) for value in phi]
