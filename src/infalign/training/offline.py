"""Offline training: a policy fitted to the stored K rollouts per prompt; nothing is generated.

The solver supplies a `training.solvers.base.Objective`; the trainer is the same for all objectives.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from numpy.typing import NDArray
from peft import TaskType, get_peft_model
from transformers import EarlyStoppingCallback, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

from infalign.method.calibration import Array
from infalign.models.logprobs import IGNORED, completion_logprobs, right_padded
from infalign.models.settings import Fit
from infalign.training.common import Job, arguments, fit_and_save, length_class, lora, training_order
from infalign.training.solvers.base import Objective

HELD_OUT = 0.1  # share of prompts that are held out to detect overfitting


def fit_offline(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    objective: Objective,
    rollouts: Sequence[dict[str, Any]],
    fit: Fit,
    job: Job,
    model_dir: Path,
) -> list[dict[str, Any]]:
    """Fit the policy to ``rollouts`` and save it; return the log.

    A rollout has prompt_id, prompt_ids, completion_ids, reference_logprob and reward; those of one prompt are
    consecutive. A tenth of the prompts is held out, and the checkpoint with the lowest held-out loss is kept; training
    stops after two evaluations without an improvement. Every epoch makes new examples and pairs. If no checkpoint has
    a lower held-out loss than the start, the last row of the log has ``overfitted``, and the progress report says so:
    by this measure the reference is better than the best checkpoint, which is saved nevertheless.
    """
    groups = _by_prompt(rollouts)
    held_out, others = groups[:: round(1 / HELD_OUT)], [g for i, g in enumerate(groups) if i % round(1 / HELD_OUT)]
    rng, passes = np.random.default_rng(job.seed), ceil(fit.epochs)
    evaluation = _examples(objective, held_out, rng)
    training = concatenate_datasets([_examples(objective, others, rng) for _ in range(passes)])
    order = training_order(list(training["length"]), fit.epochs / passes, fit.batch_size, job.seed)
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
    }
    trainer = _Offline(
        objective,
        model=get_peft_model(model, config) if config else model,
        args=TrainingArguments(**settings),
        train_dataset=training.select(order),
        eval_dataset=evaluation,
        data_collator=_Collator(rollouts, tokenizer.pad_token_id),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    history = fit_and_save(trainer, tokenizer, job, model_dir)
    start, *later = [row["eval_loss"] for row in history if "eval_loss" in row]
    if min(later) >= start:
        history[-1]["overfitted"] = True
        steps = trainer.state.max_steps
        job.on_progress(
            steps, steps, f"! overfitted: the held-out loss is {start:.3g} at the start, {min(later):.3g} at best"
        )
    return history


@dataclass(frozen=True, slots=True)
class _Group:
    """The rollouts of one prompt: the index of the first, their rewards and length buckets."""

    first: int
    rewards: Array
    lengths: NDArray[np.intp]


def _by_prompt(rollouts: Sequence[dict[str, Any]]) -> list[_Group]:
    groups, first = [], 0
    for _, rows in groupby(rollouts, key=itemgetter("prompt_id")):
        found = [(row["reward"], len(row["prompt_ids"]) + len(row["completion_ids"])) for row in rows]
        rewards, lengths = zip(*found, strict=True)
        groups.append(_Group(first, np.array(rewards, float), length_class(np.array(lengths))))
        first += len(found)
    return groups


def _examples(objective: Objective, groups: Iterable[_Group], rng: np.random.Generator) -> Dataset:
    """Return one pass over the rollouts of ``groups``: rollout indices, number, largest length bucket."""
    found = [(group, *objective.examples(group.rewards, rng)) for group in groups]
    rollouts_EM = np.concatenate([group.first + indices_EM for group, indices_EM, _ in found])
    lengths_E = np.concatenate([group.lengths[indices_EM].max(1) for group, indices_EM, _ in found])
    numbers_E = np.concatenate([number_E for _, _, number_E in found])
    return Dataset.from_dict({"rollouts": rollouts_EM, "number": numbers_E, "length": lengths_E})


class _Offline(Trainer):
    def __init__(self, objective: Objective, **settings: Any) -> None:
        super().__init__(**settings)
        self._objective = objective
        # Llama and others accept a token count for the loss; Trainer then does not divide accumulated losses.
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        logprob = completion_logprobs(model, inputs["input_ids"], inputs["attention_mask"], inputs["labels"])
        h_BM = (logprob - inputs["reference_logprob"]).view(len(inputs["number"]), -1)
        lengths_BM = (inputs["labels"] != IGNORED).sum(1).view_as(h_BM)
        loss = self._objective.loss(h_BM, lengths_BM, inputs["number"])
        return (loss, {"log_ratio": h_BM}) if return_outputs else loss


@dataclass(frozen=True)
class _Collator:
    rollouts: Sequence[dict[str, Any]]
    pad_id: int

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [self.rollouts[i] for example in examples for i in example["rollouts"]]
        cpu = torch.device("cpu")
        tokens = [[*row["prompt_ids"], *row["completion_ids"]] for row in rows]
        labels = [[*[IGNORED] * len(row["prompt_ids"]), *row["completion_ids"]] for row in rows]
        return {
            "number": torch.tensor([example["number"] for example in examples]),
            "input_ids": right_padded(tokens, self.pad_id, cpu),
            "attention_mask": right_padded([[1] * len(row) for row in tokens], 0, cpu),
            "labels": right_padded(labels, IGNORED, cpu),
            "reference_logprob": torch.tensor([row["reference_logprob"] for row in rows]),
        }
