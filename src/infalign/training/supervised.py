"""Training on given rows: fine-tuned policies and Bradley–Terry reward models, by TRL's trainers."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

from datasets import Dataset, concatenate_datasets
from peft import TaskType
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from infalign.data.examples import Example
from infalign.data.messages import Pair
from infalign.models.conversations import BATCH, conversation_ids, training_ids
from infalign.models.passes import IGNORED
from infalign.models.pretrained import load_classifier
from infalign.models.settings import Fit
from infalign.training.common import lora_config, run_training, trainer_config, training_order
from infalign.training.output_folder import Job


def demonstrations(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Example]) -> Dataset:
    """Return chosen replies as token ids with labels for what the policy says (`training_ids`).

    ``is_rendered`` is false where the chat template renders a response otherwise than the policy says it.
    """

    def columns(piece: Sequence[Example]) -> dict[str, Any]:
        tools = [e.columns.get("tools") for e in piece]
        encoded = training_ids(tokenizer, [e.prompt for e in piece], [e.chosen for e in piece], tools)
        return {
            "input_ids": [row.ids for row in encoded],
            "labels": [[i if said else IGNORED for i, said in zip(row.ids, row.mask, strict=True)] for row in encoded],
            "length": [len(row.ids) for row in encoded],
            "is_rendered": [row.is_rendered for row in encoded],
        }

    return _in_pieces(rows, columns)


def fine_tune(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Dataset, fit: Fit, job: Job
) -> list[dict[str, Any]]:
    """Fine-tune a policy on `demonstrations`, save it and return the training log."""
    # A column that is not read whole is read anew for each index, at a millisecond each.
    order = training_order(rows["length"][:], fit.passes, fit.batch_size, job.seed)
    trainer = SFTTrainer(
        model=model,
        args=trainer_config(SFTConfig, fit, job, max_length=None, dataset_kwargs={"skip_prepare_dataset": True}),
        train_dataset=rows.select(order),
        processing_class=tokenizer,
        peft_config=lora_config(fit, TaskType.CAUSAL_LM, model.config),
    )
    return run_training(trainer, job).save(tokenizer)


def fit_reward_model(
    start: str, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], held_out: Sequence[Pair], fit: Fit, job: Job
) -> list[dict[str, Any]]:
    """Fit a Bradley–Terry reward model on pairs, starting from the model folder or id ``start``.

    Saves a one-output sequence classifier. Returns the log, with ``eval_accuracy`` on ``held_out`` after each epoch.
    """
    model, steps = load_classifier(start), ceil(len(pairs) / fit.batch_size)
    model.config.pad_token_id = tokenizer.pad_token_id

    def columns(piece: Sequence[Pair]) -> dict[str, Any]:
        return {
            "chosen_ids": conversation_ids(tokenizer, [[*prompt, *said] for prompt, said, _ in piece]),
            "rejected_ids": conversation_ids(tokenizer, [[*prompt, *said] for prompt, _, said in piece]),
        }

    order = training_order([1] * len(pairs), fit.passes, fit.batch_size, job.seed)
    trainer = RewardTrainer(
        model=model,
        args=trainer_config(RewardConfig, fit, job, max_length=None, eval_strategy="steps", eval_steps=steps),
        train_dataset=_in_pieces(pairs, columns).select(order),
        eval_dataset=_in_pieces(held_out, columns),
        processing_class=tokenizer,
        peft_config=lora_config(fit, TaskType.SEQ_CLS, model.config),
    )
    return run_training(trainer, job).save(tokenizer)


def _in_pieces(rows: Sequence[Any], columns: Callable[[Sequence[Any]], dict[str, Any]]) -> Dataset:
    """Return the columns of rows, made of `BATCH` rows at a time."""
    pieces = (rows[start : start + BATCH] for start in range(0, len(rows), BATCH))
    return concatenate_datasets([Dataset.from_dict(columns(piece)) for piece in pieces])
