"""bond: towards Best-of-2 of a moving anchor (J-BOND; Sessa et al. 2025)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import model_validator

from infalign.method.laws import Law
from infalign.method.procedures import Served
from infalign.method.shapings import Raw
from infalign.models.pretrained import load_policy
from infalign.training.objectives import Advantages, Ascent, Batch, Loop
from infalign.training.solvers.on_policy import UNNORMALIZED, OnPolicy

if TYPE_CHECKING:
    import torch

REGULARIZER = 1.0  # γ, the weight of the KL to the moving anchor
ANCHOR_RATE = 0.02  # update rate of the anchor's moving average, as in the paper
JEFFREYS = 0.5  # weight of the backward KL, as in the paper
WORSE_THAN_BOTH = -float(np.log(16.0))  # the reward of a response that is worse than both anchor responses
TRAINED_ON = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")


class JBOND(Advantages):
    """J-BOND (algorithm 2, with the sign of its regularizer corrected); the loop's reference model is the anchor.

    For each response y of the policy, two are drawn from the anchor. The policy is fine-tuned on the better one (the
    forward KL). The reward of y is −log 16 if y is worse than both and else 0, minus log π/π_anchor (the backward KL),
    minus γ·log π/π_anchor (the regularizer).
    """

    def __init__(self, reference: str) -> None:
        self._start = load_policy(reference)[0].requires_grad_(False)
        self._anchor_responses: list[tuple[list[list[int]], torch.Tensor]] = []

    def start(self, loop: Loop) -> None:
        self._start.to(loop.accelerator.device)
        self.companion = loop.ref_model

    def before_drawing(self, loop: Loop, prompts: list[Any]) -> None:
        self._anchor_responses = [loop.draw_responses(loop.ref_model, prompts) for _ in range(2)]

    def compute(self, loop: Loop, batch: Batch) -> torch.Tensor:
        (_, first), (_, second) = self._anchor_responses
        reward = WORSE_THAN_BOTH * (batch.rewards_B < first.minimum(second))
        spent = batch.log_ratio_BT.sum(1)
        return loop.subtract_others_mean(JEFFREYS * (reward - spent) - loop.beta * spent)

    def log_ratios_to_start(self, loop: Loop, batch: Batch) -> torch.Tensor:
        """Return log π/π_start of each response; the batch has log-ratios to the anchor, which moves."""
        import torch

        from infalign.models.packed import response_logprobs

        tensors = batch.tensors
        policy_B = ((batch.log_ratio_BT + tensors["ref_per_token_logps"]) * tensors["completion_mask"]).sum(1)
        start_B = response_logprobs(self._start, unpadded(tensors, "prompt"), unpadded(tensors, "completion"))
        return policy_B - torch.tensor(start_B, device=policy_B.device)

    def training_batch(self, loop: Loop, output: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with the better anchor responses appended to the policy's own."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        (first, first_rewards), (second, second_rewards) = self._anchor_responses
        better = [a if x >= y else b for a, b, x, y in zip(first, second, first_rewards, second_rewards, strict=True)]
        rows, ids = [*unpadded(output, "completion"), *better], output["completion_ids"]
        output |= {name: output[name].repeat(2, 1) for name in ("prompt_ids", "prompt_mask")}
        texts = [torch.tensor(row, dtype=torch.long, device=ids.device) for row in rows]
        output["completion_ids"] = pad_sequence(texts, True, loop.processing_class.pad_token_id)
        output["completion_mask"] = pad_sequence([torch.ones_like(text) for text in texts], True)
        forward = torch.full_like(output["advantages"], 1.0 - JEFFREYS)
        output["advantages"] = torch.cat([output["advantages"], forward])
        return {name: output[name] for name in TRAINED_ON if name in output}


def unpadded(tensors: dict[str, Any], kind: str) -> list[list[int]]:
    """Return the token ids of each prompt or completion."""
    rows = zip(tensors[f"{kind}_ids"], tensors[f"{kind}_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in rows]


class Settings(OnPolicy):
    """BOND, which has no β: it trains until it has spent the KL budget."""

    draws_per_response: ClassVar[int] = 3  # each response comes with two anchor responses

    solver: Literal["bond"]

    @model_validator(mode="after")
    def _whole_model(self) -> Settings:
        if self.beta is not None:
            raise ValueError("bond has no beta; give the kl_budget at which it stops")
        if self.fit.lora is not None:
            raise ValueError("bond uses a whole model as its moving anchor, not an adapter; leave fit.lora out")
        return self

    @property
    def budget(self) -> float | None:
        """The KL at which it stops."""
        return self.kl_budget

    @property
    def transformation(self) -> str:
        """Best-of-2 of the anchor, again and again."""
        return "log"

    def ascent(self, law: Law | None, procedure: Served) -> Ascent:
        """Return J-BOND, for which only the order of rewards matters; TRL's reference follows as a moving average."""
        anchor = {"sync_ref_model": True, "ref_model_mixup_alpha": ANCHOR_RATE, "ref_model_sync_steps": 1}
        return Ascent(Raw(), REGULARIZER, self.generations, "grpo", UNNORMALIZED | anchor, JBOND, self.kl_budget)
