"""TRL's GRPO and RLOO trainers with group advantages: ``GroupGRPOTrainer(…, objective="pass@8")``.

TRL has no hook for advantages. Private in it are ``_calculate_rewards``, which returns the rewards of all processes,
``_generate_and_score_completions``, which returns what is trained on, and ``_logs``, where advantages are corrected.
"""

from typing import Any, ClassVar

import torch
from trl import GRPOTrainer, RLOOTrainer

from infalign.core.errors import ConfigError
from infalign.integrations.estimators import check_version, of_groups
from infalign.method.by_name import by_name, split
from infalign.method.group_advantages import advantages
from infalign.method.reward import rewards_of


def _called_by_trl(reward: Any) -> Any:
    """Return a reward function of any form as one of TRL's; a model, or the name of one, as it is."""
    if isinstance(reward, str | torch.nn.Module):
        return reward
    named = by_name(reward)  # fails now, not after the first responses

    def called(prompts: list[Any], completions: list[Any], **passed: Any) -> list[float]:
        return rewards_of(named, prompts, completions, *split(passed), may_lack=True).tolist()

    called.__name__ = getattr(reward, "__name__", type(reward).__name__)
    return called


class _GroupAdvantages:
    kept: ClassVar[dict[str, tuple[Any, ...]]]  # values that leave the objective as it is
    kl_in_reward: ClassVar[bool]
    accelerator: Any

    def __init__(self, model: Any, reward_funcs: Any, *given: Any, objective: str, **settings: Any) -> None:
        advantages([], [], objective)  # is it known?
        check_version("trl")
        self._objective = objective
        functions = [*map(_called_by_trl, reward_funcs if isinstance(reward_funcs, list) else [reward_funcs])]
        super().__init__(model, functions, *given, **settings)  # type: ignore[call-arg]
        for name, kept in self.kept.items():
            if (value := getattr(self.args, name)) not in kept:  # type: ignore[attr-defined]
                right = " or ".join(f"{name}={one!r}" for one in kept)
                raise ConfigError(f"{name}={value!r} would change the objective, {objective}; set {right}")

    def _calculate_rewards(self, *given: Any) -> Any:
        self._reward_BF = super()._calculate_rewards(*given)  # type: ignore[misc]
        return self._reward_BF

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self.model.training:  # type: ignore[attr-defined]
            found_B = self._advantages(self._objective)
            if self.kl_in_reward:  # beside the reward, whose advantages TRL has by RLOO
                found_B += self.accelerator.gather(output["advantages"]) - self._advantages("rloo")
            output["advantages"] = found_B.chunk(self.accelerator.num_processes)[self.accelerator.process_index]
            logged = self._logs["advantages"]  # type: ignore[attr-defined]
            for place, value in enumerate(found_B.tolist(), len(logged) - len(found_B)):
                logged[place] = value
        return output

    def _advantages(self, objective: str) -> torch.Tensor:
        """Return those of the rewards of all processes, (B,): 0 where every reward function returned None."""
        weights_F = self.reward_weights.to(self._reward_BF.device)  # type: ignore[attr-defined]
        scored = torch.nonzero(~torch.isnan(self._reward_BF).all(dim=1)).squeeze(1)
        rewards_B = (self._reward_BF * weights_F).nansum(dim=1)
        found_B = torch.zeros_like(rewards_B)
        groups = scored // self.num_generations  # type: ignore[attr-defined]
        found_B[scored] = of_groups(rewards_B[scored], groups.tolist(), objective)
        return found_B


class GroupGRPOTrainer(_GroupAdvantages, GRPOTrainer):
    """GRPO with the advantages of ``objective``, neither scaled nor centered; the KL, with weight ``beta``, is a loss.

    Reward functions may have any form that `score` calls. Raises ConfigError for settings that change the objective,
    and DataError for groups that are too small for it and for a reward that is neither finite nor None.
    """

    kept: ClassVar = {
        "loss_type": ("dapo", "dr_grpo"),  # others divide by a response's length, or bound what a token counts
        "mask_truncated_completions": (False,),
        "multi_objective_aggregation": ("sum_then_normalize",),
        "top_entropy_quantile": (1.0,),
        "entropy_coef": (0.0,),
        "use_adaptive_entropy": (False,),
        "off_policy_mask_threshold": (None,),
    }
    kl_in_reward = False


class GroupRLOOTrainer(_GroupAdvantages, RLOOTrainer):
    """RLOO with the advantages of ``objective`` and, for the KL in the reward, with weight ``beta``, RLOO's own.

    Raises as `GroupGRPOTrainer`.
    """

    kept: ClassVar = {
        "mask_truncated_completions": (False,),
        "normalize_advantages": (False,),
        "reward_clip_range": (None,),
    }
    kl_in_reward = True
