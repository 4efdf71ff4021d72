"""On-policy training in TRL's loops: RLOO's and GRPO's as they are, or GRPO's with infalign's advantages.

GRPO's loop takes any `objectives.Advantages`; solvers supply these objects and share no code with the loop.
TRL's private methods are called only in this module, and TRL is pinned to a minor version.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import TaskType
from safetensors.torch import load_model, save_model
from transformers import AutoConfig, PreTrainedTokenizerBase, Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from infalign.core.errors import ConfigError
from infalign.data.messages import prompt_id
from infalign.method.by_name import UserReward, columns_of
from infalign.method.reward import CalibratedReward, spoken_text
from infalign.models.conversations import decode, prompt_ids
from infalign.models.settings import Fit
from infalign.sampling.engine import Vocabulary
from infalign.training.common import lora_config, run_training, trainer_config, training_order
from infalign.training.objectives import Advantages, Ascent, Batch, Loop
from infalign.training.output_folder import Job

Rewards = Callable[[list[Any], list[str]], Sequence[float]]

UNTRUNCATED = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}
COMPANION = "companion.safetensors"  # file name in a checkpoint


@dataclass(frozen=True)
class Problem:
    """What an on-policy training starts from: a reference, prompts and a reward."""

    reference: str
    tokenizer: PreTrainedTokenizerBase
    rows: list[dict[str, Any]]  # with prompt and reference_rewards
    reward: Rewards
    max_new_tokens: int


def fit_on_policy(problem: Problem, ascent: Ascent, fit: Fit, job: Job) -> list[dict[str, Any]]:
    """Train a policy and save it; return the log. Raises ConfigError if the prompts do not fill one batch."""
    trainer = on_policy_trainer(problem, ascent, fit, job)
    for row in problem.rows:
        if tools := json.loads(row.get("columns") or "{}").get("tools"):
            trainer.tools_of[prompt_id(row["prompt"])] = tools
    return run_training(trainer, job).save(problem.tokenizer)


def on_policy_trainer(problem: Problem, ascent: Ascent, fit: Fit, job: Job) -> Trainer:
    """Return the TRL trainer that climbs so on the problem; see `fit_on_policy`."""
    generations = ascent.generations
    if len(problem.rows) * generations < fit.batch_size:
        raise ConfigError(
            f"{len(problem.rows)} prompts × {generations} generations do not fill a batch of {fit.batch_size}; "
            "lower fit.batch_size or raise rollout.prompts"
        )
    model = AutoConfig.from_pretrained(problem.reference)
    # Ids that pad the model's vocabulary beyond the tokenizer's have no text.
    absent = Vocabulary(problem.tokenizer, size=model.get_text_config(decoder=True).vocab_size).absent
    order = training_order([1] * len(problem.rows), fit.passes, fit.batch_size // generations, job.seed)
    options = UNTRUNCATED | dict(ascent.trl_options)
    options |= {"num_generations": generations, "max_completion_length": problem.max_new_tokens, "beta": ascent.beta}
    options |= {"shuffle_dataset": False, "model_init_kwargs": {"use_safetensors": True}}
    options |= {"generation_kwargs": {"suppress_tokens": absent}} if absent else {}
    reward = with_row_columns(problem.reward) if isinstance(problem.reward, UserReward) else problem.reward
    parts = {
        "model": problem.reference,
        "train_dataset": Dataset.from_list(problem.rows).select(order),
        "processing_class": problem.tokenizer,
        "peft_config": lora_config(fit, TaskType.CAUSAL_LM, model),
        "reward_funcs": CalibratedReward(reward, ascent.shaping),
    }
    if ascent.trl_trainer == "rloo":
        return _Rloo(args=trainer_config(RLOOConfig, fit, job, **options), **parts)
    config = trainer_config(GRPOConfig, fit, job, **options)
    if ascent.advantages is None:
        return _Grpo(args=config, **parts)
    trainer = AdvantageLoop(ascent.advantages(problem.reference), args=config, **parts)
    if ascent.stops_at is not None:
        trainer.add_callback(_StopAtKL(ascent.stops_at))
    return trainer


def with_row_columns(reward: UserReward) -> Rewards:
    """Return a reward that gives the user's function what TRL gives, and the columns that rows hold as JSON."""

    def rewards(prompts: list[Any], completions: list[Any], columns: Sequence[str] = (), **given: Any) -> Any:
        texts = [spoken_text(row, completion) for row, completion in enumerate(completions)]
        return reward(prompts, texts, columns_of([json.loads(row) for row in columns]), given)

    return rewards


