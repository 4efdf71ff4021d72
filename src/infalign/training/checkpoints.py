"""Complete checkpoints only: each one is sealed by ``complete.json`` once all its files are on disk."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from infalign.core.storage import flaws, inventory, write_text

SEAL = "complete.json"


class SealCheckpoints(TrainerCallback):
    """Seals every checkpoint once it is written, and only then removes older ones."""

    def __init__(self, folder: Path, wait_for_everyone: Callable[[], object]) -> None:
        self._folder, self._wait_for_everyone = folder, wait_for_everyone

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Seal the checkpoint once all processes have written their part, `_save_checkpoint` overrides included."""
        self._wait_for_everyone()  # each process writes its own random state
        if not state.is_world_process_zero:
            return
        checkpoint = self._folder / f"checkpoint-{state.global_step}"
        if control.should_training_stop and state.global_step < state.max_steps:
            shutil.rmtree(checkpoint)  # a resume from here would continue a training that has stopped early
            return
        write_text(checkpoint / SEAL, json.dumps(inventory(checkpoint, checkpoint), indent=1))
        for step, older in _checkpoints(self._folder):
            if step != state.global_step:
                shutil.rmtree(older)


def find_unsealed(folder: Path) -> Path | None:
    """Return the checkpoint that is being written, if there is one."""
    return next((path for _, path in _checkpoints(folder) if not (path / SEAL).exists()), None)


def find_complete_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint, or None, and what is wrong with the incomplete ones, which are removed.

    A checkpoint is complete if every file that its seal lists has the recorded size and hash.
    """
    newest, incomplete = None, list[str]()
    for _, checkpoint in _checkpoints(folder):
        if flaw := _find_flaw(checkpoint):
            incomplete.append(f"{checkpoint.name}: {flaw}")
            shutil.rmtree(checkpoint)
        else:
            newest = checkpoint
    return newest, incomplete


def _checkpoints(folder: Path) -> list[tuple[int, Path]]:
    return sorted((int(path.name.rpartition("-")[2]), path) for path in folder.glob("checkpoint-*"))


def _find_flaw(checkpoint: Path) -> str | None:
    """Return how a checkpoint differs from its seal, or None."""
    try:
        files = json.loads((checkpoint / SEAL).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{SEAL} is missing"
    except (ValueError, RecursionError):
        return f"{SEAL} is damaged"
    return next(flaws(files, checkpoint), None)
