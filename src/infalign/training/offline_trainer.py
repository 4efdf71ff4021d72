"""Offline training: a policy fitted to the stored K rollouts per prompt; nothing is generated.

The caller chooses the loss: `RolloutRegression`, or `Distillation`.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from math import ceil
from operator import itemgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from peft import TaskType
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from infalign.core.errors import ConfigError, DataError
from infalign.method.calibration import Array
from infalign.method.laws import Law
from infalign.models.guided import GuidedForCausalLM
from infalign.models.logits import kl_from
from infalign.models.packed import PackedBatch, can_pack, packing_if_possible
from infalign.models.settings import PROMPT_EXAMPLES, Fit
from infalign.models.top_layers import starting_from_states
from infalign.training.common import Fitted, LossTrainer, run_training, starting_weights, trainer_config, with_adapter
from infalign.training.objectives import Objective
from infalign.training.output_folder import Job

VALIDATED = {
    "eval_strategy": "steps",
    "eval_steps": 0.2,
    "eval_on_start": True,
    "remove_unused_columns": False,
    "label_names": ["number"],
}
HELD_OUT_EVERY = 10  # every tenth prompt is held out, to choose the learning rate and the policy's strength
HELD_OUT_EXAMPLES = 256, 1024  # at least and at most, of which the held-out loss is the mean
HELD_OUT_SHARE = 1 / 16  # and between these, per training example: evaluations take an eighth of the training's time
MEASURED_ROLLOUTS = 32_768  # of held-out prompts, at most, on which strengths are measured


@dataclass(frozen=True, slots=True)
class RolloutRegression:
    """The loss of an objective, which compares log π/π_ref of rollouts with its numbers."""

    objective: Objective
    teacher: ClassVar[None] = None

    def of_batch(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the objective's loss and h = log π/π_ref, (B, M)."""
        number_B, reference, batch = (inputs[key] for key in ("number", "reference", "batch"))
        h_BM = (batch.logprobs(model) - reference).view(len(number_B), -1)
        return self.objective.loss(h_BM, number_B), {"log_ratio": h_BM}


