"""Supervised fine-tuning, by TRL's trainer."""

from typing import Any

from datasets import Dataset
from peft import TaskType
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from infalign.data.examples import Message, reply
from infalign.models.conversations import AS_TEXT
from infalign.models.settings import Fit
from infalign.training.common import Job, lora_config, run_training, trainer_arguments, training_order, use_one_device


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
    dataset = Dataset.from_list(
        [{"prompt": p, "completion": [reply(text)], "chat_template_kwargs": AS_TEXT} for p, text in rows]
    )
    trainer = SFTTrainer(
        model=model,
        args=use_one_device(
            SFTConfig(
                **trainer_arguments(fit, job),
                max_length=fit.max_length,
                completion_only_loss=True,
            )
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=lora_config(fit, TaskType.CAUSAL_LM, model.config),
    )
    lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
    trainer.train_dataset = trainer.train_dataset.select(training_order(lengths, fit.epochs, fit.batch_size, job.seed))
    return run_training(trainer, job).save(tokenizer)
