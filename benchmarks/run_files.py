"""A recipe's settings, running it, and what the files of its run directory hold."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from infalign import DataError, Samples, win_rates_of
from infalign.recipe.reading import load_recipe  # methods become policies of a recipe, checked as in one
from infalign.recipe.settings import Recipe  # the same

__all__ = ["Evaluated", "Recipe", "column", "drawn", "finish", "load_recipe", "records", "reference_rewards", "written"]
LEAST_KL = 1e-6  # nats, at which theory is asked for a law


def finish(recipe: Recipe, until: str) -> None:
    """Do what is left of a run up to a stage, by the command; exit as it does if it fails."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(json.dumps(recipe.model_dump(mode="json")))  # JSON is YAML
        command = [sys.executable, "-m", "infalign", "run", str(file), "--until", until]
        if code := subprocess.run(command, check=False).returncode:
            sys.exit(code)


class Evaluated:
    """The scored samples of a run's models, as far as they exist, to the test prompts that no source leaves out."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.folder = recipe, Path(recipe.run_dir) / "evaluation"
        self.samples, self.sources = recipe.evaluate.samples, tuple(recipe.rewards)  # the first selects, each judges

    def _every_row(self, model: str, name: str) -> np.ndarray:
        return np.array(column(self.folder / model / "scores.parquet", name)).reshape(-1, self.samples)

    @cached_property
    def kept(self) -> np.ndarray:
        """Which test prompts have rewards by all sources, as the reference's samples show. DataError if none has."""
        found = np.array([self._every_row("reference", source) for source in self.sources], float)
        kept = ~np.isnan(found).any(axis=(0, 2))
        if not kept.any():
            raise DataError(f"{' or '.join(self.sources)} returned None for every test prompt")
        return np.asarray(kept)

    @cached_property
    def prompt_ids(self) -> list[str]:
        """The prompts, in the order of all values."""
        return self._every_row("reference", "prompt_id")[self.kept, 0].tolist()

    def column(self, model: str, name: str) -> np.ndarray:
        """Return a column of a model's scores, (P, M)."""
        return self._every_row(model, name)[self.kept].astype(float)

    def kl(self, model: str) -> np.ndarray:
        """Return a model's KL to the reference on each prompt, (P,): the mean over those samples that have one."""
        return np.asarray(np.nanmean(self.column(model, "kl"), axis=1))

    def judged_by(self, source: str, model: str) -> Samples:
        """Return a model's samples: selected by the reward, judged by a source."""
        return Samples(self.column(model, "reward"), self.column(model, source))

    def wins(self, model: str, served: Sequence[Any]) -> dict[str, dict[str, np.ndarray]]:
        """Return win rates against the reference served alike, (P,) each, by judge and procedure's name."""
        names = [procedure.name for procedure in served]
        rates = {
            judge: win_rates_of(self.judged_by(judge, model), self.judged_by(judge, "reference"), served)
            for judge in self.sources
        }
        return {judge: dict(zip(names, found, strict=True)) for judge, found in rates.items()}

    def law_at(self, policy: Any, kl: float) -> Any:
        """Return theory's law of a policy at this KL; None where it has none, or rewards are right or wrong."""
        if np.isin(self.column("reference", "reward"), (0.0, 1.0)).all():
            return None
        aim = policy.aim(self.recipe.procedure)
        return None if aim is None else aim.rank_law(max(kl, LEAST_KL))


def column(path: Path, name: str) -> list[Any]:
    """Return a column of a Parquet table."""
    return list(pq.read_table(path, columns=[name])[name].to_pylist())


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """Give a path beside it that takes its name when the block is done: a file is there whole or not at all."""
    part = path.with_name(f"part-{path.name}")
    yield part
    part.rename(path)


def drawn(folder: Path, name: str) -> dict[tuple[str, int], Any]:
    """Return a column of the responses in a folder, by the id of their prompt and their number."""
    tables = (pq.read_table(shard, columns=["prompt_id", "index", name]) for shard in folder.glob("*.parquet"))
    return {(row["prompt_id"], row["index"]): row[name] for table in tables for row in table.to_pylist()}


def test_prompts(run_dir: str | Path, first: int) -> dict[str, list[Any]]:
    """Return the first test prompts: prompt_id, prompt (messages), columns (the others, as JSON) and token_ids."""
    found: dict[str, list[Any]] = pq.read_table(Path(run_dir) / "data" / "test_prompts.parquet")[:first].to_pydict()
    return found


def reference_rewards(run_dir: str | Path) -> np.ndarray:
    """Return the sorted rewards of the training prompts' rollouts, (P, K)."""
    return np.array(column(Path(run_dir) / "calibrated.parquet", "reference_rewards"))


def records(run_dir: str | Path) -> dict[str, dict[str, Any]]:
    """Return the records of the finished units by name: among others their seconds and what they say."""
    return {path.stem: json.loads(path.read_bytes()) for path in Path(run_dir).glob("stages/*.json")}
