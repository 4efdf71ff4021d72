"""Paths in a run directory."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths in a run directory."""

    root: Path

    @property
    def data(self) -> Path:
        """Tables of demonstrations, preferences and prompts, and the tokenizer."""
        return self.root / "data"

    @property
    def tokenizer(self) -> Path:
        """The policy's tokenizer."""
        return self.data / "tokenizer"

    def model(self, name: str) -> Path:
        """Return the folder of a trained model: reference, reward, judge, gold or a policy."""
        return self.root / "models" / name

    def card(self, name: str) -> Path:
        """Return the model card of an evaluated policy."""
        return self.model(name) / "README.md"

    def checkpoints(self, name: str) -> Path:
        """Return the folder of the checkpoints of an unfinished training."""
        return self.root / "checkpoints" / name

    def rollouts(self, part: int) -> Path:
        """Return the folder of one part of the rollouts of the training prompts."""
        return self.root / "rollouts" / f"part-{part}"

    def scores(self, part: int) -> Path:
        """Return the table of rewards of one part of the rollouts; the folder ``part-N`` next to it has the shards."""
        return self.root / "scores" / f"part-{part}.parquet"

    def states(self, which: str, part: int) -> Path:
        """Return the folder with the reference's states in one part of the rollouts; ``which`` names the layers."""
        return self.root / "states" / f"{which}-part-{part}"

    def logprobs(self, which: str) -> Path:
        """Return the table of the reference's log-probabilities of the rollouts, as a training computes them."""
        return self.root / "logprobs" / f"{which}.parquet"

    def scored(self, name: str) -> list[Path]:
        """Return all shards of rewards from the source ``name``, those of training prompts first."""
        rollouts = sorted(self.root.glob("scores/part-*/part-[0-9]*.parquet")) if name == "reward" else []
        return rollouts + sorted(self.root.glob(f"evaluation*/*/scores/{name}/part-[0-9]*.parquet"))

    @property
    def calibrated(self) -> Path:
        """Training prompts with the column ``reference_rewards``."""
        return self.root / "calibrated.parquet"

    def law(self, name: str) -> Path:
        """Return the table of the law that a policy is trained towards: log π*/π_ref of the rollouts."""
        return self.root / "laws" / f"{name}.parquet"

    def prompts(self, split: str) -> Path:
        """Return the table of the prompts of a split: test or train."""
        return self.data / f"{split}_prompts.parquet"

    def evaluation(self, name: str) -> Path:
        """Return the folder of a model's samples, scores and KL on the test prompts."""
        return self.root / "evaluation" / name

    @property
    def results(self) -> Path:
        """All numbers of the evaluation."""
        return self.root / "results.json"

    @property
    def report(self) -> Path:
        """The report, with its figures embedded."""
        return self.root / "report.html"
