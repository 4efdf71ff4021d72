"""Common parts of every training job: arguments, progress, checkpoints and the saved model."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import get_length_grouped_indices

from infalign.core.distributed import is_first, processes
from infalign.core.errors import ConfigError, InfalignError
from infalign.core.storage import settle, unwritable, writing
from infalign.models.pretrained import ADAPTER, saving
from infalign.models.settings import Fit
from infalign.models.top_layers import count_layers_below
from infalign.sampling.engine import Vocabulary
from infalign.training.callbacks import TrimHeap, WatchLog
from infalign.training.checkpoints import SealCheckpoints, find_complete_checkpoint, find_unsealed
from infalign.training.output_folder import Job

Configuration = TypeVar("Configuration", bound=TrainingArguments)
Loss = Callable[[Any, dict[str, Any]], tuple[Tensor, dict[str, Tensor]]]
SIMILAR = 32  # tokens


def trainer_config(kind: type[Configuration], fit: Fit, job: Job, **options: Any) -> Configuration:
    """Return the configuration of a trainer, for one device per process.

    A trainer takes one pass over its rows in the given order; they contain all epochs, see `training_order`. Without a
    launcher it would split each batch over all GPUs that it sees, which TRL's trainers refuse and packed batches are
    not made for.
    """
    ranks = processes()
    per_device = fit.device_batch_size or fit.batch_size // ranks
    if per_device == 0 or fit.batch_size % (per_device * ranks):
        raise ConfigError(
            f"fit.batch_size ({fit.batch_size}) must be a multiple of {ranks} processes × {per_device} sequences; "
            "change fit.batch_size or fit.device_batch_size"
        )
    common: dict[str, Any] = {
        "output_dir": str(job.folder),
        "run_name": job.folder.name,
        "seed": job.seed,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": per_device,
        "per_device_eval_batch_size": per_device,
        "gradient_accumulation_steps": fit.batch_size // (per_device * ranks),
        "learning_rate": fit.with_learning_rate(pretrained=False).learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "bf16": fit.bf16,
        "activation_checkpointing": fit.gradient_checkpointing,
        "gradient_checkpointing": None,
        "use_cpu": job.device == "cpu",
        "report_to": job.report_to,
        "logging_steps": 0.02,
        "logging_nan_inf_filter": False,  # a filter would log an earlier loss instead of NaN
        "save_strategy": "steps",
        "save_steps": 0.25,
        "disable_tqdm": True,
        "dataloader_pin_memory": job.device != "cpu",
    }
    config = kind(**common | options)
    config._n_gpu = min(config.n_gpu, 1)  # asked first, as asking sets it
    return config


def training_order(lengths: Sequence[int], epochs: float, rows_a_step: int, seed: int) -> list[int]:
    """Return the order of the training rows, at least one step: ``epochs`` passes, each shuffled anew.

    Rows of similar length are batched together to reduce padding, where lengths within `SIMILAR` tokens count as equal:
    batches of one exact length give biased steps, for prompts of one length are often of one kind. All passes form one
    epoch of the trainer: on resuming it skips exactly the rows that were already seen, while the order of a second
    epoch would depend on random state or a sampler that a resumed training does not have.
    """
    generator, order = torch.Generator().manual_seed(seed), list[int]()
    lengths = [(length + SIMILAR - 1) // SIMILAR for length in lengths]
    for _ in range(math.ceil(epochs)):
        order += get_length_grouped_indices(lengths, rows_a_step, generator=generator)
    return order[: max(round(epochs * len(lengths)), rows_a_step)]


def lora_config(fit: Fit, task: TaskType, model: PreTrainedConfig) -> LoraConfig | None:
    """Return the LoRA configuration for the linear layers of a model, or None for full fine-tuning.

    Raises ConfigError if the model has fewer layers than are to be adapted.
    """
    if fit.lora is None:
        return None
    below = count_layers_below(model, fit.last_layers) if fit.last_layers else 0
    return LoraConfig(
        r=fit.lora.rank,
        lora_alpha=2 * fit.lora.rank,
        target_modules="all-linear",
        exclude_modules=rf"(.*\.)?(layers|h|blocks)\.({'|'.join(map(str, range(below)))})\..*" if below else None,
        task_type=task,
    )


def with_adapter(model: PreTrainedModel, fit: Fit, task: TaskType) -> PreTrainedModel | PeftModel:
    """Return the model with an untrained adapter, or as it is for full fine-tuning; raises as `lora_config`."""
    config = lora_config(fit, task, model.config)
    return get_peft_model(model, config) if config else model


def starting_weights(model: PreTrainedModel | PeftModel) -> dict[str, Tensor]:
    """Return copies of the weights that the departure from an untrained policy is linear in, or else of all trained.

    They are those of a guide's head, and of an adapter the factor that is 0 at the start.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    linear = (re.compile(part) for part in (r"guide\.head\.\w+\.", r"\.lora_B\.", ""))
    scaled = next(names for part in linear if (names := [*filter(part.search, trained)]))
    return {name: trained[name].detach().cpu().clone() for name in scaled}


