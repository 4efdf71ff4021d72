"""The rewards of a run: for each one its source, its model folder and its stored rewards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infalign.core.progress import OnProgress
from infalign.core.storage import hash_file
from infalign.core.user_code import function_name, source_file
from infalign.method.by_name import ByName, UserReward
from infalign.method.calibration import Array
from infalign.models.conversion import PACKAGE, locate_model
from infalign.models.pretrained import model_digest
from infalign.models.settings import Compute
from infalign.models.tokenizers import load_tokenizer
from infalign.rewards.base import Batch, RewardFunction
from infalign.rewards.classifier import ClassifierReward, share_passes
from infalign.rewards.function import function_reward, weighted_reward
from infalign.rewards.scores import NamedReward, check_unchanged, score_to
from infalign.rewards.server import RemoteReward
from infalign.rewards.settings import RewardSource

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

    def load(self) -> RewardFunction:
        """Return the reward function: text in, numbers out, a batch at a time.

        Raises DataError if a server or a function no longer reproduces the rewards that the run has stored.
        """
        source = self.source
        reward: RewardFunction
        if source.url is not None:
            tokenizer = load_tokenizer(self.tokenizer)
            reward = RemoteReward(source.url, tokenizer, api_key_env=source.api_key_env, in_flight=source.in_flight)
        elif source.function is not None:
            reward = weighted_reward(source.functions, source.time_limit)
        else:
            reward = self.classifier()
        check_unchanged(self.named(reward), self.shards())
        return reward

    def classifier(self) -> ClassifierReward:
        """Return the reward function of a classifier."""
        device, dtype = self.compute.torch_device(), self.compute.dtype
        return ClassifierReward.load(self.model, device=device, dtype=dtype, date=self.date)

    def named(self, reward: RewardFunction) -> NamedReward:
        """Return the loaded ``reward`` with its name, and the label of its scores."""
        return NamedReward(reward, self.name, self.made_by)

    def score(
        self,
        rows: Batch,
        folder: Path,
        on_progress: OnProgress,
        reward: RewardFunction | None = None,
        known: Path | None = None,
    ) -> Array:
        """Return rewards of responses by ``reward``, by default loaded; those in ``folder`` and ``known`` are kept."""
        return score_to(folder, self.named(reward or self.load()), rows, known=known, on_progress=on_progress)

    @property
    def identity(self) -> str:
        """What identifies a reward: its url, its function's name (without folder) or the digest of its model.

        Of several functions it has all names, with the weights that are not 1.
        """
        if self.source.url is not None:
            return self.source.url
        if self.source.function is None:
            return model_digest(self.model)
        weights = {function_name(spec): weight for spec, weight in self.source.functions.items()}
        return " + ".join(name if weight == 1 else f"{weight:g}*{name}" for name, weight in weights.items())

    @property
    def made_by(self) -> str:
        """The label that scores are stored under: the identity, with a hash of the source for a function."""
        files = [file for spec in self.source.functions if (file := source_file(spec)) and file.is_file()]
        hashes = " ".join(hash_file(file)[:8] for file in files)
        within = "" if self.source.time_limit is None else f" (limit {self.source.time_limit})"
        return f"{self.identity} (source {hashes}){within}" if files else f"{self.identity}{within}"


def load_rewards(scorers: Sequence[Scorer]) -> Iterator[tuple[Scorer, RewardFunction]]:
    """Yield rewards with their functions, one after the other; heads on one frozen model share their passes."""
    found = dict[str, RewardFunction]()
    for scorer in scorers:
        if scorer.name not in found and scorer.source.head:
            heads = [other for other in scorers if other.source.head and other.source.model == scorer.source.model]
            if len(heads) > 1:
                shared = share_passes([head.classifier() for head in heads])
                found |= zip((head.name for head in heads), shared, strict=True)
        yield scorer, found.pop(scorer.name) if scorer.name in found else scorer.load()