class _Conversations:
    """What a trainer asks and rewards, by `models.conversations` in place of TRL's own reading of prompts and ids."""

    processing_class: Any
    eos_token_ids: list[int]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.tools_of = dict[str, list[Any]]()  # that a prompt shows, by its id

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        if isinstance(prompts[0], str):  # no conversation
            return super()._tokenize_prompts(prompts)  # type: ignore[misc]
        tools = [self.tools_of.get(prompt_id(prompt)) for prompt in prompts]
        return prompt_ids(self.processing_class, prompts, tools), None, {}

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        texts = decode(self.processing_class, completion_ids_list, self.eos_token_ids)
        return super()._calculate_rewards(inputs, prompts, texts, completion_ids_list)  # type: ignore[misc]


class _Rloo(_Conversations, RLOOTrainer):
    pass


class _Grpo(_Conversations, GRPOTrainer):
    pass


class AdvantageLoop(_Grpo, Loop):
    """GRPO's loop with the given advantages, which contain the whole KL term, and with their companion model."""

    model_wrapped: Any

    def __init__(self, advantages: Advantages, **settings: Any) -> None:
        super().__init__(**settings)
        self._advantages = advantages
        advantages.start(self)

    # For advantages

    def draw_responses(self, model: torch.nn.Module, prompts: list[Any]) -> tuple[list[list[int]], torch.Tensor]:
        """Return one response of ``model`` to each prompt, as token ids, and their rewards."""
        asked = [row["prompt"] for row in prompts]
        wrapped, self.model_wrapped = self.model_wrapped, model
        try:
            _, ids, _, completions, *_ = self._generate(asked)
        finally:
            self.model_wrapped = wrapped
        return ids, self.local_rows(self._calculate_rewards(prompts, asked, completions, ids)[:, 0])

    # Overrides of TRL's loop

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self._rewards = rewards[:, 0]  # gathered from all processes
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._advantages.before_drawing(self, inputs)
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        local_B = self.local_rows(self._rewards)
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        width, at_once = output["completion_ids"].size(1), self.args.per_device_train_batch_size
        with torch.no_grad():
            logprobs_BT, *_ = self._get_per_token_logps_and_entropies(self.model, ids, mask, width, at_once)
        log_ratio_BT = (logprobs_BT - output["ref_per_token_logps"]) * output["completion_mask"]
        batch = Batch(inputs, output, local_B, self._rewards, log_ratio_BT)
        log_ratios = self.accelerator.gather(self._advantages.log_ratios_to_start(self, batch))
        self._metrics["train"]["kl"].append(log_ratios.mean().item())
        output["advantages"] = self._advantages.compute(self, batch)
        return self._advantages.training_batch(self, output)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        extra = self._advantages.extra_loss(inputs)
        beta, self.beta = self.beta, 0.0  # the KL term is in the advantages
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self.beta = beta
        return loss if extra is None else loss + extra / self.current_gradient_accumulation_steps

    def create_optimizer(self, model: Any = None) -> Any:
        """Return the optimizer, with the companion's weights if it is trained."""
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        companion = self._advantages.companion
        if fresh and companion is not None and self._advantages.trains_companion:
            optimizer.add_param_group({"params": [w for w in companion.parameters() if w.requires_grad]})
            optimizer.register_step_post_hook(lambda *_: companion.zero_grad())  # Trainer zeroes only its own model
        return optimizer

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self._advantages.companion is not None and self.is_world_process_zero():
            folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
            save_model(self.accelerator.unwrap_model(self._advantages.companion), str(folder / COMPANION))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._advantages.companion is not None:
            file = str(Path(resume_from_checkpoint) / COMPANION)
            load_model(self.accelerator.unwrap_model(self._advantages.companion), file)


class _StopAtKL(TrainerCallback):
    """Ends training when the logged KL, a mean over the last steps, reaches the budget."""

    def __init__(self, budget: float) -> None:
        self._budget = budget

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if logs.get("kl", 0.0) >= self._budget:
            control.should_training_stop = True
