"""Bradley–Terry reward models, by TRL's trainer."""

from math import ceil
from typing import Any

from datasets import Dataset
from peft import TaskType
from transformers import PreTrainedTokenizerBase
from trl import RewardConfig, RewardTrainer

from infalign.data.examples import Message, reply
from infalign.models.conversations import AS_TEXT
from infalign.models.pretrained import load_classifier
from infalign.models.settings import Fit
from infalign.training.common import Job, lora_config, run_training, trainer_arguments, training_order, use_one_device


def fit_reward_model(
    start: str,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[tuple[list[Message], str, str]],
    held_out: list[tuple[list[Message], str, str]],
    fit: Fit,
    job: Job,
) -> list[dict[str, Any]]:
    """Fit a Bradley–Terry reward model on (prompt, chosen, rejected), starting from the model folder or id ``start``.

    Saves a one-output sequence classifier and returns the log, with ``eval_accuracy`` on ``held_out``
    after each epoch.
    """
    model = load_classifier(start)
    model.config.pad_token_id = tokenizer.pad_token_id
    trainer = RewardTrainer(
        model=model,
        args=use_one_device(
            RewardConfig(
                **trainer_arguments(fit, job),
                max_length=fit.max_length,
                eval_strategy="steps",
                eval_steps=ceil(len(pairs) / fit.batch_size),
            )
        ),
        train_dataset=_preferences(pairs),
        eval_dataset=_preferences(held_out),
        processing_class=tokenizer,
        peft_config=lora_config(fit, TaskType.SEQ_CLS, model.config),
    )
    order = training_order([1] * len(trainer.train_dataset), fit.epochs, fit.batch_size, job.seed)
    trainer.train_dataset = trainer.train_dataset.select(order)
    return run_training(trainer, job).save(tokenizer)


def _preferences(pairs: list[tuple[list[Message], str, str]]) -> Dataset:
    return Dataset.from_list(
        [
            {"prompt": p, "chosen": [reply(c)], "rejected": [reply(r)], "chat_template_kwargs": AS_TEXT}
            for p, c, r in pairs
        ]
    )