class LossTrainer(Trainer):
    """A trainer whose ``loss`` of a model and a batch is a mean over its rows, returned with what else is known."""

    def __init__(self, loss: Loss, **settings: Any) -> None:
        super().__init__(**settings)
        self._loss = loss
        # Llama and others accept a token count for the loss; Trainer then does not divide accumulated losses.
        self.model_accepts_loss_kwargs = False

    def compute_loss_context_manager(self) -> Any:
        """Compute all of a loss in mixed precision; the Trainer would the model alone, and its logits are made outside.

        So it rounds as the reference's log-probabilities do, and a log-ratio is 0 before the first step.
        """
        return self.accelerator.autocast()

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        """Return the loss, and the outputs if they are asked for."""
        loss, outputs = self._loss(model, inputs)
        return (loss, outputs) if return_outputs else loss


@dataclass(frozen=True, slots=True)
class Fitted:
    """A trained model that is still in memory, the log of its training, and its `starting_weights`."""

    model: Any
    history: list[dict[str, Any]]
    model_dir: Path
    start: dict[str, Tensor] = field(default_factory=dict)  # of an offline policy

    def save(self, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
        """Save the model, a LoRA adapter both merged and apart, and return the log. Only the first process writes."""
        if is_first():
            model = self.model
            if isinstance(model, PeftModel):
                with writing(self.model_dir):
                    model.save_pretrained(str(self.model_dir / ADAPTER))
                model = model.merge_and_unload()
            save_model(model, tokenizer, self.model_dir)
        return self.history


def run_training(trainer: Trainer, job: Job) -> Fitted:
    """Train, from the newest complete checkpoint in the job's folder if there is one.

    Raises InfalignError for a loss or gradient that is not finite, before its effect is saved in a checkpoint.
    After an interruption the last row has ``resumed``: the checkpoint that was used and the incomplete ones that were
    skipped. Every progress report repeats this.
    """
    trainer.remove_callback(PrinterCallback)
    with trainer.accelerator.main_process_first():  # the first process removes incomplete checkpoints
        checkpoint, incomplete = find_complete_checkpoint(job.folder)
    begun = f"resumed from {checkpoint.name}" if checkpoint else "restarted from the beginning"
    resumed = "; ".join([begun, *(f"skipped {flaw}" for flaw in incomplete)]) if checkpoint or incomplete else ""
    trainer.add_callback(WatchLog(job.on_progress, resumed, job.folder))
    trainer.add_callback(TrimHeap())
    trainer.add_callback(SealCheckpoints(job.folder, trainer.accelerator.wait_for_everyone))
    trainer.args.eval_on_start &= checkpoint is None  # it is in the log
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except InfalignError:
        raise
    except UnpicklingError as error:
        raise InfalignError(
            f"{checkpoint} contains a pickle of more than numbers, so it was not written by infalign; nothing in it "
            f"was run. Remove {job.folder} and rerun the same command"
        ) from error
    except Exception as error:  # a full disk raises different types in torch, safetensors and the file system
        if unfinished := find_unsealed(job.folder):
            raise unwritable(unfinished, " ".join(str(error).split())[:300]) from error
        raise
    history = [dict(row) for row in trainer.state.log_history]
    if resumed:
        history[-1]["resumed"] = resumed
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)  # in its own precision
    return Fitted(model, history, job.model_dir)


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, model_dir: Path) -> None:
    """Write a standard model folder (safetensors weights, config and tokenizer), synced to disk.

    A model that generates is saved with the sampling that it was trained and measured at: the whole distribution at
    temperature 1. Raises InfalignError as `writing` does.
    """
    if model.can_generate():
        names = ("bos_token_id", "pad_token_id")
        special = {name: getattr(model.generation_config, name) or getattr(tokenizer, name) for name in names}
        ends = Vocabulary(tokenizer, model.generation_config).ends  # as it was sampled
        special["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, top_p=1.0, top_k=0, **special)
    with saving(model_dir):
        model.save_pretrained(model_dir)
        tokenizer.save_pretrained(model_dir)
        settle(model_dir)
