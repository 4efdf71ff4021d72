"""What a solver makes of a law: the objective of an offline training, or the ascent of an on-policy one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from infalign.method.calibration import Array
from infalign.method.shapings import Shaping

if TYPE_CHECKING:
    import torch

Examples = tuple[NDArray[np.intp], Array]  # rollouts (E, M), numbers (E,) or (E, M)


@dataclass(frozen=True, slots=True)
class Objective:
    """The training examples and the loss of an offline solver.

    ``examples`` turns the K rewards of one prompt, and their log π*/π_ref, into the examples of one pass: the rollouts
    of each example, (E, M), and one number per example, (E,), or rollout, (E, M): a target, a weight or a label.
    ``loss`` is the mean loss of a batch: it compares those numbers with h = log π/π_ref of the rollouts, (B, M), summed
    over tokens.
    """

    examples: Callable[[Array, Array, np.random.Generator], Examples]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """Fresh responses of this process, padded to T tokens, with their rewards and log-ratios."""

    prompts: list[Any]  # rows of the dataset
    tensors: dict[str, torch.Tensor]  # prompt_ids, prompt_mask, completion_ids, completion_mask
    rewards_B: torch.Tensor  # shaped
    every_reward: torch.Tensor  # shaped rewards of all processes, group by group
    log_ratio_BT: torch.Tensor  # log π/π_ref of each token, 0 after the end


class Loop:
    """What advantages see of `on_policy_trainer.AdvantageLoop`, TRL's GRPOTrainer: its members, and three of ours."""

    beta: float
    num_generations: int
    ref_model: torch.nn.Module
    args: Any
    accelerator: Any
    processing_class: Any

    def local_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return this process's rows of values that were gathered from all processes."""
        return values.chunk(self.accelerator.num_processes)[self.accelerator.process_index]

    def subtract_others_mean(self, values_B: torch.Tensor) -> torch.Tensor:
        """Return each local value minus the mean of the other values in its group."""
        grouped = self.accelerator.gather(values_B).view(-1, self.num_generations)
        centered = (grouped - grouped.mean(1, keepdim=True)) * self.num_generations / (self.num_generations - 1)
        return self.local_rows(centered.flatten())

    def draw_responses(self, model: torch.nn.Module, prompts: list[Any]) -> tuple[list[list[int]], torch.Tensor]:
        """Return one response of ``model`` to each prompt, as token ids, and their rewards."""
        raise NotImplementedError


class Advantages:
    """Advantages of responses or tokens, from the rewards of fresh responses; by default the other hooks do nothing.

    KL(π‖π_ref) belongs in the reward, as −β·log π/π_ref: as a separate loss term (GRPO) its gradient is not that of the
    KL. So the advantages contain the whole KL term, and the loop adds none.
    """

    companion: torch.nn.Module | None = None  # trained or updated with the policy, so checkpoints include it
    trains_companion = False

    def start(self, loop: Loop) -> None:
        """Prepare for the loop; called once, when the loop is set up."""

    def before_drawing(self, loop: Loop, prompts: list[Any]) -> None:
        """Process the prompts before responses to them are drawn."""

    def compute(self, loop: Loop, batch: Batch) -> torch.Tensor:
        """Return the advantages of the responses, (B,), or of their tokens, (B, T)."""
        raise NotImplementedError

    def log_ratios_to_start(self, loop: Loop, batch: Batch) -> torch.Tensor:
        """Return log π/π_start of each response, (B,), in nats."""
        return batch.log_ratio_BT.sum(1)

    def training_batch(self, loop: Loop, output: dict[str, Any]) -> dict[str, Any]:
        """Return the tensors that a batch is trained on, including the advantages."""
        return output

    def extra_loss(self, rows: dict[str, Any]) -> torch.Tensor | None:
        """Return a loss to add to the policy's, a mean over the rows, or None."""
        return None


@dataclass(frozen=True, slots=True)
class Ascent:
    """How an on-policy solver climbs, in groups of ``generations`` responses per prompt.

    Rewards are shaped by ``shaping``; ``beta`` is the weight of the KL beside them. ``advantages``, made for the folder
    of the reference, replace those of the TRL trainer; None keeps these. Training stops at ``stops_at`` nats.
    """

    shaping: Shaping
    beta: float
    generations: int = 8
    trl_trainer: Literal["rloo", "grpo"] = "rloo"
    trl_options: Mapping[str, Any] = field(default_factory=lambda: {"normalize_advantages": False})
    advantages: Callable[[str], Advantages] | None = None
    stops_at: float | None = None
