"""Offline training: a policy fitted to the stored K rollouts per prompt; nothing is generated.

The solver supplies a `training.solvers.base.Objective`; the trainer is the same for all objectives.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import ceil
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from peft import TaskType, get_peft_model
from transformers import EarlyStoppingCallback, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments

from infalign.core.errors import ConfigError
from infalign.core.progress import OnProgress
from infalign.method.calibration import Array
from infalign.models.guided import GuidedForCausalLM
from infalign.models.logits import kl_from
from infalign.models.logprobs import IGNORED, completion_logprobs, right_padded
from infalign.models.packed import PackedBatch, can_pack, packing
from infalign.models.settings import Fit
from infalign.models.top_layers import starting_from_states
from infalign.models.top_tokens import TopTokens
from infalign.training.common import Job, arguments, fit_and_save, lora, on_one_device
from infalign.training.scale import scale_to_kl
from infalign.training.solvers.base import OFF, Objective

VALIDATED = {
    "eval_strategy": "steps",
    "eval_steps": 0.2,
    "save_steps": 0.2,
    "eval_on_start": True,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": False,
    "remove_unused_columns": False,
    "label_names": ["number"],
}
VALIDATIONS = 1 + round(1 / 0.2)  # at the start, and so often as eval_steps says
HELD_OUT = 0.1  # share of prompts that are held out to detect overfitting
TOGETHER = 8  # examples of one prompt in a batch, where the prompt is computed again
WATCHED = 256, 1024  # at least and at most so many examples of held-out prompts is the held-out loss the mean of
WATCHED_SHARE = 1 / 16  # and between these so many of the training's, so that watching takes an eighth of its time
SCALED_ON = 1024  # rollouts of held-out prompts on which the strength of a guide is measured


def fit_offline(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    objective: Objective,
    rollouts: Sequence[dict[str, Any]],
    fit: Fit,
    job: Job,
    model_dir: Path,
    kl: float | None = None,
    teacher: PreTrainedModel | None = None,
) -> list[dict[str, Any]]:
    """Fit the policy to ``rollouts`` and save it; return the log.

    A rollout has prompt_id, prompt_ids, completion_ids, reference_logprob and reward; those of one prompt are
    consecutive. For a guide that reads the reference's states, or an adapter on the last layers, it may have them as
    ``states``, and as ``teacher_states`` for a teacher's guide (`models.states`). A tenth of the prompts is held out,
    and the checkpoint with the lowest held-out loss is kept; training stops after two evaluations without an
    improvement. Every epoch makes new examples and pairs. If no checkpoint has a lower held-out loss than the start,
    the last row of the log has ``overfitted``, and the progress report says so: by this measure the reference is better
    than the best checkpoint, which is saved nevertheless. A guide is brought to ``kl`` nats, if given, on rollouts of
    the held-out prompts; the last row of the log has the factor (``scale``) and the KL there (``reached``, None if not
    told). With a ``teacher`` the loss is Σ_t KL(π_teacher ‖ π) per response, and the objective supplies the
    rollouts only.
    """
    groups = _by_prompt(rollouts)
    goal: Any = objective.loss if teacher is None else teacher
    training, evaluation, unseen = _rows(objective, rollouts, groups, fit, job.seed)
    together = can_pack(model) and (teacher is None or can_pack(teacher))
    if not together and (teacher is not None or isinstance(model, GuidedForCausalLM)):
        raise ConfigError("a model has layers without full attention, which no guide and no distillation can use")
    config = lora(fit, TaskType.CAUSAL_LM, model.config)
    kind = _ToTargets if teacher is None else _ToTeacher
    trainer = kind(
        goal,
        model=get_peft_model(model, config) if config else model,
        args=on_one_device(TrainingArguments(**arguments(fit, job) | VALIDATED)),
        train_dataset=training,
        eval_dataset=evaluation,
        data_collator=(_Packer if together else _Padder)(rollouts, tokenizer.pad_token_id),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )
    finish = None
    if kl is not None and isinstance(model, GuidedForCausalLM):
        finish = partial(_to_kl, unseen, kl, job.on_progress)
    with ExitStack() as stack:
        for packed in (model, teacher) if together else ():
            if packed is not None:
                stack.enter_context(packing(packed))
        if fit.lora is not None and fit.lora.layers is not None:
            stack.enter_context(starting_from_states(model, fit.lora.layers))
        history = fit_and_save(trainer, tokenizer, job, model_dir, finish)
    start, *later = [row["eval_loss"] for row in history if "eval_loss" in row]
    if min(later) >= start:
        history[-1]["overfitted"] = True
        steps = trainer.state.max_steps
        job.on_progress(
            steps, steps, f"! overfitted: the held-out loss is {start:.3g} at the start, {min(later):.3g} at best"
        )
    return history


def _to_kl(
    rollouts: Sequence[dict[str, Any]], kl: float, on_progress: OnProgress, model: GuidedForCausalLM
) -> dict[str, float | None]:
    """Bring a guide to ``kl`` nats, and say so where that cannot be had."""
    scale, reached = scale_to_kl(model, rollouts, kl)
    if reached is None:
        on_progress(1, 1, f"! {len(rollouts):,} rollouts cannot tell the guide's KL, so it keeps its strength")
    elif abs(reached - kl) > OFF * kl:
        on_progress(
            1, 1, f"! {reached:.2g} nats of {kl:g} at {scale:.2g} times the guide: change epochs or learning rate"
        )
    return {"scale": scale, "reached": reached}


@dataclass(frozen=True, slots=True)
class _Group:
    """The rollouts of one prompt: the index of the first, and their rewards."""

    first: int
    rewards: Array


def _by_prompt(rollouts: Sequence[dict[str, Any]]) -> list[_Group]:
    groups, first = [], 0
    for _, rows in groupby(rollouts, key=itemgetter("prompt_id")):
        rewards = np.array([row["reward"] for row in rows], float)
        groups.append(_Group(first, rewards))
        first += len(rewards)
    return groups


def _rows(
    objective: Objective,
    rollouts: Sequence[dict[str, Any]],
    groups: Sequence[_Group],
    fit: Fit,
    seed: int,
) -> tuple[Dataset, Dataset, list[dict[str, Any]]]:
    """Return the examples to train on, some of the held-out ones, and rollouts of these."""
    every = round(1 / HELD_OUT)
    held_out, others = groups[::every], [group for i, group in enumerate(groups) if i % every]
    rng = np.random.default_rng(seed)
    evaluation = _pass(objective, held_out, rng)
    passes = [_pass(objective, others, rng) for _ in range(ceil(fit.epochs))]
    training = concatenate_datasets(passes)
    most = max(round(fit.epochs * len(passes[0])), fit.batch_size)
    each = ceil(SCALED_ON / len(held_out))
    unseen = [rollouts[group.first + i] for group in held_out for i in range(min(each, group.rewards.size))]
    training = training.select(range(min(most, len(training))))
    return training, evaluation.select(range(watched(len(training), len(evaluation)))), unseen


def watched(examples: float, held_out: float) -> int:
    """Return how many of the examples of held-out prompts are watched while so many others are trained on.

    >>> watched(100, 1280), watched(5760, 1280), watched(1e6, 1280), watched(100, 40)
    (256, 360, 1024, 40)
    """
    least, most = WATCHED
    return round(min(held_out, max(least, min(most, WATCHED_SHARE * examples))))


def _pass(objective: Objective, groups: Iterable[_Group], rng: np.random.Generator) -> Dataset:
    """Return one pass over ``groups`` in random order: the rollouts and the number of each example.

    `TOGETHER` examples of a prompt follow each other, so that a batch computes it once; they are dealt like cards, so
    that equal examples are apart.
    """
    rollouts, numbers = [], []
    for group in groups:
        indices_EM, number_E = objective.examples(group.rewards, rng)
        shuffled = rng.permutation(group.rewards.size)[indices_EM[:, 0]].argsort(kind="stable")
        dealt = ceil(len(shuffled) / TOGETHER)
        hands = [shuffled[hand::dealt] for hand in range(dealt)]
        rollouts += [group.first + indices_EM[hand] for hand in hands]
        numbers += [number_E[hand] for hand in hands]
    order = rng.permutation(len(rollouts))
    rows, column = (np.concatenate([parts[i] for i in order]) for parts in (rollouts, numbers))
    return Dataset.from_dict({"rollouts": rows, "number": column})


class _Offline(Trainer):
    def __init__(self, goal: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self._goal = goal
        # Llama and others accept a token count for the loss; Trainer then does not divide accumulated losses.
        self.model_accepts_loss_kwargs = False

    def compute_loss_context_manager(self) -> Any:
        """Compute all of a loss in mixed precision; the Trainer would the model alone, and its logits are made outside.

        So it rounds as the reference's log-probabilities do, and a log-ratio is 0 before the first step.
        """
        return self.accelerator.autocast()


def _unpacked(batch: dict[str, Any]) -> PackedBatch:
    """Return the tensors of a batch as `PackedBatch`; on their way to the device a `TopTokens` became a plain tuple."""
    top = {"top_tokens": TopTokens(*batch["top_tokens"])} if "top_tokens" in batch else {}
    return PackedBatch(**batch | top)


class _ToTargets(_Offline):
    """Training by an objective's loss."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        number_B, reference, lengths, batch = (inputs[key] for key in ("number", "reference", "lengths", "batch"))
        logprob = _unpacked(batch).logprobs(model) if "tokens" in batch else completion_logprobs(model, **batch)
        h_BM = (logprob - reference).view(len(number_B), -1)
        loss = self._goal(h_BM, lengths.view_as(h_BM), number_B)
        return (loss, {"log_ratio": h_BM}) if return_outputs else loss


