"""QRPO: offline regression of log π/π_ref on the calibrated, transformed reward of the rollouts already paid for.

The optimum of RLHF is π* = π_ref·exp(Φ/β)/Z. With calibrated rewards Z is known, so the policy is fitted by least
squares to log π/π_ref = Φ(Ĉ)/β − log Z (Quantile Reward Policy Optimization, NeurIPS 2025).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from infalign.training.common import Job, arguments, fit_and_save, lora  # first: it sets TRL's environment

import torch  # isort: skip
from datasets import Dataset
from peft import TaskType, get_peft_model
from scipy.special import logsumexp
from transformers import EarlyStoppingCallback, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

from infalign.calibration import Array, calibrate
from infalign.config import Fit
from infalign.likelihood import completion_logprobs
from infalign.transforms import Transformation, at_ranks, normalised_beta

HELD_OUT = 0.1  # share of prompts whose rollouts only watch for memorisation


def regression_targets(rewards_PK: Array, transform: Transformation, beta: float) -> Array:
    """Return log π*/π_ref of each rollout, shape (P, K), with the exact Z of the K rollouts of its prompt.

    Ĉ is the mid-rank among the prompt's own K rollouts, Z = mean exp(Φ(Ĉ)/β) over them, so every tie counts as it is
    and a prompt with one reward everywhere has targets 0. ``beta`` belongs to the paper's raw Φ.

    Ratios below 1/K, which K rollouts cannot tell from 0, are raised to it: −e^{−10u} at a KL of one nat asks for
    log-ratios of −1000 at the bottom, and squares of those would be all that is learned.
    """
    k = rewards_PK.shape[1]
    exponent = at_ranks(transform, calibrate(rewards_PK, np.sort(rewards_PK, axis=1)), k)
    exponent = exponent / normalised_beta(transform, beta)
    return _log_normalised(np.maximum(_log_normalised(exponent), -np.log(k)))


def _log_normalised(log_ratios_PK: Array) -> Array:
    """Shift each prompt's log-ratios so that their exponentials average to 1."""
    return log_ratios_PK - (logsumexp(log_ratios_PK, axis=1, keepdims=True) - np.log(log_ratios_PK.shape[1]))


def fit_qrpo(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict[str, Any]],
    fit: Fit,
    job: Job,
    model_dir: Path,
) -> list[dict[str, Any]]:
    """Fit the policy to ``rows`` of prompt_ids, completion_ids, reference_logprob and target; save it, return the log.

    Rows come prompt by prompt. The loss is (target − log π/π_ref)², in nats²; a tenth of the prompts is held out and
    the checkpoint with the lowest held-out loss is kept, stopping after two evaluations without a better one.
    """
    prompts = list(dict.fromkeys(row["prompt_id"] for row in rows))
    held_out = set(prompts[:: round(1 / HELD_OUT)])
    rows = [row | {"length": len(row["prompt_ids"]) + len(row["completion_ids"])} for row in rows]
    config = lora(fit, TaskType.CAUSAL_LM)
    settings = arguments(fit, job) | {
        "eval_strategy": "steps",
        "eval_steps": 0.2,
        "save_steps": 0.2,
        "eval_on_start": True,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "remove_unused_columns": False,
        "label_names": ["labels"],
        "train_sampling_strategy": "group_by_length",  # less padding
    }
    trainer = _Regression(
        model=get_peft_model(model, config) if config else model,
        args=TrainingArguments(**settings),
        train_dataset=Dataset.from_list([row for row in rows if row["prompt_id"] not in held_out]),
        eval_dataset=Dataset.from_list([row for row in rows if row["prompt_id"] in held_out]),
        data_collator=_Collator(tokenizer.pad_token_id),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    return fit_and_save(trainer, tokenizer, job, model_dir)


class _Regression(Trainer):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Llama and others take a token count with the loss, and Trainer then leaves accumulated losses undivided.
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        logprob = completion_logprobs(model, inputs["input_ids"], inputs["attention_mask"], inputs["labels"])
        residual = inputs["target"] - (logprob - inputs["reference_logprob"])
        loss = residual.square().mean()
        return (loss, {"residual": residual}) if return_outputs else loss


@dataclass(frozen=True)
class _Collator:
    pad_id: int

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(row["prompt_ids"]) + len(row["completion_ids"]) for row in rows)
        input_ids = torch.full((len(rows), width), self.pad_id)
        labels = torch.full((len(rows), width), -100)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for i, row in enumerate(rows):
            start, end = len(row["prompt_ids"]), len(row["prompt_ids"]) + len(row["completion_ids"])
            input_ids[i, :end] = torch.tensor([*row["prompt_ids"], *row["completion_ids"]])
            labels[i, start:end] = torch.tensor(row["completion_ids"])
            mask[i, :end] = 1
        return {
            "input_ids": input_ids,
            "attention_mask": mask,
            "labels": labels,
            "target": torch.tensor([row["target"] for row in rows]),
            "reference_logprob": torch.tensor([row["reference_logprob"] for row in rows]),
        }
