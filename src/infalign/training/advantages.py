"""Advantages that an on-policy solver computes from the rewards of fresh responses.

`on_policy_trainer.AdvantageLoop`, which takes them, is the ``loop`` of their methods: TRL's GRPOTrainer and what is for
them there.
KL(π‖π_ref) belongs in the reward, as −β·log π/π_ref: as a separate loss term (GRPO) its gradient is not that of the KL.
So the advantages contain the whole KL term, and the loop adds none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """Fresh responses of this process, padded to T tokens, with their rewards and log-ratios."""

    prompts: list[Any]  # rows of the dataset
    tensors: dict[str, torch.Tensor]  # prompt_ids, prompt_mask, completion_ids, completion_mask
    rewards_B: torch.Tensor  # shaped
    every_reward: torch.Tensor  # shaped rewards of all processes, group by group
    log_ratio_BT: torch.Tensor  # log π/π_ref of each token, 0 after the end


class Advantages:
    """Advantages of responses or tokens; the other hooks into the loop do nothing by default."""

    companion: torch.nn.Module | None = None  # trained or updated with the policy, so checkpoints include it
    trains_companion = False

    def start(self, loop: Any) -> None:
        """Prepare for the loop; called once, when the loop is set up."""

    def before_drawing(self, loop: Any, prompts: list[Any]) -> None:
        """Process the prompts before responses to them are drawn."""

    def compute(self, loop: Any, batch: Batch) -> torch.Tensor:
        """Return the advantages of the responses, (B,), or of their tokens, (B, T)."""
        raise NotImplementedError

    def log_ratios_to_start(self, loop: Any, batch: Batch) -> torch.Tensor:
        """Return log π/π_start of each response, (B,), in nats."""
        return batch.log_ratio_BT.sum(1)

    def training_batch(self, loop: Any, output: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors that a batch is trained on, including the advantages."""
        return output

    def extra_loss(self, rows: dict[str, Any]) -> torch.Tensor | None:
        """Return a loss to add to the policy's, a mean over the rows, or None."""
        return None