class _ToTeacher(_Offline):
    """Training by the KL from a teacher, exact over the vocabulary at each token."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        packed = _unpacked(inputs["batch"])
        with torch.no_grad():
            taught = replace(packed, states=inputs.get("teacher_states")).logits_in_parts(self._goal)
        kl = packed.sum_by_response(packed.logits_in_parts(model).measured(kl_from(taught)))
        return (kl.mean(), {"kl": kl}) if return_outputs else kl.mean()


@dataclass(frozen=True)
class _Collator(ABC):
    """The number of each example, and of each of its rollouts the length and reference's log-probability."""

    rollouts: Sequence[dict[str, Any]]
    pad_id: int

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [self.rollouts[i] for example in examples for i in example["rollouts"]]
        return {
            "number": torch.tensor([example["number"] for example in examples]),
            "reference": torch.tensor([row["reference_logprob"] for row in rows]),
            "lengths": torch.tensor([len(row["completion_ids"]) for row in rows]),
        } | self.batch(rows)

    @abstractmethod
    def batch(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the texts as ``batch``."""


class _Packer(_Collator):
    def batch(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the tensors of `PackedBatch`, and the states that a teacher reads, in the same order."""
        batch = {name: part for name, part in vars(self._packed(rows, "states")).items() if part is not None}
        if "top_tokens" in batch:
            batch["top_tokens"] = tuple(batch["top_tokens"])
        if "teacher_states" not in rows[0]:
            return {"batch": batch}
        return {"batch": batch, "teacher_states": self._packed(rows, "teacher_states").states}

    def _packed(self, rows: Sequence[dict[str, Any]], states: str) -> PackedBatch:
        prompts, responses = ([row[ids] for row in rows] for ids in ("prompt_ids", "completion_ids"))
        return PackedBatch.pack(prompts, responses, stored=[row[states] for row in rows if states in row])


class _Padder(_Collator):
    def batch(self, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return input ids, attention mask and labels of rows that repeat their prompts, padded."""
        tokens = [[*row["prompt_ids"], *row["completion_ids"]] for row in rows]
        labels = [[*[IGNORED] * len(row["prompt_ids"]), *row["completion_ids"]] for row in rows]
        cpu = torch.device("cpu")
        return {
            "batch": {
                "input_ids": right_padded(tokens, self.pad_id, cpu),
                "attention_mask": right_padded([[1] * len(row) for row in tokens], 0, cpu),
                "labels": right_padded(labels, IGNORED, cpu),
            }
        }
