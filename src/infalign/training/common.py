"""What every training job shares: arguments, progress, checkpoints and the saved model."""

import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # TRL reports usage otherwise

import torch  # isort: skip
from peft import LoraConfig, PeftModel, TaskType
from psutil import Process
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_pt_utils import get_length_grouped_indices
from transformers.trainer_utils import get_last_checkpoint

from infalign.config import Fit
from infalign.data import settle, unwritable, writing
from infalign.errors import ConfigError, InfalignError
from infalign.training.checkpoints import Seals, newest_whole, unsealed

Report = Callable[[int, int, str], None]  # (done, total, note)


@dataclass(frozen=True)
class Job:
    """Where and how a model is trained."""

    folder: Path  # checkpoints and logs while it runs
    seed: int
    device: str
    report_to: list[str]
    report: Report


def arguments(fit: Fit, job: Job) -> dict[str, Any]:
    """Return the keyword arguments that every trainer's configuration takes.

    A trainer takes its rows once and as they lie: all epochs of them, see `training_order`.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    per_device = fit.device_batch_size or fit.batch_size // processes
    if per_device == 0 or fit.batch_size % (per_device * processes):
        raise ConfigError(
            f"fit.batch_size {fit.batch_size} is no multiple of {processes} processes × {per_device} sequences each; "
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
        "gradient_accumulation_steps": fit.batch_size // (per_device * processes),
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
    trainer.add_callback(_Reporter(job.report, resumed))
    trainer.add_callback(_StopUnlessFinite(job.folder))
    trainer.add_callback(Seals(job.folder, trainer.accelerator.wait_for_everyone))
    trainer.args.eval_on_start &= checkpoint is None  # early stopping would count this evaluation
    with _PeakMemory(job.device) as memory:
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


class _PeakMemory:
    """Measures the most memory in use within a ``with`` block.

    On the CPU a thread looks every twentieth of a second. (transformers' own tracker looks without a pause, and so
    holds up the interpreter that trains.)
    """

    INTERVAL = 0.05  # seconds

    def __init__(self, device: str) -> None:
        self.peak, self._on_gpu = 0, device != "cpu"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "_PeakMemory":
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
        else:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_gpu:
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self._ended.set()
            self._thread.join()

    def _watch(self) -> None:
        process, ended = Process(), False
        while not ended:
            self.peak = max(self.peak, process.memory_info().rss)
            ended = self._ended.wait(self.INTERVAL)


class _Reporter(TrainerCallback):
    """Passes steps and the latest metrics on, and where the training was resumed."""

    SHOWN = ("loss", "eval_loss", "accuracy", "eval_accuracy", "reward", "kl", "mean_token_accuracy")

    def __init__(self, report: Report, resumed: str) -> None:
        self._report, self._resumed, self._metrics = report, resumed, ""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        shown = {k: float(v) for k, v in (logs or {}).items() if k in self.SHOWN}
        if shown:
            self._metrics = "  ".join(f"{name} {value:.3g}" for name, value in shown.items())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._report(state.global_step, state.max_steps, "  ".join(filter(None, (self._metrics, self._resumed))))


class _StopUnlessFinite(TrainerCallback):
    """Raises InfalignError for a loss or gradient that is not finite, and lets no step be saved that was not logged."""

    WATCHED = ("loss", "grad_norm", "eval_loss")

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log |= control.should_save  # the trainer logs, evaluates and then saves

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        for name in self.WATCHED:
            value = float((logs or {}).get(name, 0.0))
            if not math.isfinite(value):
                kept = get_last_checkpoint(str(self._checkpoints))
                raise InfalignError(
                    f"training {self._checkpoints.name} diverged: at step {state.global_step} the {name} is {value}; "
                    + (f"the checkpoint of step {kept.rpartition('-')[2]} is kept" if kept else "no step was saved yet")
                    + "; lower fit.learning_rate"
                )
