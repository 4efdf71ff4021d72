"""Trainer callbacks: progress reports, freed memory given back, and a stop at losses that are not finite."""

import math
from pathlib import Path
from time import monotonic
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from infalign.core.errors import InfalignError
from infalign.core.memory import trim_heap
from infalign.core.progress import OnProgress


class DivergedError(InfalignError):
    """A loss or gradient is not finite."""


class WatchLog(TrainerCallback):
    """Reports steps with metrics and ``resumed``; raises DivergedError, before a save, for what is not finite."""

    SHOWN = ("loss", "eval_loss", "accuracy", "eval_accuracy", "reward", "kl", "mean_token_accuracy")
    FINITE = ("loss", "grad_norm", "eval_loss")

    def __init__(self, on_progress: OnProgress, resumed: str, checkpoints: Path) -> None:
        self._on_progress, self._resumed, self._metrics = on_progress, resumed, ""
        self._checkpoints = checkpoints

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Report the step, and log it if it is saved."""
        self._on_progress(state.global_step, state.max_steps, "  ".join(filter(None, (self._metrics, self._resumed))))
        control.should_log |= control.should_save  # the trainer logs, evaluates and then saves

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Keep the latest metrics for the next report; stop at the first number that is not finite."""
        if shown := {name: float(value) for name, value in logs.items() if name in self.SHOWN}:
            self._metrics = "  ".join(f"{name} {value:.3g}" for name, value in shown.items())
        for name in self.FINITE:
            value = float(logs.get(name, 0.0))
            if not math.isfinite(value):
                kept = get_last_checkpoint(str(self._checkpoints))
                raise DivergedError(
                    f"training {self._checkpoints.name} diverged: at step {state.global_step} the {name} is {value}; "
                    + (f"the checkpoint of step {kept.rpartition('-')[2]} is kept" if kept else "no step was saved")
                    + "; lower fit.learning_rate"
                )


class TrimHeap(TrainerCallback):
    """Gives freed memory back to the system every few seconds: in pieces, the C library keeps as much as is in use."""

    SECONDS = 5.0

    def __init__(self) -> None:
        self._trimmed = monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Trim if it is time."""
        if monotonic() - self._trimmed >= self.SECONDS:
            trim_heap()
            self._trimmed = monotonic()

    on_prediction_step = on_step_end
