"""Group advantages at the hooks of other trainers: `infalign.advantages` for their batches, which may be padded."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from infalign.core.errors import ConfigError
from infalign.method.group_advantages import advantages

if TYPE_CHECKING:
    import torch

# What `make test-frameworks` has run.
TESTED = {"trl": "1.16", "verl": "0.9", "skyrl": "0.4", "areal": "1.0", "tinker-cookbook": "0.6"}
PADDING = re.compile("pad[0-9a-f]+")  # the prompt of rows that fill a batch up


@cache
def check_version(package: str) -> None:
    """Warn, once, if another minor version of ``package`` is installed than the tested one."""
    installed, tested = version(package), TESTED[package]
    if installed.rpartition(".")[0] != tested:
        warnings.warn(
            f"{package} {installed} is installed, but infalign was tested with {package} {tested}: check the "
            "first advantages that it logs",
            stacklevel=3,
        )


def of_groups(rewards: torch.Tensor, groups: Sequence[Any], objective: str) -> torch.Tensor:
    """Return the advantages of rewards, (B,), in float32; warns of rewards of half precision. Raises DataError."""
    if rewards.element_size() < 4 and rewards.is_floating_point():
        warnings.warn(
            f"the rewards are {rewards.dtype}, in which near rewards become equal; compute them in float32",
            stacklevel=2,
        )
    advantages_B: torch.Tensor = advantages(rewards.float(), groups, objective)
    return advantages_B


def estimator(objective: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the advantage estimator of ``objective`` in the form that verl and SkyRL share. Raises ConfigError."""
    advantages([], [], objective)  # is it known?

    def estimate(
        token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Sequence[Any], **given: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns, both (B, T); ``index`` names the prompt of each row.

        Padding, which both trainers name pad and a number, has 0. Raises ConfigError where the KL is in the reward or
        SkyRL normalizes advantages, and DataError for a prompt with too few responses.
        """
        for name in ("use_kl_in_reward", "advantage_batch_normalize"):
            if getattr(given.get("config"), name, False):
                raise ConfigError(
                    f"algorithm.{name} would change the objective, {objective}; set it to False (a KL is possible in "
                    "the loss: use_kl_loss)"
                )
        real = [row for row, name in enumerate(index) if not PADDING.fullmatch(str(name))]
        found_B = token_level_rewards.new_zeros(len(index)).float()
        found_B[real] = of_groups(token_level_rewards[real].sum(dim=-1), [str(index[row]) for row in real], objective)
        found_BT = found_B[:, None] * response_mask
        return found_BT, found_BT

    return estimate