@dataclass(frozen=True, slots=True)
class Distillation:
    """Σ_t KL(π_teacher ‖ π), exact over the vocabulary at each token of the rollouts that ``objective`` chooses."""

    teacher: Any
    objective: Objective

    def of_batch(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean KL of a response, and that of each, (B,)."""
        packed: PackedBatch = inputs["batch"]
        with torch.no_grad():
            taught = replace(packed, states=inputs.get("teacher_states")).logits_in_parts(self.teacher)
        kl_B = packed.sum_by_response(packed.logits_in_parts(model).measured(kl_from(taught)))
        return kl_B.mean(), {"kl": kl_B}


@dataclass(frozen=True, slots=True)
class FittedPolicy(Fitted):
    """A fitted policy, and what those of its weights that a strength scales (`strength`) were at the start."""

    start: dict[str, Tensor]


def fit_to_rollouts(
    loss: RolloutRegression | Distillation,
    model: PreTrainedModel,
    rollouts: Sequence[dict[str, Any]],
    law: Law,
    settings: Fit,
    job: Job,
) -> FittedPolicy:
    """Fit a policy to a ``law`` of ``rollouts``.

    A rollout has prompt_id, prompt_ids, completion_ids and reference_logprob; those of one prompt are consecutive, and
    all have the order of the law. Raises DataError for a law of others. For a guide that reads the reference's states,
    or an adapter on the last layers, it may have them as ``states``, and as ``teacher_states`` for a teacher's guide
    (`models.states`). A tenth of the prompts is held out. Their loss is logged and chooses no checkpoint: it also rises
    when a policy goes too far in the right direction, which its strength corrects. Every epoch makes new examples and
    pairs.
    """
    training, evaluation = _examples(loss.objective, _by_prompt(rollouts, law), settings, job.seed)
    models = (model,) if loss.teacher is None else (model, loss.teacher)
    if any(isinstance(one, GuidedForCausalLM) and not can_pack(one) for one in models):
        raise ConfigError("a guide's model has layers without full attention; leave guide out")
    passes = [*map(packing_if_possible, models)]
    adapted = with_adapter(model, settings, TaskType.CAUSAL_LM)
    start = starting_weights(adapted)
    trainer = LossTrainer(
        loss.of_batch,
        model=adapted,
        args=trainer_config(TrainingArguments, settings, job, **VALIDATED),
        train_dataset=training,
        eval_dataset=evaluation,
        data_collator=_Collator(rollouts),
    )
    with ExitStack() as stack:
        for packing in passes:
            stack.enter_context(packing)
        if settings.lora is not None and settings.lora.layers is not None:
            stack.enter_context(starting_from_states(model, settings.lora.layers))
        fitted = run_training(trainer, job)
    return FittedPolicy(fitted.model, fitted.history, fitted.model_dir, start)


class _Group(NamedTuple):
    """The rollouts of a prompt: the index of the first, their rewards and their log-ratios."""

    first: int
    rewards_K: Array
    log_ratios_K: Array


def held_out_rollouts(rollouts: Sequence[dict[str, Any]], law: Law) -> list[dict[str, Any]]:
    """Return all rollouts of prompts that `fit_to_rollouts` holds out, up to `MEASURED_ROLLOUTS`, with ``reward``."""
    return _rewarded(rollouts, _split(_by_prompt(rollouts, law))[0])


def seen_rollouts(rollouts: Sequence[dict[str, Any]], law: Law) -> list[dict[str, Any]]:
    """Return as many rollouts of other prompts."""
    held_out, others = _split(_by_prompt(rollouts, law))
    return _rewarded(rollouts, others[: len(held_out)])


def _rewarded(rollouts: Sequence[dict[str, Any]], groups: Sequence[_Group]) -> list[dict[str, Any]]:
    some = groups[: max(2, MEASURED_ROLLOUTS // groups[0].rewards_K.size)]
    return [rollouts[one.first + i] | {"reward": reward} for one in some for i, reward in enumerate(one.rewards_K)]


def _split(groups: Sequence[_Group]) -> tuple[Sequence[_Group], Sequence[_Group]]:
    """Return the held-out prompts, at least two, and the others."""
    every = min(HELD_OUT_EVERY, len(groups) - 1)
    return groups[::every], [group for i, group in enumerate(groups) if i % every]


def _by_prompt(rollouts: Sequence[dict[str, Any]], law: Law) -> list[_Group]:
    """Return the groups of rollouts that a law gives log-ratios. Raises DataError unless it is of 3 or more."""
    sizes = [sum(1 for _ in rows) for _, rows in groupby(rollouts, key=itemgetter("prompt_id"))]
    ranges = [range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    if [len(own) for own in ranges] != [len(row) for row in law.rewards_PK]:
        raise DataError(
            f"the law has {len(law.rewards_PK)} prompts, and the rollouts {len(ranges)} or other numbers per prompt; "
            "make the law from the rewards of these rollouts"
        )
    if len(ranges) < 3:  # two are held out
        raise DataError(f"{len(ranges)} prompts have rewards, and a training needs at least 3; use more prompts")
    return [_Group(own.start, *rows) for own, *rows in zip(ranges, law.rewards_PK, law.log_ratios_PK, strict=True)]


def _examples(objective: Objective, groups: Sequence[_Group], settings: Fit, seed: int) -> tuple[Dataset, Dataset]:
    """Return the examples to train on, and some of the held-out ones."""
    held_out, others = _split(groups)
    rng = np.random.default_rng(seed)
    evaluation = _pass(objective, held_out, rng)
    passes = [_pass(objective, others, rng) for _ in range(ceil(settings.passes))]
    training = concatenate_datasets(passes)
    most = max(round(settings.passes * len(passes[0])), settings.batch_size)
    training = training.select(range(min(most, len(training))))
    measured = np.clip(HELD_OUT_SHARE * len(training), *HELD_OUT_EXAMPLES)
    return training, evaluation.select(range(min(len(evaluation), round(measured))))


def _pass(objective: Objective, groups: Iterable[_Group], rng: np.random.Generator) -> Dataset:
    """Return one pass over ``groups`` in random order: the rollouts and the number of each example.

    `PROMPT_EXAMPLES` examples of a prompt follow each other, so that a batch computes it once; they are dealt like
    cards, so that equal examples are apart.
    """
    rollouts, numbers = [], []
    for first, rewards_K, log_ratios_K in groups:
        indices_EM, number_E = objective.examples(rewards_K, log_ratios_K, rng)
        shuffled = rng.permutation(rewards_K.size)[indices_EM[:, 0]].argsort(kind="stable")
        dealt = ceil(len(shuffled) / PROMPT_EXAMPLES)
        hands = [shuffled[hand::dealt] for hand in range(dealt)]
        rollouts += [first + indices_EM[hand] for hand in hands]
        numbers += [number_E[hand] for hand in hands]
    order = rng.permutation(len(rollouts))
    rows, column = (np.concatenate([parts[i] for i in order]) for parts in (rollouts, numbers))
    return Dataset.from_dict({"rollouts": rows, "number": column})


@dataclass(frozen=True)
class _Collator:
    """The number of each example, and of each of its rollouts the reference's log-probability.

    The rollouts are packed, with the states that a teacher reads in the same order.
    """

    rollouts: Sequence[dict[str, Any]]

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        rows = [self.rollouts[i] for example in examples for i in example["rollouts"]]
        prompts, responses = ([row[ids] for row in rows] for ids in ("prompt_ids", "completion_ids"))
        batch: dict[str, Any] = {
            "number": torch.tensor([example["number"] for example in examples]),
            "reference": torch.tensor([row["reference_logprob"] for row in rows]),
        }

        def packed(states: str) -> PackedBatch:
            return PackedBatch.pack(prompts, responses, stored=[row[states] for row in rows if states in row])

        teacher = {"teacher_states": packed("teacher_states").states} if "teacher_states" in rows[0] else {}
        return batch | {"batch": packed("states")} | teacher
