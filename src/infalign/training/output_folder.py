"""The folders of a training, and the model that it writes."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infalign.core.distributed import is_first
from infalign.core.memory import free_memory
from infalign.core.progress import NOTHING, OnProgress, SoFar
from infalign.core.storage import fsync, remove, writing
from infalign.data.messages import Pair
from infalign.models.conversations import BATCH, conversation_ids
from infalign.models.settings import Compute


@dataclass(frozen=True)
class Job:
    """Where and how a model is trained."""

    folder: Path  # for checkpoints and logs during training
    model_dir: Path  # for the trained model
    seed: int
    device: str
    report_to: list[str]
    on_progress: OnProgress


@dataclass(frozen=True, slots=True)
class Target:
    """The folders of a training, for checkpoints and for the model, and the settings that all trainings share."""

    checkpoints: Path
    model: Path
    seed: int
    compute: Compute
    report_to: tuple[str, ...]

    @contextmanager
    def job(self, on_progress: OnProgress) -> Iterator[Job]:
        """Yield the training job; the folder that it saves to gets its final name only on success."""
        from transformers import set_seed

        saved = self.model.with_name(f"{self.model.name}.unfinished")
        if is_first():
            remove(saved)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        set_seed(self.seed)  # reward heads and adapters are initialized before the trainer sets the seed
        yield Job(self.checkpoints, saved, self.seed, self.compute.torch_device(), list(self.report_to), on_progress)
        free_memory()  # a trainer is a part of reference cycles, and holds its models
        if is_first():
            with writing(self.model):
                remove(self.model)
                saved.replace(self.model)
                fsync(saved.parent)  # before the checkpoints are removed
            for left in (*self.checkpoints.glob("checkpoint-*"), self.checkpoints / "start"):
                shutil.rmtree(left, ignore_errors=True)

    def so_far(self) -> SoFar:
        """Return the last saved step: ``checkpoint at step 30 of 120``."""
        saved = dict[int, int]()
        for path in self.checkpoints.glob("checkpoint-*/trainer_state.json"):
            try:
                state = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):  # a running training may be writing or removing the file
                continue
            saved[state["global_step"]] = state["max_steps"]
        if not saved:
            return NOTHING
        step, of = max(saved.items())
        return SoFar(f"checkpoint at step {step:,} of {of:,}", step / of)


def drop_long_pairs(pairs: Sequence[Pair], tokenizer: Any, max_length: int) -> tuple[list[Pair], int]:
    """Return the pairs with at most ``max_length`` tokens in each conversation, and the number of longer pairs."""
    short = list[Pair]()
    for start in range(0, len(pairs), BATCH):  # the ids of all pairs would take much memory
        piece = pairs[start : start + BATCH]
        ids = conversation_ids(tokenizer, [(*prompt, *said) for prompt, *both in piece for said in both])
        rows = zip(piece, ids[::2], ids[1::2], strict=True)
        short += [pair for pair, *both in rows if max(map(len, both)) <= max_length]
    return short, len(pairs) - len(short)
