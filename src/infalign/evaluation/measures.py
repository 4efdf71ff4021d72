"""pass@k, majority votes and the best of k in tables of rewards, and their paired differences between models."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.intervals import Confidence, Estimate
from infalign.evaluation.pass_at_k import Metric
from infalign.evaluation.reward_tables import RewardTable
from infalign.evaluation.samples import chunks
from infalign.method.calibration import Array
from infalign.method.procedures.majority import MajorityVote, votes

Record = dict[str, Any]
ALL_PAIRS = 8  # models; of more, each is compared with the first


def pass_at_k(
    rewards: RewardTable | Sequence[ArrayLike] | Array,
    k: int,
    *,
    threshold: float | None = None,
    confidence: float = 0.95,
) -> Estimate:
    """Return pass@k, the probability that one of k responses is right, with its interval over prompts.

    ``rewards`` holds the rewards of each prompt's responses, which may be of different number: 0 or 1, or graded, with
    the ``threshold`` from which on a response is right; or a table with one model. Unbiased: the mean over all sets of
    k of a prompt's n responses, 1 − C(n − c, k)/C(n, k) where c are right. Raises as `measure`.

    >>> pass_at_k([[0, 0, 1, 1], [0, 1, 0]], 2).mean  # 1 − C(2, 2)/C(4, 2) = 5/6 and 1 − C(2, 2)/C(3, 2) = 2/3
    0.75
    """
    (found,) = measure(rewards, [f"pass@{k}"], Measuring(threshold, confidence=Confidence(confidence)))
    return Estimate(found["mean"], found["low"], found["high"])


@dataclass(frozen=True, slots=True)
class Measuring:
    """How a table is measured: the ``threshold`` from which on a response is right, a column ``by`` whose values are
    measured apart, and the intervals.
    """

    threshold: float | None = None
    by: str | None = None
    confidence: Confidence = field(default_factory=Confidence)

    def parts(self, table: RewardTable) -> "Iterator[Part]":
        """Yield the rows of each value of ``by``, or all rows."""
        labels = None if self.by is None else table.column(self.by)
        for name in [""] if labels is None else sorted(labels.names):
            rows = table if labels is None else table.take(labels.codes == labels.names.index(name))
            yield Part(name, rows, self)


class Part:
    """Rows that are measured together: the rewards by prompt, as right or wrong where a threshold says so."""

    def __init__(self, name: str, table: RewardTable, how: Measuring) -> None:
        self.name, self.table, self.how, self.groups = name, table, how, table.groups()
        if how.threshold is not None and not np.isfinite(how.threshold):
            raise ConfigError(f"the threshold must be finite, found {how.threshold}")
        rewards = table.numbers["reward"][self.groups.order].astype(float, copy=False)
        self.rewards = rewards if how.threshold is None else (rewards >= how.threshold).astype(float)
        self.checked = bool(((self.rewards == 0.0) | (self.rewards == 1.0)).all())

    def values(self, metric: Metric) -> Array:
        """Return the metric of each prompt of each model, (G,). Raises as `measure`."""
        if metric.of_right and not self.checked:
            raise DataError(
                f"{self.table.source}: the rewards are not all 0 or 1; give the threshold at which a response counts "
                "as right, or measure best-of-K, worst-of-K or avg@K"
            )
        counts_votes, groups = isinstance(metric.procedure, MajorityVote), self.groups
        answers = None
        if counts_votes:  # answers are compared as numbers if all are, else as text
            labels = self.table.column("answer")
            answers = np.array([*votes(labels.names), np.nan])[labels.codes][groups.order]
        values_G = np.empty(groups.sizes.size)
        for size in np.unique(groups.sizes):
            own = np.flatnonzero(groups.sizes == size)
            if self.checked and not counts_votes:  # prompts with as many right have one value
                right, which = np.unique(np.add.reduceat(self.rewards, groups.starts)[own], return_inverse=True)
                values = [metric.of_prompts(np.arange(size) >= size - c[:, None]) for c in _pieces(right, size)]
                values_G[own] = np.concatenate(values)[which]
                continue
            for some in _pieces(own, size):
                rows_GM = groups.starts[some][:, None] + np.arange(size)
                values_G[some] = metric.of_prompts(self.rewards[rows_GM], None if answers is None else answers[rows_GM])
        return values_G

    def record(self, metric: Metric, values_P: Array, *, paired: bool = False) -> Record:
        """Return the mean over prompts of a metric, or of its paired differences, with its interval."""
        confidence, unit = self.how.confidence, "share" if self.checked else "reward"
        of = confidence.of_differences if paired else confidence.of_shares
        found = (of if self.checked else confidence.of)(values_P)
        return {
            "part": self.name,
            "metric": metric.name,
            "k": metric.k,
            "unit": unit,
            "prompts": len(values_P),
            **found,
        }


def measure(
    rewards: RewardTable | Sequence[ArrayLike] | Array, metrics: Sequence[str], how: Measuring | None = None
) -> list[Record]:
    """Return each of ``metrics``, such as ``pass@8``, of each model, with its interval over prompts.

    A record has the model, the metric, its ``mean`` with ``low`` and ``high``, the number of ``prompts`` and the
    ``fewest`` and ``most`` samples of one. Raises DataError for rewards that are not 0 or 1 without a threshold, for
    fewer samples than a metric needs, and for ``maj@k`` without answers; ConfigError for an unknown metric.
    """
    records = []
    for part in (how or Measuring()).parts(RewardTable.of(rewards)):
        for metric in map(Metric.parse, metrics):
            values_G = part.values(metric)
            for code, model in enumerate(part.table.models.names):
                own = part.groups.models == code
                sizes = {"fewest": int(part.groups.sizes[own].min()), "most": int(part.groups.sizes[own].max())}
                records.append({"model": model, **sizes, **part.record(metric, values_G[own])})
    return records


def paired_differences(
    table: RewardTable, metrics: Sequence[str], how: Measuring | None = None, *, against: str | None = None
) -> list[Record]:
    """Return the paired difference of each two models on the prompts that they share, a record for each metric.

    A record has ``model`` and ``against``, the ``mean`` of the difference with its interval, the number of shared
    ``prompts``, and how many ``alone`` one of the two has. Of more than 8 models, each is compared with the first only,
    or with ``against``. Raises as `measure`, ConfigError for a model that the table has not, and DataError for two
    models that share fewer than two prompts.
    """
    names = list(table.models.names)
    if against is not None and against not in names:
        raise ConfigError(f"no model is named {against!r}; the table has {', '.join(names)}")
    other = against or names[0]
    pairs = [(name, first) for first, name in combinations(names, 2)]
    if against is not None or len(names) > ALL_PAIRS:
        pairs = [(name, other) for name in names if name != other]
    records = []
    for part in (how or Measuring()).parts(table):
        models, groups = part.table.models.names, part.groups
        for metric in map(Metric.parse, metrics):
            values_MP = np.full((len(models), len(part.table.prompts.names)), np.nan)
            values_MP[groups.models, groups.prompts] = part.values(metric)
            of_model = dict(zip(models, values_MP, strict=True))
            for name, other in pairs:
                if name not in of_model or other not in of_model:
                    continue
                apart_P = of_model[name] - of_model[other]
                shared = np.isfinite(apart_P)
                alone = int((np.isfinite(of_model[name]) | np.isfinite(of_model[other])).sum() - shared.sum())
                if shared.sum() < 2:
                    raise DataError(f"{name} and {other} share {shared.sum()} prompts; a difference needs at least 2")
                found = part.record(metric, apart_P[shared], paired=True)
                records.append({"model": name, "against": other, "alone": alone, **found})
    return records


def over_k(table: RewardTable, kind: str = "pass@") -> list[str]:
    """Return the metrics of a ``kind`` for k = 1, 2, 4, … up to the fewest samples of a prompt."""
    return [f"{kind}{2**j}" for j in range(int(table.groups().sizes.min()).bit_length())]


def _pieces(values: NDArray[Any], width: int) -> Iterator[NDArray[Any]]:
    return (values[rows] for rows in chunks(len(values), width))
