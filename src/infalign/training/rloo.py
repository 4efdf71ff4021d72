"""RLOO by TRL: on-policy, KL in the reward, advantages not normalised, so Φ and β are those of the theory."""

from pathlib import Path
from typing import Any

from infalign.training.common import Job, arguments, fit_and_save, lora  # first: it sets TRL's environment

from datasets import Dataset  # isort: skip
from peft import TaskType
from transformers import PreTrainedTokenizerBase
from trl import RLOOConfig, RLOOTrainer

from infalign.config import Policy
from infalign.errors import ConfigError
from infalign.reward import CalibratedReward
from infalign.transforms import normalised_beta


def settings(policy: Policy, job: Job, *, beta: float, max_new_tokens: int) -> RLOOConfig:
    """Return the RLOO configuration that optimises E[Φ(Ĉ)] − β·KL and nothing else; Φ normalised, and β for it."""
    return RLOOConfig(
        **arguments(policy.fit, job),
        beta=beta,
        normalize_advantages=False,
        num_generations=policy.generations,
        max_completion_length=max_new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
    )


def fit_rloo(
    reference: str,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, Any]],
    reward: CalibratedReward,
    policy: Policy,
    job: Job,
    model_dir: Path,
    *,
    beta: float,
    max_new_tokens: int,
) -> list[dict[str, Any]]:
    """Train from the model ``reference`` on ``rows`` of prompt and reference_rewards; save, return the log.

    TRL's logged ``kl`` is a mean per token. Raises ConfigError if the prompts do not fill one batch.
    """
    if len(rows) * policy.generations < policy.fit.batch_size:
        raise ConfigError(
            f"{len(rows)} prompts × {policy.generations} generations do not fill a batch of {policy.fit.batch_size}; "
            "lower fit.batch_size or raise rollout.prompts"
        )
    trainer = RLOOTrainer(
        model=reference,
        reward_funcs=reward,
        args=settings(policy, job, beta=normalised_beta(reward.transform, beta), max_new_tokens=max_new_tokens),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=lora(policy.fit, TaskType.CAUSAL_LM),
    )
    return fit_and_save(trainer, tokenizer, job, model_dir)
