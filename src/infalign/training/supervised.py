"""Supervised fine-tuning and Bradley–Terry reward models, by TRL's trainers."""

from math import ceil
from pathlib import Path
from typing import Any

from infalign.training.common import Job, arguments, fit_and_save, lora, training_order  # first: sets TRL's environment

from datasets import Dataset  # isort: skip
from peft import TaskType
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from infalign.config import Fit
from infalign.data import Message
from infalign.pretrained import AS_TEXT, classifier_from


def fine_tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[tuple[list[Message], str]],
    fit: Fit,
    job: Job,
    model_dir: Path,
) -> list[dict[str, Any]]:
    """Fine-tune a policy on (prompt, response) rows, save it to ``model_dir`` and return the training log.

    The loss covers the responses only.
    """
    dataset = Dataset.from_list(
        [{"prompt": p, "completion": _reply(text), "chat_template_kwargs": AS_TEXT} for p, text in rows]
    )
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            **arguments(fit, job),
            max_length=fit.max_length,
            completion_only_loss=True,
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=lora(fit, TaskType.CAUSAL_LM),
    )
    lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
    trainer.train_dataset = trainer.train_dataset.select(training_order(lengths, fit.epochs, fit.batch_size, job.seed))
    return fit_and_save(trainer, tokenizer, job, model_dir)


def fit_reward_model(
    start: str,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[tuple[list[Message], str, str]],
    held_out: list[tuple[list[Message], str, str]],
    fit: Fit,
    job: Job,
    model_dir: Path,
) -> list[dict[str, Any]]:
    """Fit a Bradley–Terry reward model on (prompt, chosen, rejected), starting from the model folder or id ``start``.

    Saves a one-output sequence classifier to ``model_dir`` and returns the log, with ``eval_accuracy`` on ``held_out``
    after each epoch.
    """
    model = classifier_from(start)
    model.config.pad_token_id = tokenizer.pad_token_id
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            **arguments(fit, job),
            max_length=fit.max_length,
            eval_strategy="steps",
            eval_steps=ceil(len(pairs) / fit.batch_size),
        ),
        train_dataset=_preferences(pairs),
        eval_dataset=_preferences(held_out),
        processing_class=tokenizer,
        peft_config=lora(fit, TaskType.SEQ_CLS),
    )
    order = training_order([1] * len(trainer.train_dataset), fit.epochs, fit.batch_size, job.seed)
    trainer.train_dataset = trainer.train_dataset.select(order)
    return fit_and_save(trainer, tokenizer, job, model_dir)


def _preferences(pairs: list[tuple[list[Message], str, str]]) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": p, "chosen": _reply(c), "rejected": _reply(r), "chat_template_kwargs": AS_TEXT}
            for p, c, r in pairs
        ]
    )


def _reply(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]
