"""pass@k and its relatives, of a table of rewards: unbiased for every k up to the samples of a prompt."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from rich.console import Console

from infalign.core.display import heading, plain_table, say, share
from infalign.core.errors import ConfigError, DataError
from infalign.data.files import read_rows
from infalign.evaluation.intervals import estimate_share
from infalign.evaluation.reward_tables import read_rewards
from infalign.method.calibration import Array, as_rewards
from infalign.method.procedures import BestOfN, Procedure, Standard, WorstOfN
from infalign.method.procedures.majority import MajorityVote

NO_WIDTH = "every prompt has the same value, so the interval has zero width and does not generalize to other prompts"
KINDS: dict[str, Callable[[int], Procedure | MajorityVote]] = {
    "pass@": BestOfN,
    "pass^": WorstOfN,
    "avg@": lambda _: Standard(),
    "maj@": MajorityVote,
}


@dataclass(frozen=True, slots=True)
class Metric:
    """How often the response is right that a procedure serves.

    ``pass@k`` serves the best of k (one of k is right), ``pass^k`` the worst (all k are right), ``avg@k`` any one, and
    ``maj@k`` the answer that most of k give.
    """

    name: str
    k: int
    procedure: Procedure | MajorityVote

    @classmethod
    def parse(cls, name: str) -> "Metric":
        """Return the metric that ``name`` spells. Raises ConfigError for another name."""
        found = re.fullmatch(r"(pass@|pass\^|avg@|maj@)([1-9]\d*)", name)
        if found is None:
            raise ConfigError(f"unknown metric {name!r}; known: {', '.join(f'{kind}K' for kind in KINDS)}")
        k = int(found[2])
        return cls(name, k, KINDS[found[1]](k))

    def of_prompts(self, correct_PM: ArrayLike, answers_PM: ArrayLike | None = None) -> Array:
        """Return the metric of each prompt, (P,), from M ≥ k responses that are right (1) or not (0).

        It is the mean over all sets of k of the M, so its expectation does not depend on M. ``maj@k`` needs answers,
        equal where they are one answer. Raises DataError for fewer than k responses, and for ``maj@k`` without answers.
        """
        correct = np.asarray(correct_PM, float)
        if correct.shape[1] < self.k:
            raise DataError(f"{self.name} needs {self.k} responses per prompt, found {correct.shape[1]}")
        if not isinstance(self.procedure, MajorityVote):
            weights = self.procedure.weights(correct)
        elif answers_PM is None:
            raise DataError(f"{self.name} needs a column answer that shows which responses agree")
        else:
            weights = self.procedure.weights(answers_PM)
        return np.asarray((weights * correct).sum(axis=1))


def pass_rates(
    rewards: Sequence[ArrayLike],
    metrics: Sequence[str],
    *,
    threshold: float | None = None,
    answers: Sequence[ArrayLike] | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return each of ``metrics``, such as ``pass@8``, with its interval over prompts.

    ``rewards`` holds those of the responses to each prompt, which may be of different number: 0 or 1, or graded, with
    the ``threshold`` from which on a response is right. ``answers`` has the same shape. Raises DataError for graded
    rewards without a threshold, and as `Metric.of_prompts`; ConfigError for an unknown metric.

    >>> pass_rates([[0, 0, 1, 1], [0, 1, 0]], ["pass@2"])[0]["mean"]  # 1 − C(2, 2)/C(4, 2) = 5/6 and 1 − 1/3 = 2/3
    0.75
    """
    rows = [as_rewards(row) for row in rewards]
    if threshold is None and not all(np.isin(row, (0.0, 1.0)).all() for row in rows):
        raise DataError("the rewards are not all 0 or 1; give the threshold at which a response counts as right")
    correct = rows if threshold is None else [(row >= threshold).astype(float) for row in rows]
    said = [None] * len(rows) if answers is None else [np.asarray(row)[None] for row in answers]
    found = []
    for metric in map(Metric.parse, metrics):
        each = [metric.of_prompts(row[None], text)[0] for row, text in zip(correct, said, strict=True)]
        measured = estimate_share(each, confidence=confidence, seed=seed)
        found.append({"metric": metric.name, "prompts": len(rows), "confidence": confidence, **measured.as_dict()})
    return found


def measure_table(
    path: Path,
    metrics: Sequence[str] | None,
    *,
    threshold: float | None = None,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return `pass_rates` of a table with the columns prompt_id, reward and, for ``maj@k``, answer.

    The default metrics are pass@1, pass@2, pass@4, … up to the fewest responses of a prompt. Raises as `read_rewards`.
    """
    table = read_rewards(path)
    rows, answers = table.rows_by_prompt(), None
    if any(name.startswith("maj@") for name in metrics or ()):
        texts = [str(row["answer"]) for _, row in read_rows(path) if "answer" in row]
        if absent := len(table.prompt_ids) - len(texts):
            raise DataError(f"{path}: {absent} rows have no column answer, which maj@k needs")
        codes = np.unique(texts, return_inverse=True)[1]
        answers = [codes[own] for own in rows]
    return pass_rates(
        [table.numbers["reward"][own] for own in rows],
        metrics or [f"pass@{2**j}" for j in range(min(map(len, rows)).bit_length())],
        threshold=threshold,
        answers=answers,
        confidence=confidence,
        seed=seed,
    )


def print_metrics(records: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the records of `pass_rates` as a table."""
    first = records[0]
    about = f"{first['prompts']:,} prompts, {first['confidence']:.0%} intervals"
    heading(console, "How often a response is right", about)
    table = plain_table("metric", "%")
    for record in records:
        table.add_row(record["metric"], share(record))
    console.print(table)
    if without_width := [record["metric"] for record in records if record["low"] == record["high"]]:
        say(console, f"{', '.join(without_width)}: {NO_WIDTH}")
