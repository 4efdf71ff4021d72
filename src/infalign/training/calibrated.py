"""Calibrated reward models: a classifier trained to predict the rank Ĉ(x, y) of a response (paper, figure 7)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infalign.training.common import (  # first: sets TRL's environment
    Job,
    arguments,
    fit_and_save,
    length_class,
    lora,
    training_order,
)

from datasets import Dataset  # isort: skip
from peft import TaskType, get_peft_model
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

from infalign.config import Fit
from infalign.data import Message


def fit_calibrated(
    start: str,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[tuple[list[Message], str, float]],
    fit: Fit,
    job: Job,
    model_dir: Path,
) -> list[dict[str, Any]]:
    """Fit a reward model on (prompt, response, Ĉ), starting from the model folder or id ``start``; return the log.

    Saves a one-output sequence classifier, read as a Bradley–Terry reward model is. The loss is the cross-entropy
    between Ĉ and the sigmoid of the output, least where that is E[Ĉ | x, y]: the output is the logit of a win rate.
    """
    model = AutoModelForSequenceClassification.from_pretrained(
        start, num_labels=1, use_safetensors=True, trust_remote_code=False, dtype="float32"
    )
    model.config.pad_token_id = tokenizer.pad_token_id
    conversations = [[*prompt, _reply(response)] for prompt, response, _ in rows]
    tokenized = [tokenizer.apply_chat_template(row, tokenize=True, return_dict=True) for row in conversations]
    lengths = [length_class(len(row["input_ids"])) for row in tokenized]
    examples = [{**row, "rank": rank} for row, (_, _, rank) in zip(tokenized, rows, strict=True)]
    order = training_order(lengths, fit.epochs, fit.batch_size, job.seed)
    config = lora(fit, TaskType.SEQ_CLS)
    trainer = _RankRegression(
        model=get_peft_model(model, config) if config else model,
        args=TrainingArguments(
            **arguments(fit, job),
            remove_unused_columns=False,
            label_names=["rank"],
        ),
        train_dataset=Dataset.from_list(examples).select(order),
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    return fit_and_save(trainer, tokenizer, job, model_dir)


def _reply(text: str) -> Message:
    return {"role": "assistant", "content": text}


class _RankRegression(Trainer):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Llama and others take a token count with the loss, and Trainer then leaves accumulated losses undivided.
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits.squeeze(-1)
        loss = binary_cross_entropy_with_logits(logits.float(), inputs["rank"].float())
        return (loss, {"logits": logits}) if return_outputs else loss
