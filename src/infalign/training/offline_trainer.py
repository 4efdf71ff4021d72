"""Offline training fits a policy to stored rollouts, by `RolloutRegression` or `Distillation`; nothing is generated."""

import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, compress, groupby
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
from infalign.models.packed import PackedBatch, can_pack, packing
from infalign.models.settings import PROMPT_EXAMPLES, Fit
from infalign.models.top_layers import starting_from_states
from infalign.training.common import Fitted, LossTrainer, run_training, starting_weights, trainer_config, with_adapter
from infalign.training.objectives import Objective
from infalign.training.output_folder import Job

Rows = Sequence[dict[str, Any]]  # rollouts, as `fit_to_rollouts` takes them
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


def fit_to_rollouts(
    loss: RolloutRegression | Distillation, model: PreTrainedModel, rollouts: Rows, law: Law, fit: Fit, job: Job
) -> Fitted:
    """Fit a policy to a ``law`` of ``rollouts``.

    A rollout has prompt_id, prompt_ids, completion_ids and reference_logprob; those of one prompt are consecutive, and
    all have the order of the law. Raises DataError for a law of others. For a guide that reads the reference's states,
    or an adapter on the last layers, it may have them as ``states``, and as ``teacher_states`` for a teacher's guide
    (`models.states`). A tenth of the prompts is held out. Their loss is logged and chooses no checkpoint: it also rises
    when a policy goes too far in the right direction, which its strength corrects. Every epoch makes new examples and
    pairs.
    """
    training, evaluation = _examples(loss.objective, *split_prompts(rollouts, law), fit, job.seed)
    models = (model,) if loss.teacher is None else (model, loss.teacher)
    packs = [can_pack(one) for one in models]
    if any(isinstance(one, GuidedForCausalLM) and not packable for one, packable in zip(models, packs, strict=True)):
        raise ConfigError("a guide's model has layers without full attention; leave guide out")
    if not all(packs):
        why = "a model has layers without full attention"
        warnings.warn(f"{why}, so its responses are not packed: training is slower", stacklevel=2)
    adapted = with_adapter(model, fit, TaskType.CAUSAL_LM)
    start = starting_weights(adapted)
    trainer = LossTrainer(
        loss.of_batch,
        model=adapted,
        args=trainer_config(TrainingArguments, fit, job, **VALIDATED),
        train_dataset=training,
        eval_dataset=evaluation,
        data_collator=partial(_collate, rollouts),
    )
    with ExitStack() as stack:
        for one in compress(models, packs):
            stack.enter_context(packing(one))
        stack.enter_context(starting_from_states(model, fit.last_layers))
        return replace(run_training(trainer, job), start=start)


class Group(NamedTuple):
    """The rollouts of a prompt: the index of the first, their rewards and their log-ratios."""

    first: int
    rewards_K: Array
    log_ratios_K: Array


def measured_rollouts(rollouts: Rows, groups: Sequence[Group]) -> Rows:
    """Return the rollouts of some prompts, up to `MEASURED_ROLLOUTS`, with ``reward``."""
    some = groups[: max(2, MEASURED_ROLLOUTS // groups[0].rewards_K.size)]
    return [rollouts[one.first + i] | {"reward": reward} for one in some for i, reward in enumerate(one.rewards_K)]


def split_prompts(rollouts: Rows, law: Law) -> tuple[list[Group], list[Group]]:
    """Return the prompts that `fit_to_rollouts` holds out, at least two, and the others; raises as it does."""
    sizes = [sum(1 for _ in rows) for _, rows in groupby(rollouts, key=itemgetter("prompt_id"))]
    if sizes != [len(row) for row in law.rewards_PK]:
        raise DataError(
            f"the law has {len(law.rewards_PK)} prompts, and the rollouts {len(sizes)} or other numbers per prompt; "
            "make the law from the rewards of these rollouts"
        )
    if len(sizes) < 3:  # two are held out
        raise DataError(f"{len(sizes)} prompts have rewards, and a training needs at least 3; use more prompts")
    starts = accumulate(sizes[:-1], initial=0)
    groups = [Group(*group) for group in zip(starts, law.rewards_PK, law.log_ratios_PK, strict=True)]
    every = min(HELD_OUT_EVERY, len(groups) - 1)
    return groups[::every], [group for i, group in enumerate(groups) if i % every]


def _examples(
    objective: Objective, held_out: list[Group], others: list[Group], fit: Fit, seed: int
) -> tuple[Dataset, Dataset]:
    """Return the examples to train on, and some of the held-out ones."""
    rng = np.random.default_rng(seed)
    evaluation = _pass(objective, held_out, rng)
    passes = [_pass(objective, others, rng) for _ in range(ceil(fit.passes))]
    training = concatenate_datasets(passes)
    most = max(round(fit.passes * len(passes[0])), fit.batch_size)
    training = training.select(range(min(most, len(training))))
    measured = np.clip(HELD_OUT_SHARE * len(training), *HELD_OUT_EXAMPLES)
    return training, evaluation.select(range(min(len(evaluation), round(measured))))


def _pass(objective: Objective, groups: list[Group], rng: np.random.Generator) -> Dataset:
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


def _collate(rollouts: Rows, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of each example, and of each of its rollouts the reference's log-probability.

    The rollouts are packed, with the states that a teacher reads in the same order.
    """
    rows = [rollouts[i] for example in examples for i in example["rollouts"]]
    prompts, responses = ([row[ids] for row in rows] for ids in ("prompt_ids", "completion_ids"))

    def packed(states: str) -> PackedBatch:
        return PackedBatch.pack(prompts, responses, stored=[row[states] for row in rows if states in row])

    teacher = {"teacher_states": packed("teacher_states").states} if "teacher_states" in rows[0] else {}
    return {
        "number": torch.tensor([example["number"] for example in examples]),
        "reference": torch.tensor([row["reference_logprob"] for row in rows]),
        "batch": packed("states"),
        **teacher,
    }
