"""What an on-policy solver makes of the rewards of fresh responses: a value that our loop takes.

KL(π‖π_ref) belongs in the reward, as −β·log π/π_ref: as a loss of its own (GRPO) it is the gradient of something else.
So advantages have all there is of KL, and the loop adds none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """Fresh responses of this process, padded to T tokens, and what is known about them."""

    prompts: list[Any]  # rows of the data set
    tensors: dict[str, torch.Tensor]  # prompt_ids, prompt_mask, completion_ids, completion_mask
    rewards_B: torch.Tensor  # shaped
    every_reward: torch.Tensor  # of all processes, group by group
    log_ratio_BT: torch.Tensor  # log π/π_ref of each token, 0 after the end

    @property
    def mask(self) -> torch.Tensor:
        """1 for the tokens of a response, 0 after its end."""
        return self.tensors["completion_mask"]


class Loop(Protocol):
    """What advantages may ask of the loop that they are in."""

    kl_weight: float  # β, for the shaped rewards
    group: int  # responses to a prompt
    rows_at_once: int  # in a forward pass
    device: torch.device
    pad_id: int

    def reference_model(self) -> torch.nn.Module:
        """Return the model that log-ratios are taken to."""

    def prepared(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return the model on this process's device, wrapped for several processes if there are."""

    def local(self, values: torch.Tensor) -> torch.Tensor:
        """Return this process's rows of values of all processes."""

    def less_others(self, values_B: torch.Tensor) -> torch.Tensor:
        """Return each local value less the mean of the others of its group."""

    def drawn_from(self, model: torch.nn.Module, prompts: list[Any]) -> tuple[list[list[int]], torch.Tensor]:
        """Return one response of ``model`` to each prompt, as token ids, and their rewards."""


class Advantages:
    """Advantages of responses or tokens; what else a solver needs of the loop has a default that does nothing."""

    companion: torch.nn.Module | None = None  # trained or moved beside the policy, so it belongs to a checkpoint
    trains_companion = False

    def start(self, loop: Loop) -> None:
        """Take what is needed of the loop, once, when it is set up."""

    def before(self, loop: Loop, prompts: list[Any]) -> None:
        """Look at the prompts before responses to them are drawn."""

    def of(self, loop: Loop, batch: Batch) -> torch.Tensor:
        """Return the advantages of the responses, (B,), or of their tokens, (B, T)."""
        raise NotImplementedError

    def spent(self, loop: Loop, batch: Batch) -> torch.Tensor:
        """Return log π/π_start of each response, (B,), in nats."""
        return batch.log_ratio_BT.sum(1)

    def trained_on(self, loop: Loop, output: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors that a batch is trained on, the advantages among them."""
        return output

    def extra_loss(self, rows: dict[str, Any]) -> torch.Tensor | None:
        """Return a loss besides the policy's, a mean over the rows."""
        return None
