"""PPO: E[reward] − β·KL with advantages from a learned value function (GAE)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from infalign.method.laws import Law
from infalign.method.procedures import Served
from infalign.training.objectives import Advantages, Ascent, Batch, Loop
from infalign.training.solvers.base import Shaped
from infalign.training.solvers.on_policy import OnPolicy

if TYPE_CHECKING:
    import torch

GAE_LAMBDA = 0.95
TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def gae(rewards_BT: torch.Tensor, values_BT: torch.Tensor, lam: float) -> torch.Tensor:
    """Return the advantages Σ_l λ^l·δ_{t+l}, δ_t = r_t + V_{t+1} − V_t, V = 0 after the end; shape (B, T)."""
    advantages, after = rewards_BT.clone(), rewards_BT.new_zeros(len(rewards_BT))
    last = after
    for t in reversed(range(rewards_BT.size(1))):
        last = rewards_BT[:, t] + after - values_BT[:, t] + lam * last
        advantages[:, t], after = last, values_BT[:, t]
    return advantages


class GeneralizedAdvantage(Advantages):
    """Generalized advantage estimation on reward − β·log π/π_ref, with γ = 1 and a separate critic."""

    trains_companion = True

    def __init__(self, critic: torch.nn.Module) -> None:
        self._critic = critic

    def start(self, loop: Loop) -> None:
        self.companion = loop.accelerator.prepare_model(self._critic.to(loop.accelerator.device))

    def compute(self, loop: Loop, batch: Batch) -> torch.Tensor:
        """Return the advantages of the tokens; the returns are kept for the critic's loss."""
        import torch

        mask_BT = batch.tensors["completion_mask"]
        rewards_BT = -loop.beta * batch.log_ratio_BT
        rewards_BT[torch.arange(len(mask_BT)), mask_BT.sum(1) - 1] += batch.rewards_B.to(rewards_BT.dtype)
        size = loop.args.per_device_train_batch_size
        rows = [{k: batch.tensors[k][i : i + size] for k in TOKENS} for i in range(0, len(mask_BT), size)]
        with torch.no_grad():
            values_BT = torch.cat([self._values(chunk) for chunk in rows])
        advantage_BT = gae(rewards_BT, values_BT, GAE_LAMBDA)
        batch.tensors["returns"] = (advantage_BT + values_BT) * mask_BT
        return advantage_BT * mask_BT

    def extra_loss(self, rows: dict[str, Any]) -> torch.Tensor:
        """Return the critic's squared error; it shares no parameters, so with Adam its weight does not matter."""
        mask = rows["completion_mask"]
        return ((self._values(rows) - rows["returns"]).square() * mask).sum() / mask.sum()

    def _values(self, rows: dict[str, Any]) -> torch.Tensor:
        """Return the value before each token of the responses, (B, T), 0 after their end."""
        import torch

        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
        mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
        assert self.companion is not None
        values = self.companion(input_ids=ids, attention_mask=mask).logits[:, :, 0].float()
        return values[:, -rows["completion_ids"].size(1) - 1 : -1] * rows["completion_mask"]


class Settings(Shaped, OnPolicy):
    """PPO with a critic that starts from the reference policy."""

    solver: Literal["ppo"]

    def ascent(self, law: Law | None, procedure: Served) -> Ascent:
        return replace(super().ascent(law, procedure), advantages=self.advantages)

    def advantages(self, reference: str) -> Advantages:
        """Return advantages from a critic: a copy of the reference, with an adapter if the policy has one."""
        from peft import TaskType
        from transformers import AutoConfig, AutoModelForTokenClassification

        from infalign.training.common import with_adapter

        config = AutoConfig.from_pretrained(reference, num_labels=1)
        config.classifier_dropout = 0.0
        critic = AutoModelForTokenClassification.from_pretrained(
            reference, config=config, use_safetensors=True, trust_remote_code=False, dtype="float32"
        )
        if self.fit.gradient_checkpointing:
            critic.activation_checkpointing_enable()
            critic.train()  # activations are checkpointed only in training mode
        # of a task for which PEFT trains the head fully, without an adapter
        return GeneralizedAdvantage(with_adapter(critic, self.fit, TaskType.SEQ_CLS))
