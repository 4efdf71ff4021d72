"""Supervised fine-tuning, by TRL's trainer."""

from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import TaskType
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from infalign.data.examples import Message, reply
from infalign.models.pretrained import AS_TEXT
from infalign.models.settings import Fit
from infalign.training.common import Job, arguments, fit_and_save, lora, on_one_device, training_order


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
        [{"prompt": p, "completion": [reply(text)], "chat_template_kwargs": AS_TEXT} for p, text in rows]
    )
    trainer = SFTTrainer(
        model=model,
        args=on_one_device(
            SFTConfig(
                **arguments(fit, job),
                max_length=fit.max_length,
                completion_only_loss=True,
            )
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=lora(fit, TaskType.CAUSAL_LM, model.config),
    )
    lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
    trainer.train_dataset = trainer.train_dataset.select(training_order(lengths, fit.epochs, fit.batch_size, job.seed))
    return fit_and_save(trainer, tokenizer, job, model_dir)
