"""Training on given rows: fine-tuned policies and Bradley–Terry reward models, by TRL's trainers, and rank models."""

from collections.abc import Sequence
from math import ceil
from typing import Any

from datasets import Dataset, concatenate_datasets
from peft import TaskType
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import DataCollatorWithPadding, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from infalign.data.examples import Message, reply
from infalign.models.conversations import AS_TEXT, conversation_ids
from infalign.models.pretrained import load_classifier
from infalign.models.settings import Fit
from infalign.training.common import (
    LossTrainer,
    lora_config,
    run_training,
    trainer_config,
    training_order,
    with_adapter,
)
from infalign.training.output_folder import Job

PIECE = 1024  # number of rows held as Python lists at once
Pair = tuple[list[Message], str, str]  # prompt, chosen, rejected
Ranked = tuple[list[Message], str, float]  # prompt, response, Ĉ


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[tuple[list[Message], str]],
    fit: Fit,
    job: Job,
) -> list[dict[str, Any]]:
    """Fine-tune a policy on (prompt, response) rows, save it and return the training log.

    The loss covers the responses only.
    """
    trainer = SFTTrainer(
        model=model,
        args=trainer_config(SFTConfig, fit, job, max_length=fit.max_length, completion_only_loss=True),
        train_dataset=Dataset.from_list(
            [{"prompt": p, "completion": [reply(text)], "chat_template_kwargs": AS_TEXT} for p, text in rows]
        ),
        processing_class=tokenizer,
        peft_config=lora_config(fit, TaskType.CAUSAL_LM, model.config),
    )
    lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
    trainer.train_dataset = trainer.train_dataset.select(training_order(lengths, fit.epochs, fit.batch_size, job.seed))
    return run_training(trainer, job).save(tokenizer)


def fit_reward_model(
    start: str, tokenizer: PreTrainedTokenizerBase, pairs: list[Pair], held_out: list[Pair], fit: Fit, job: Job
) -> list[dict[str, Any]]:
    """Fit a Bradley–Terry reward model on pairs, starting from the model folder or id ``start``.

    Saves a one-output sequence classifier and returns the log, with ``eval_accuracy`` on ``held_out``
    after each epoch.
    """
    model, steps = load_classifier(start), ceil(len(pairs) / fit.batch_size)
    model.config.pad_token_id = tokenizer.pad_token_id
    training, evaluation = (
        Dataset.from_list(
            [
                {"prompt": p, "chosen": [reply(c)], "rejected": [reply(r)], "chat_template_kwargs": AS_TEXT}
                for p, c, r in rows
            ]
        )
        for rows in (pairs, held_out)
    )
    trainer = RewardTrainer(
        model=model,
        args=trainer_config(RewardConfig, fit, job, max_length=fit.max_length, eval_strategy="steps", eval_steps=steps),
        train_dataset=training,
        eval_dataset=evaluation,
        processing_class=tokenizer,
        peft_config=lora_config(fit, TaskType.SEQ_CLS, model.config),
    )
    order = training_order([1] * len(trainer.train_dataset), fit.epochs, fit.batch_size, job.seed)
    trainer.train_dataset = trainer.train_dataset.select(order)
    return run_training(trainer, job).save(tokenizer)


def fit_rank_model(
    start: str, tokenizer: PreTrainedTokenizerBase, rows: Sequence[Ranked], fit: Fit, job: Job
) -> list[dict[str, Any]]:
    """Fit a classifier that predicts ranks (paper, figure 7) from the model folder or id ``start``; return the log.

    Saves a one-output sequence classifier, read as a Bradley–Terry reward model is. The loss is the cross-entropy
    between Ĉ and the sigmoid of the output. Its minimum is at E[Ĉ | x, y], so the output is the logit of a win rate.
    """
    model = load_classifier(start)
    model.config.pad_token_id = tokenizer.pad_token_id
    pieces = [_ranked(tokenizer, rows[begin : begin + PIECE]) for begin in range(0, len(rows), PIECE)]
    # Batches of one exact length, such as all the shortest rows, would give biased steps.
    lengths = [(len(token_ids) + 7) // 8 for piece in pieces for token_ids in piece["input_ids"]]
    order = training_order(lengths, fit.epochs, fit.batch_size, job.seed)
    trainer = LossTrainer(
        _rank_loss,
        model=with_adapter(model, fit, TaskType.SEQ_CLS),
        args=trainer_config(TrainingArguments, fit, job, remove_unused_columns=False, label_names=["rank"]),
        train_dataset=concatenate_datasets(pieces).select(order),
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    return run_training(trainer, job).save(tokenizer)


def _ranked(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Ranked]) -> Dataset:
    conversations = ([*prompt, reply(response)] for prompt, response, _ in rows)
    token_ids = [conversation_ids(tokenizer, row, add_generation_prompt=False) for row in conversations]
    return Dataset.from_dict({"input_ids": token_ids, "rank": [rank for _, _, rank in rows]})


def _rank_loss(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.squeeze(-1)
    return binary_cross_entropy_with_logits(logits.float(), inputs["rank"].float()), {}
