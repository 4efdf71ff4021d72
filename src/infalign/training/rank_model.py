"""Calibrated reward models: a classifier trained to predict the rank Ĉ(x, y) of a response (paper, figure 7)."""

from collections.abc import Sequence
from typing import Any

from datasets import Dataset, concatenate_datasets
from peft import TaskType, get_peft_model
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, Trainer, TrainingArguments

from infalign.data.examples import Message, reply
from infalign.models.conversations import conversation_ids
from infalign.models.pretrained import load_classifier
from infalign.models.settings import Fit
from infalign.training.common import (
    Job,
    length_bucket,
    lora_config,
    run_training,
    trainer_arguments,
    training_order,
    use_one_device,
)

PIECE = 1024  # number of rows held as Python lists at once


def fit_rank_model(
    start: str,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[tuple[list[Message], str, float]],
    fit: Fit,
    job: Job,
) -> list[dict[str, Any]]:
    """Fit a reward model on (prompt, response, Ĉ), starting from the model folder or id ``start``; return the log.

    Saves a one-output sequence classifier, read as a Bradley–Terry reward model is. The loss is the cross-entropy
    between Ĉ and the sigmoid of the output. Its minimum is at E[Ĉ | x, y], so the output is the logit of a win rate.
    """
    model = load_classifier(start)
    model.config.pad_token_id = tokenizer.pad_token_id
    pieces = [_examples(tokenizer, rows[start : start + PIECE]) for start in range(0, len(rows), PIECE)]
    lengths = [length_bucket(len(token_ids)) for piece in pieces for token_ids in piece["input_ids"]]
    order = training_order(lengths, fit.epochs, fit.batch_size, job.seed)
    config = lora_config(fit, TaskType.SEQ_CLS, model.config)
    trainer = _RankRegression(
        model=get_peft_model(model, config) if config else model,
        args=use_one_device(
            TrainingArguments(
                **trainer_arguments(fit, job),
                remove_unused_columns=False,
                label_names=["rank"],
            )
        ),
        train_dataset=concatenate_datasets(pieces).select(order),
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    return run_training(trainer, job).save(tokenizer)


def _examples(tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[list[Message], str, float]]) -> Dataset:
    conversations = ([*prompt, reply(response)] for prompt, response, _ in rows)
    token_ids = [conversation_ids(tokenizer, row, add_generation_prompt=False) for row in conversations]
    return Dataset.from_dict({"input_ids": token_ids, "rank": [rank for _, _, rank in rows]})


class _RankRegression(Trainer):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Llama and others accept a token count for the loss; Trainer then does not divide accumulated losses.
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.squeeze(-1)
        loss = binary_cross_entropy_with_logits(logits.float(), inputs["rank"].float())
        return (loss, {"logits": logits}) if return_outputs else loss
