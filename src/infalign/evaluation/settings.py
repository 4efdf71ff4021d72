"""How policies are served and evaluated."""

import re
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from infalign.core.errors import ConfigError
from infalign.core.settings import MOST_DRAWS, Count, Settings, spelled
from infalign.data.files import READERS
from infalign.evaluation.win_rates import rewind_samples
from infalign.method.procedures import RewindAndRepeat, Served, parse_procedure, rewinds


def read_procedure(name: str) -> Served:
    """Return the procedure that a recipe spells. Raises ConfigError for another spelling than its name."""
    procedure = parse_procedure(name)
    known = "standard" if procedure.name in ("best-of-1", "worst-of-1") else procedure.name
    if name != known:
        raise ConfigError(f"write the procedure {name} as {known}")
    return procedure


def read_rewind(name: str) -> RewindAndRepeat:
    """Return the procedure that ``rewind`` spells. Raises ConfigError for another family or spelling."""
    procedure = parse_procedure(name)
    if not rewinds(procedure):
        raise ConfigError(f"`rewind` is spelled rewind:QUANTILE:N, found {name}")
    if procedure.name != name:
        raise ConfigError(f"write {name} as {procedure.name}")
    return procedure


ProcedureSetting = Annotated[Served, *spelled(read_procedure)]
RewindSetting = Annotated[RewindAndRepeat, *spelled(read_rewind)]


class Evaluate(Settings):
    """Fresh samples of the base and of every policy on the test prompts."""

    prompts: Annotated[int, Field(ge=2)] = Field(128, description="test prompts at most")
    samples: Annotated[int, Field(ge=4, le=MOST_DRAWS)] = Field(
        64, description="responses of each model to a prompt; half of the base's are ranked among its others"
    )
    max_n: Count = Field(16, description="Best-of-N and Worst-of-N for all N up to this")
    rewind: RewindSetting = Field(
        RewindAndRepeat(0.85, 32),
        description="default: the procedure if it rewinds, or what the samples are enough for",
    )
    confidence: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.95, description="of all intervals; a trained reward keeps those of its fitting"
    )

    @model_validator(mode="before")
    @classmethod
    def _affordable(cls, given: Any) -> Any:
        """Take fewer draws, and the median of very few samples, where the recipe has no ``rewind`` of its own."""
        samples = given.get("samples") if isinstance(given, dict) and "rewind" not in given else None
        if not isinstance(samples, int) or samples < 2:
            return given
        half = samples // 2
        return given | {"rewind": f"rewind:{0.85 if half >= 6 else 0.5}:{min(32, half)}"}

    @model_validator(mode="after")
    def _enough_samples(self) -> "Evaluate":
        if self.max_n > self.samples:
            raise ValueError(f"Best-of-{self.max_n} cannot be estimated from {self.samples} samples")
        needed = rewind_samples(self.rewind)
        if needed > self.samples:
            raise ValueError(f"{self.rewind.name} needs {needed} samples, found {self.samples}")
        return self


HELD_OUT = "held-out"
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")  # also of files


class Benchmarks(Settings):
    """What else alignment changed: the reference and every policy on other tasks, question by question."""

    tasks: Annotated[list[str], Field(min_length=1)] = Field(
        [HELD_OUT],
        description="names of lm-evaluation-harness; files of multiple-choice questions; held-out, the preferred "
        "responses of the test pairs",
    )
    documents: Annotated[int, Field(ge=2)] | None = Field(None, description="of each task, its first; default all")
    chat: bool = Field(False, description="ask through the chat template instead of in plain text")

    @field_validator("tasks", mode="after")
    @classmethod
    def _told_apart(cls, tasks: list[str]) -> list[str]:
        names = Counter(map(task_label, tasks))
        if wrong := [name for name in names if not LABEL.fullmatch(name)]:
            raise ValueError(
                f"no task can be called {wrong[0]!r}; files get its name, so take letters, digits, . _ + -"
            )
        if twice := [name for name, times in names.items() if times > 1]:
            raise ValueError(f"two tasks are called {twice[0]}; rename a file, or leave one out")
        return tasks


def is_file_task(task: str) -> bool:
    """Return whether a task is a file of questions, rather than a name.

    >>> is_file_task("facts.jsonl"), is_file_task("arc_easy")
    (True, False)
    """
    return task.endswith(tuple(READERS))


def task_label(task: str) -> str:
    """Return what a task is called in tables and files: its name, of a file that without folder and ending.

    >>> task_label("questions/facts.jsonl"), task_label("arc_easy")
    ('facts', 'arc_easy')
    """
    return Path(task).name.partition(".")[0] if is_file_task(task) else task
