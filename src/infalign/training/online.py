"""On-policy solvers: they sample from the policy that they train. TRL's loops carry them.

======  ========================================================  ======================================================
solver  what it climbs                                            carried by
======  ========================================================  ======================================================
rloo    E[reward] − β·KL, leave-one-out baseline                  ``RLOOTrainer`` as it is
ppo     the same, advantages from a learned value function (GAE)  ``GRPOTrainer`` with other advantages
maxk    W − β·KL itself for Best- and Worst-of-N, no Φ            ``GRPOTrainer`` with other advantages
bond    towards Best-of-2 of a moving anchor (J-BOND)             ``GRPOTrainer`` with other advantages, anchor samples
grpo    its own objective: in-loss KL, group statistics           ``GRPOTrainer`` as it is
======  ========================================================  ======================================================

KL(π‖π_ref) belongs in the reward, as −β·log π/π_ref: as a loss of its own (GRPO) it is the gradient of something else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import TaskType, get_peft_model
from safetensors.torch import load_model, save_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from infalign.data.examples import Message, prompt_id
from infalign.errors import ConfigError
from infalign.method.credit import credit, served_win_rate
from infalign.method.procedures import Extreme
from infalign.method.reward import CalibratedReward, PredictedRankReward
from infalign.method.shapings import Ranked, Raw, Shaping
from infalign.models.logprobs import token_logprobs
from infalign.models.pretrained import AS_TEXT
from infalign.runs.recipe import Policy
from infalign.training.common import Job, arguments, fit_and_save, lora, training_order
from infalign.training.settings import Fit

BATCH_TOKENS = 16384  # tokens a forward pass
GAE_LAMBDA = 0.95
JEFFREYS = 0.5  # weight of the backward KL in J-BOND; the paper's
WORSE_THAN_BOTH = -float(np.log(16.0))  # J-BOND's reward
Rewards = Callable[[list[Any], list[str]], Sequence[float]]


@dataclass(frozen=True)
class Objective:
    """What the policy is trained on: a reward function, what becomes of its rewards, and the weight of KL.

    ``beta`` goes with the shaping's normalised values; for maxk with the win rate of ``procedure``, for bond it is the
    weight γ of the KL to the anchor.
    """

    reward: Rewards
    shaping: Shaping
    beta: float
    predicted: bool = False  # the reward predicts ranks (`reward.PredictedRankReward`)
    procedure: Extreme | None = None  # maxk
    kl_budget: float | None = None  # bond stops there
    anchor_rate: float = 0.02  # of bond's moving average; the paper's

    @property
    def shaped(self) -> CalibratedReward | PredictedRankReward:
        """The shaped reward as TRL calls it."""
        if self.predicted:
            assert isinstance(self.shaping, Ranked)
            return PredictedRankReward(self.reward, self.shaping.transform)
        return CalibratedReward(self.reward, self.shaping)


@dataclass(frozen=True)
class WinOverServed:
    """The chance to beat what the base policy serves, as a shaping (`credit.served_win_rate`)."""

    procedure: Extreme
    scale = 1.0

    @property
    def name(self) -> str:
        """``win against best-of-4``."""
        return f"win against {self.procedure.name}"

    def __call__(self, rewards: Any, reference_rewards_K: Any) -> Any:
        """Return the win rates of ``rewards``."""
        return served_win_rate(rewards, reference_rewards_K, self.procedure)


def fit_online(
    reference: str,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, Any]],
    objective: Objective,
    policy: Policy,
    job: Job,
    model_dir: Path,
    *,
    max_new_tokens: int,
    stored: "StoredRollouts | None" = None,
) -> list[dict[str, Any]]:
    """Train from the model ``reference`` on ``rows`` of prompt and reference_rewards; save, return the log.

    With ``stored`` rollouts grpo generates nothing: one outer iteration, groups of all K rollouts of a prompt.
    Raises ConfigError if the prompts do not fill one batch.
    """
    trainer = online_trainer(
        reference, tokenizer, rows, objective, policy, job, max_new_tokens=max_new_tokens, stored=stored
    )
    return fit_and_save(trainer, tokenizer, job, model_dir)


def online_trainer(
    reference: str,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, Any]],
    objective: Objective,
    policy: Policy,
    job: Job,
    *,
    max_new_tokens: int,
    stored: "StoredRollouts | None" = None,
) -> Trainer:
    """Return TRL's trainer of the policy's solver, set to the objective; see `fit_online`."""
    generations = stored.k if stored is not None else policy.generations
    if len(rows) * generations < policy.fit.batch_size:
        raise ConfigError(
            f"{len(rows)} prompts × {generations} generations do not fill a batch of {policy.fit.batch_size}; "
            "lower fit.batch_size or raise rollout.prompts"
        )
    order = training_order([1] * len(rows), policy.fit.epochs, policy.fit.batch_size // generations, job.seed)
    sampling = {"num_generations": generations, "max_completion_length": max_new_tokens, "shuffle_dataset": False}
    loading = {"chat_template_kwargs": AS_TEXT, "model_init_kwargs": {"use_safetensors": True}}
    make = {"rloo": _rloo, "grpo": _grpo, "ppo": _ppo, "maxk": _maxk, "bond": _bond}[policy.solver]
    return make(
        reference,
        objective,
        policy,
        arguments(policy.fit, job) | sampling | loading | UNTRUNCATED | {"beta": objective.beta},
        {
            "model": reference,
            "train_dataset": Dataset.from_list(rows).select(order),
            "processing_class": tokenizer,
            "peft_config": lora(policy.fit, TaskType.CAUSAL_LM),
            **(stored.settings(objective.shaping) if stored is not None else {}),
        },
    )


UNTRUNCATED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
AS_DERIVED = {"scale_rewards": "none", "loss_type": "dr_grpo", "use_bias_correction_kl": True}  # keeps Φ's shape


def _rloo(reference: str, objective: Objective, policy: Policy, settings: Any, parts: Any) -> Trainer:
    return RLOOTrainer(
        args=RLOOConfig(**settings, normalize_advantages=False),
        reward_funcs=objective.shaped,
        **parts,
    )


def _grpo(reference: str, objective: Objective, policy: Policy, settings: Any, parts: Any) -> Trainer:
    reward = parts.pop("reward_funcs", None) or objective.shaped
    trainer = _FirstIteration if policy.stored else GRPOTrainer
    return trainer(args=GRPOConfig(**settings, **({} if policy.shipped else AS_DERIVED)), reward_funcs=reward, **parts)


def _ppo(reference: str, objective: Objective, policy: Policy, settings: Any, parts: Any) -> Trainer:
    return _PPO(
        critic=_critic(reference, policy.fit),
        args=GRPOConfig(**settings, **AS_DERIVED),
        reward_funcs=objective.shaped,
        **parts,
    )


def _maxk(reference: str, objective: Objective, policy: Policy, settings: Any, parts: Any) -> Trainer:
    assert objective.procedure is not None
    return _MaxK(
        procedure=objective.procedure,
        args=GRPOConfig(**settings, **AS_DERIVED),
        reward_funcs=CalibratedReward(objective.reward, WinOverServed(objective.procedure)),
        **parts,
    )


def _bond(reference: str, objective: Objective, policy: Policy, settings: Any, parts: Any) -> Trainer:
    start = AutoModelForCausalLM.from_pretrained(
        reference, use_safetensors=True, trust_remote_code=False, dtype="float32"
    )
    anchored = {"sync_ref_model": True, "ref_model_mixup_alpha": objective.anchor_rate, "ref_model_sync_steps": 1}
    trainer = _JBOND(
        start=start,
        args=GRPOConfig(**settings, **AS_DERIVED, **anchored),
        reward_funcs=CalibratedReward(objective.reward, Raw()),
        **parts,
    )
    if objective.kl_budget is not None:
        trainer.add_callback(_StopAt(objective.kl_budget))
    return trainer


class _Carried(GRPOTrainer):
    """GRPO's loop with advantages of our own, which have all there is of KL, and with a companion model."""

    beta: float
    model_wrapped: Any
    companion: torch.nn.Module | None = None  # trained or moved beside the policy, so it belongs to a checkpoint

    def advantages(self, output: dict[str, Any], rewards_B: torch.Tensor, log_ratio_BT: torch.Tensor) -> Any:
        """Return the advantages of the local responses, (B,) or (B, T), from all there is to know about them."""
        raise NotImplementedError

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards = rewards[:, 0]  # of all processes
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        rewards_B = self._local(self._rewards)
        log_ratio_BT = (self._logprobs(self.model, output) - output["ref_per_token_logps"]) * output["completion_mask"]
        self._log("kl", self._spent(output, log_ratio_BT))
        output["advantages"] = self.advantages(output, rewards_B, log_ratio_BT)
        return output

    def _spent(self, output: dict[str, Any], log_ratio_BT: torch.Tensor) -> torch.Tensor:
        """Return log π/π_ref of each response, (B,), in nats."""
        return log_ratio_BT.sum(1)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        beta, self.beta = self.beta, 0.0  # KL is in the advantages
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.beta = beta

    def _logprobs(self, model: Any, output: dict[str, Any]) -> torch.Tensor:
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        size = self.args.per_device_train_batch_size
        with torch.no_grad():
            found: torch.Tensor = self._get_per_token_logps_and_entropies(
                model, ids, mask, output["completion_ids"].size(1), size
            )[0]
        return found

    def _local(self, values: torch.Tensor) -> torch.Tensor:
        """Return this process's rows of values that were gathered from all processes."""
        return values.chunk(self.accelerator.num_processes)[self.accelerator.process_index]

    def _less_others(self, values_B: torch.Tensor) -> torch.Tensor:
        """Return each local value less the mean of the others of its group."""
        grouped = self.accelerator.gather(values_B).view(-1, self.num_generations)
        centred = (grouped - grouped.mean(1, keepdim=True)) * self.num_generations / (self.num_generations - 1)
        return self._local(centred.flatten())

    def _log(self, name: str, values_B: torch.Tensor) -> None:
        self._metrics["train"][name].append(self.accelerator.gather(values_B).mean().item())

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.companion is not None and self.is_world_process_zero():
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            save_model(self.accelerator.unwrap_model(self.companion), str(folder / "companion.safetensors"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.companion is not None:
            file = str(Path(resume_from_checkpoint) / "companion.safetensors")
            load_model(self.accelerator.unwrap_model(self.companion), file)


class _PPO(_Carried):
    """Generalised advantage estimation on reward − β·log π/π_ref, with γ = 1 and a critic of its own."""

    def __init__(self, *, critic: torch.nn.Module, **settings: Any) -> None:
        super().__init__(**settings)
        self.companion = self.accelerator.prepare_model(critic.to(self.accelerator.device))

    def create_optimizer(self, model: Any = None) -> Any:
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if fresh:
            assert self.companion is not None
            critic = self.companion
            optimizer.add_param_group({"params": [weight for weight in critic.parameters() if weight.requires_grad]})
            # Trainer zeroes the gradients of its own model only.
            optimizer.register_step_post_hook(lambda *_: critic.zero_grad())
        return optimizer

    def advantages(self, output: dict[str, Any], rewards_B: torch.Tensor, log_ratio_BT: torch.Tensor) -> torch.Tensor:
        mask_BT = output["completion_mask"]
        rewards_BT = -self.beta * log_ratio_BT
        rewards_BT[torch.arange(len(mask_BT)), mask_BT.sum(1) - 1] += rewards_B.to(rewards_BT.dtype)
        size = self.args.per_device_train_batch_size
        rows = [{k: output[k][i : i + size] for k in TOKENS} for i in range(0, len(mask_BT), size)]
        with torch.no_grad():
            values_BT = torch.cat([self._values(chunk) for chunk in rows])
        advantage_BT = gae(rewards_BT, values_BT, GAE_LAMBDA)
        output["returns"] = (advantage_BT + values_BT) * mask_BT
        return advantage_BT * mask_BT

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        mask = inputs["completion_mask"]
        error = ((self._values(inputs) - inputs["returns"]).square() * mask).sum() / mask.sum()
        # The critic's parameters are its own: how its loss is weighed against the policy's does not matter to Adam.
        return super()._compute_loss(model, inputs) + error / self.current_gradient_accumulation_steps

    def _values(self, rows: dict[str, Any]) -> torch.Tensor:
        """Return the value before each token of the responses, (B, T), 0 after their end."""
        ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
        mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
        assert self.companion is not None
        values = self.companion(input_ids=ids, attention_mask=mask).logits[:, :, 0].float()
        found: torch.Tensor = values[:, -rows["completion_ids"].size(1) - 1 : -1] * rows["completion_mask"]
        return found


class _MaxK(_Carried):
    """The gradient of W − β·KL itself: order-statistic credit for the rewards, leave-one-out for the KL."""

    def __init__(self, *, procedure: Extreme, **settings: Any) -> None:
        super().__init__(**settings)
        self._procedure = procedure

    def advantages(self, output: dict[str, Any], rewards_B: torch.Tensor, log_ratio_BT: torch.Tensor) -> torch.Tensor:
        groups = self._rewards.view(-1, self.num_generations).double().cpu().numpy()
        found = torch.tensor(credit(groups, self._procedure).ravel(), device=rewards_B.device)
        return self._local(found).float() - self.beta * self._less_others(log_ratio_BT.sum(1))


class _JBOND(_Carried):
    """J-BOND (Sessa et al. 2025, algorithm 2, the sign of its regulariser mended); TRL's reference is the anchor.

    Each response y of the policy comes with two of the anchor. The better one is fine-tuned on (forward KL), y is
    rewarded −log 16 if it is worse than both, less log π/π_anchor (backward KL), less β·log π/π_anchor (regulariser).
    """

    def __init__(self, *, start: PreTrainedModel, **settings: Any) -> None:
        super().__init__(**settings)
        self._start = start.eval().requires_grad_(False).to(self.accelerator.device)
        self.companion = self.ref_model

    def _spent(self, output: dict[str, Any], log_ratio_BT: torch.Tensor) -> torch.Tensor:
        """Return log π/π_start of each response: TRL's reference is the anchor, which moves."""
        policy_B = ((log_ratio_BT + output["ref_per_token_logps"]) * output["completion_mask"]).sum(1)
        texts = (
            [row[mask.bool()].tolist() for row, mask in zip(output[f"{kind}_ids"], output[f"{kind}_mask"], strict=True)]
            for kind in ("prompt", "completion")
        )
        start_B = token_logprobs(self._start, *texts, pad_id=self._tokenizer.pad_token_id, batch_tokens=BATCH_TOKENS)
        return policy_B - torch.tensor(start_B, device=policy_B.device)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._drawn = [self._draw_from_anchor(inputs) for _ in range(2)]
        output = super()._generate_and_score_completions(inputs)
        (first, first_rewards), (second, second_rewards) = self._drawn
        better = [a if x >= y else b for a, b, x, y in zip(first, second, first_rewards, second_rewards, strict=True)]
        length = max(output["completion_ids"].size(1), *map(len, better))
        pad_id, device = self._tokenizer.pad_token_id, self.accelerator.device
        ids = torch.tensor([row + [pad_id] * (length - len(row)) for row in better], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in better], device=device)
        wider = (0, length - output["completion_ids"].size(1))
        pad = torch.nn.functional.pad
        output["completion_ids"] = torch.cat([pad(output["completion_ids"], wider, value=pad_id), ids])
        output["completion_mask"] = torch.cat([pad(output["completion_mask"], wider), mask])
        for name in ("prompt_ids", "prompt_mask"):
            output[name] = output[name].repeat(2, 1)
        forward = torch.full_like(output["advantages"], 1.0 - JEFFREYS)
        output["advantages"] = torch.cat([output["advantages"], forward])
        kept = (*TOKENS, "advantages", "num_items_in_batch")
        return {name: output[name] for name in kept if name in output}

    def advantages(self, output: dict[str, Any], rewards_B: torch.Tensor, log_ratio_BT: torch.Tensor) -> torch.Tensor:
        worst = torch.minimum(*(rewards for _, rewards in self._drawn))
        reward = WORSE_THAN_BOTH * (rewards_B < worst)
        spent = log_ratio_BT.sum(1)
        return self._less_others(JEFFREYS * (reward - spent) - self.beta * spent)

    def _draw_from_anchor(self, inputs: Any) -> tuple[list[list[int]], torch.Tensor]:
        """Return one response of the anchor to each prompt, as token ids, and their rewards."""
        prompts = [row["prompt"] for row in inputs]
        wrapped, self.model_wrapped = self.model_wrapped, self.ref_model
        try:
            _, ids, _, completions, *_ = self._generate(prompts)
        finally:
            self.model_wrapped = wrapped
        return ids, self._local(self._calculate_rewards(inputs, prompts, completions, ids)[:, 0])


class _FirstIteration(GRPOTrainer):
    """GRPO on rollouts of the reference, which is therefore the policy before the update."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        output["old_per_token_logps"] = output["ref_per_token_logps"]
        return output


@dataclass(frozen=True)
class StoredRollouts:
    """The K rollouts of each prompt, in place of generation: prompt_ids, completion_ids and reward, by prompt_id."""

    by_prompt: dict[str, list[dict[str, Any]]]

    @property
    def k(self) -> int:
        """Rollouts a prompt."""
        return len(next(iter(self.by_prompt.values())))

    def settings(self, shaping: Shaping) -> dict[str, Any]:
        """Return what makes a GRPOTrainer take these rollouts and their rewards."""

        def rollouts(prompts: list[list[Message]], trainer: Any) -> dict[str, Any]:
            first = trainer.accelerator.process_index * len(prompts)  # groups are whole across processes
            rows = [self.by_prompt[prompt_id(p)][(first + i) % self.k] for i, p in enumerate(prompts)]
            columns = ("prompt_ids", "completion_ids", "reward")
            return {name: [row[name] for row in rows] for name in columns} | {"logprobs": None}

        def reward(
            prompts: Any, completions: Any, reward: list[float], reference_rewards: list[list[float]], **_: Any
        ) -> list[float]:
            return [
                float(shaping(r, np.asarray(reference, float)))
                for r, reference in zip(reward, reference_rewards, strict=True)
            ]

        return {"rollout_func": rollouts, "reward_funcs": reward}


class _StopAt(TrainerCallback):
    """Ends training when the KL that was logged, a mean over the last steps, reaches the budget."""

    def __init__(self, budget: float) -> None:
        self._budget = budget

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if (logs or {}).get("kl", 0.0) >= self._budget:
            control.should_training_stop = True


TOKENS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def gae(rewards_BT: torch.Tensor, values_BT: torch.Tensor, lam: float) -> torch.Tensor:
    """Return the advantages Σ_l λ^l·δ_{t+l}, δ_t = r_t + V_{t+1} − V_t, V = 0 after the end; shape (B, T)."""
    advantages, last = torch.empty_like(rewards_BT), torch.zeros_like(rewards_BT[:, 0])
    after = torch.zeros_like(last)
    for t in reversed(range(rewards_BT.size(1))):
        last = rewards_BT[:, t] + after - values_BT[:, t] + lam * last
        advantages[:, t], after = last, values_BT[:, t]
    return advantages


def _critic(reference: str, fit: Fit) -> torch.nn.Module:
    """Return a copy of the reference with one value a token for its logits; with an adapter if the policy has one."""
    shape = AutoConfig.from_pretrained(reference, num_labels=1)
    shape.classifier_dropout = 0.0
    critic = AutoModelForTokenClassification.from_pretrained(
        reference,
        config=shape,
        use_safetensors=True,
        trust_remote_code=False,
        dtype="float32",
    )
    if fit.gradient_checkpointing:
        critic.activation_checkpointing_enable()
        critic.train()  # else nothing is checkpointed
    config = lora(fit, TaskType.SEQ_CLS)  # the task whose head PEFT leaves out of "all linear layers" and trains whole
    return get_peft_model(critic, config) if config else critic
