"""What every training job shares: arguments, progress, checkpoints and the saved model."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_pt_utils import get_length_grouped_indices

from infalign.distributed import processes
from infalign.errors import ConfigError, InfalignError
from infalign.models.memory import PeakMemory
from infalign.models.settings import Fit
from infalign.progress import OnProgress
from infalign.storage import settle, unwritable, writing
from infalign.training.callbacks import ProgressReporter, StopUnlessFinite
from infalign.training.checkpoints import Seals, newest_whole, unsealed


@dataclass(frozen=True)
class Job:
    """Where and how a model is trained."""

    folder: Path  # checkpoints and logs while it runs
    seed: int
    device: str
    report_to: list[str]
    on_progress: OnProgress


def arguments(fit: Fit, job: Job) -> dict[str, Any]:
    """Return the keyword arguments that every trainer's configuration takes.

    A trainer takes its rows once and as they lie: all epochs of them, see `training_order`.
    """
    at_once = processes()
    per_device = fit.device_batch_size or fit.batch_size // at_once
    if per_device == 0 or fit.batch_size % (per_device * at_once):
        raise ConfigError(
            f"fit.batch_size {fit.batch_size} is no multiple of {at_once} processes × {per_device} sequences each; "
            "change fit.batch_size or fit.device_batch_size"
        )
    return {
        "output_dir": str(job.folder),
        "run_name": job.folder.name,
        "seed": job.seed,
        "num_train_epochs": 1,
        "train_sampling_strategy": "sequential",
        "per_device_train_batch_size": per_device,
        "per_device_eval_batch_size": per_device,
        "gradient_accumulation_steps": fit.batch_size // (per_device * at_once),
        "learning_rate": fit.learning_rate,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "bf16": fit.bf16,
        "activation_checkpointing": fit.gradient_checkpointing,
        "gradient_checkpointing": None,
        "use_cpu": job.device == "cpu",
        "report_to": job.report_to,
        "logging_steps": 0.02,
        "logging_nan_inf_filter": False,  # it would log an earlier loss for a NaN
        "save_strategy": "steps",
        "save_steps": 0.25,
        "restore_callback_states_from_checkpoint": True,  # how long early stopping has waited
        "disable_tqdm": True,
        "dataloader_pin_memory": job.device != "cpu",
    }


def training_order(lengths: Sequence[int], epochs: float, rows_a_step: int, seed: int) -> list[int]:
    """Return which row is trained on when, for at least one step: ``epochs`` passes, each shuffled anew.

    Rows of like length come together, which pads less; where all ``lengths`` are equal, a pass is a random permutation.
    All passes make one epoch of a trainer. It skips what a checkpoint has seen of that one epoch exactly, while the
    order of a second epoch would depend on random numbers, or a sampler, that a resumed training does not have.
    """
    generator, order = torch.Generator().manual_seed(seed), list[int]()
    for _ in range(math.ceil(epochs)):
        order += get_length_grouped_indices(lengths, rows_a_step, generator=generator)
    return order[: max(round(epochs * len(lengths)), rows_a_step)]


def length_class(tokens: Any) -> Any:
    """Return the class of a length, or of an array of lengths, by which rows are batched together.

    Batches of one exact length, such as all the shortest, would make biased steps.
    """
    return -(-tokens // 8)


def lora(fit: Fit, task: TaskType) -> LoraConfig | None:
    """Return the adapter's configuration, on all linear layers, or None for full fine-tuning."""
    if fit.lora is None:
        return None
    return LoraConfig(r=fit.lora.rank, lora_alpha=fit.lora.alpha, target_modules="all-linear", task_type=task)


def fit_and_save(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, job: Job, model_dir: Path
) -> list[dict[str, Any]]:
    """Train, from the newest whole checkpoint in the job's folder if there is one, save the model and return the log.

    Raises InfalignError for a loss or gradient that is not finite, before a checkpoint could hold what it made.
    The last row has ``train_peak_memory`` in bytes: on the CPU the most that this process held, libraries included, on
    a GPU the most that its tensors took. After an interruption it has ``resumed`` too: the checkpoint that was taken
    and the torn ones that were not. Every report says so as well.
    """
    for printing in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printing)
    with trainer.accelerator.main_process_first():  # which removes what is torn
        checkpoint, torn = newest_whole(job.folder)
    resumed = _resumed(checkpoint, torn)
    trainer.add_callback(ProgressReporter(job.on_progress, resumed))
    trainer.add_callback(StopUnlessFinite(job.folder))
    trainer.add_callback(Seals(job.folder, trainer.accelerator.wait_for_everyone))
    trainer.args.eval_on_start &= checkpoint is None  # early stopping would count this evaluation
    with PeakMemory(job.device) as memory:
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except InfalignError:
            raise
        except UnpicklingError as error:
            raise InfalignError(
                f"{checkpoint} holds a pickle of more than numbers, so no training of ours wrote it; nothing in it was "
                f"run; remove {job.folder} and run the same command again"
            ) from error
        except Exception as error:  # torch, safetensors and the file system each have their own for a full disk
            if torn_now := unsealed(job.folder):
                raise unwritable(torn_now, " ".join(str(error).split())[:300]) from error
            raise
    history = [dict(row) for row in trainer.state.log_history]
    history[-1]["train_peak_memory"] = memory.peak  # beside train_runtime
    if resumed:
        history[-1]["resumed"] = resumed
    if trainer.is_world_process_zero():
        model = trainer.accelerator.unwrap_model(trainer.model)
        save_model(model.merge_and_unload() if isinstance(model, PeftModel) else model, tokenizer, model_dir)
    return history


def _resumed(checkpoint: Path | None, torn: list[str]) -> str:
    """Return where a training goes on and which checkpoints it could not use; nothing if there was none."""
    if checkpoint is None and not torn:
        return ""
    begun = f"resumed from {checkpoint.name}" if checkpoint else "started anew"
    return "; ".join([begun, *(f"skipped {said}" for said in torn)])


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, model_dir: Path) -> None:
    """Write a standard model folder, safetensors weights, config and tokenizer, and wait until it is on the disk.

    Raises InfalignError as `writing` does.
    """
    try:
        with writing(model_dir):
            model.save_pretrained(model_dir)
            tokenizer.save_pretrained(model_dir)
            settle(model_dir)
    except SafetensorError as error:
        raise unwritable(model_dir, str(error)) from error
