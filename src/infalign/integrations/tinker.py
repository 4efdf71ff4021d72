"""Group advantages for tinker's cookbook: ``train.compute_advantages = compute_advantages("pass@8")``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from infalign.integrations.estimators import check_version, of_groups

if TYPE_CHECKING:
    import torch


def compute_advantages(objective: str) -> Callable[[list[Any]], list[torch.Tensor]]:
    """Return what takes the place of the cookbook's function of this name, for groups of trajectories.

    The cookbook adds its KL penalty to the advantages afterwards. Raises DataError for a group with too few
    trajectories, also where some failed.
    """
    check_version("tinker-cookbook")

    def compute(trajectory_groups_P: list[Any]) -> list[torch.Tensor]:
        import torch

        rewards_PG = [torch.tensor(group.get_total_rewards()) for group in trajectory_groups_P]
        return [of_groups(rewards_G, [0] * len(rewards_G), objective) for rewards_G in rewards_PG]

    return compute
