"""The rewards of a run: for each one its source, its model folder and its stored rewards."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from infalign.core.progress import OnProgress
from infalign.core.storage import hash_file
from infalign.core.user_code import function_name, import_function, source_file
from infalign.data.examples import Example, to_table
from infalign.method.by_name import ByName, UserReward, columns_of
from infalign.method.calibration import Array
from infalign.models.conversion import PACKAGE, locate_model
from infalign.models.pretrained import model_digest
from infalign.models.settings import Compute
from infalign.models.tokenizers import load_tokenizer
from infalign.rewards.base import Batch, RewardFunction, score
from infalign.rewards.classifier import ClassifierReward
from infalign.rewards.limited import SECONDS, Limited
from infalign.rewards.scores import NamedReward, check_unchanged, score_to
from infalign.rewards.server import RemoteReward
from infalign.rewards.settings import RewardSource

MAY_HANG = {"trl.rewards:accuracy_reward", "trl.rewards:reasoning_accuracy_reward"}  # as math_verify
AnyReward = Callable[..., Any] | str | Path
"""A reward function, its spelling ``mine.py:score``, or the folder or hub id of a reward model."""


def load_reward(reward: AnyReward) -> RewardFunction:
    """Return the reward function that is given from Python. Raises ConfigError for one that cannot be loaded."""
    if isinstance(reward, UserReward | ClassifierReward):
        return reward
    if callable(reward):
        return ByName(reward)
    spelled = str(reward)
    if ":" in spelled and not spelled.startswith(PACKAGE) and not Path(spelled).exists():
        return function_reward(spelled)
    return ClassifierReward.load(locate_model(spelled), device=Compute().torch_device())


def function_reward(spec: str, seconds: float | None = None) -> ByName:
    """Return a reward function, which is called by the names of its parameters; raises as `import_function`.

    With ``seconds``, and if it may hang, it is `Limited`.
    """
    function = ByName(import_function(spec))
    may_hang = seconds or spec in MAY_HANG or isinstance(function.function, Limited)
    return ByName(_limited(function.function, spec, seconds or SECONDS)) if may_hang else function


def check_columns(functions: Iterable[ByName], examples: Sequence[Example]) -> None:
    """Raise DataError if rows of data lack a column that a reward function needs."""
    for function in functions if examples else ():
        function.check([e.prompt for e in examples], columns_of([e.columns for e in examples]))


def score_examples(function: ByName, name: str, examples: Sequence[Example], responses: list[str]) -> Array:
    """Return the rewards of a function for a response to each row of data; raises as `rewards.base.score`."""
    columns = [str(columns) for columns in to_table(examples)["columns"].to_pylist()]
    return score(function, [[*example.prompt] for example in examples], responses, columns=columns, name=name)


@cache
def _limited(function: Callable[..., Any], spec: str, seconds: float) -> Limited:
    """Return a function with a time limit; all parts of a run that a process scores share its process."""
    return replace(function, seconds=seconds) if isinstance(function, Limited) else Limited(function, spec, seconds)


@dataclass(frozen=True, slots=True)
class Scorer:
    """A reward of a run. ``shards`` lists the files of all its rewards that the run has stored."""

    name: str
    source: RewardSource
    model: str  # the folder or hub id of a classifier
    tokenizer: Path  # the policy's tokenizer, which renders prompts for a server
    compute: Compute
    shards: Callable[[], list[Path]]
    date: str | None  # what a chat template prints that asks for the day

    def load(self) -> NamedReward:
        """Return the reward function with its name, and the label of its scores.

        Raises DataError if a server or a function no longer reproduces the rewards that the run has stored.
        """
        source = self.source
        function: RewardFunction
        if source.url is not None:
            tokenizer = load_tokenizer(self.tokenizer)
            function = RemoteReward(source.url, tokenizer, api_key_env=source.api_key_env, in_flight=source.in_flight)
        elif source.function is not None:
            function = function_reward(source.function, source.time_limit)
        else:
            device, dtype = self.compute.torch_device(), self.compute.dtype
            function = ClassifierReward.load(self.model, device=device, dtype=dtype, date=self.date)
        reward = NamedReward(function, self.name, self.made_by)
        check_unchanged(reward, self.shards())
        return reward

    def score(self, rows: Batch, folder: Path, on_progress: OnProgress, known: Path | None = None) -> Array:
        """Return the rewards of responses; those in ``folder`` and ``known`` are kept."""
        return score_to(folder, self.load(), rows, known=known, on_progress=on_progress)

    @property
    def made_by(self) -> str:
        """The label that scores are stored under: a url, a model's digest, or a function's name and source's hash."""
        function, limit = self.source.function, self.source.time_limit
        if function is None:
            return self.source.url or model_digest(self.model)
        file = source_file(function)
        source = f" (source {hash_file(file)[:8]})" if file and file.is_file() else ""
        return f"{function_name(function)}{source}" + ("" if limit is None else f" (limit {limit})")
