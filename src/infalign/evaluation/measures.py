"""pass@k, majority votes and the best of k in tables of rewards, and their paired differences between models."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infalign.core.errors import ConfigError, DataError
from infalign.evaluation.extrapolation import Counts
from infalign.evaluation.intervals import Confidence, Estimate, of_clusters
from infalign.evaluation.pass_at_k import Metric
from infalign.evaluation.reward_tables import Labels, Rewards, RewardTable
from infalign.evaluation.samples import chunks
from infalign.method.calibration import Array
from infalign.method.procedures.majority import MajorityVote, votes

Record = dict[str, Any]
ALL_PAIRS = 8  # models; of more, each is compared with the first


def pass_at_k(rewards: Rewards, k: int, *, threshold: float | None = None, confidence: float = 0.95) -> Estimate:
    """Return pass@k, the probability that one of k responses is right, with its interval over prompts.

    ``rewards`` holds the rewards of each prompt's responses, which may be of different number: 0 or 1, or graded, with
    the ``threshold`` from which on a response is right; or a table with one model. Unbiased: the mean over all sets of
    k of a prompt's n responses, 1 − C(n − c, k)/C(n, k) where c are right. Raises as `measure`,
    and DataError for a prompt with fewer than k responses.

    >>> pass_at_k([[0, 0, 1, 1], [0, 1, 0]], 2).mean  # 1 − C(2, 2)/C(4, 2) = 5/6 and 1 − C(2, 2)/C(3, 2) = 2/3
    0.75
    """
    record, *others = measure(rewards, [f"pass@{k}"], Measuring(threshold, confidence=Confidence(confidence)))
    if others:
        raise DataError(f"the rewards are of {1 + len(others)} models; give those of one, or use measure")
    if record["claim"] != "unbiased":
        raise DataError(f"pass@{k} needs {k} responses per prompt, one has {record['fewest']}; measure gives bounds")
    return Estimate(record["mean"], record["low"], record["high"])


@dataclass(frozen=True, slots=True)
class Measuring:
    """How a table is measured: the ``threshold`` from which on a response is right, a column ``by`` whose values are
    measured apart, a column ``cluster`` whose values are variants of one problem, for intervals, and the intervals.

    >>> measure([[0.2, 0.9], [0.1, 0.3]], ["pass@2"], Measuring(threshold=0.5))[0]["mean"]
    0.5
    """

    threshold: float | None = None
    by: str | None = None
    cluster: str | None = None
    confidence: Confidence = field(default_factory=Confidence)

    def parts(self, table: RewardTable) -> "Iterator[Part]":
        """Yield the rows of each value of ``by``, or all rows."""
        labels = None if self.by is None else _complete(table, self.by)
        checked = self.threshold is not None or bool(np.isin(table.numbers["reward"], (0.0, 1.0)).all())
        for name in [""] if labels is None else sorted(labels.names):
            rows = table if labels is None else table.take(labels.codes == labels.names.index(name))
            yield Part(name, rows, self, checked=checked)


def _complete(table: RewardTable, name: str) -> Labels:
    """Return a column in which every row has a value. Raises DataError for one that has none."""
    labels = table.column(name)
    if lacking := int((labels.codes < 0).sum()):
        raise DataError(
            f"column {name} is empty in {lacking:,} of {labels.codes.size:,} rows; fill it, or remove those"
        )
    return labels


class Part:
    """Rows that are measured together: the rewards by prompt, as right or wrong where a threshold says so."""

    def __init__(self, name: str, table: RewardTable, how: Measuring, *, checked: bool) -> None:
        self.name, self.table, self.how, self.groups = name, table, how, table.groups()
        self.checked = checked  # of all parts alike: a table has one unit
        if how.threshold is not None and not np.isfinite(how.threshold):
            raise ConfigError(f"the threshold must be finite, found {how.threshold}")
        rewards = table.numbers["reward"][self.groups.order].astype(float, copy=False)
        self.rewards = rewards if how.threshold is None else (rewards >= how.threshold).astype(float)

    @cached_property
    def clusters(self) -> NDArray[np.int32] | None:
        """The cluster of each prompt of each model. Raises DataError for a prompt with several."""
        column = self.how.cluster
        if column is None:
            return None
        codes = _complete(self.table, column).codes[self.groups.order]
        if (differ := self._differ(codes)).any():
            prompt = self.table.prompts.names[self.groups.prompts[differ.argmax()]]
            raise DataError(f"column {column} has several values for prompt {prompt!r}; a cluster has prompts")
        return codes[self.groups.starts]

    def right(self) -> Array:
        """Return how many responses are right, (G,). Raises DataError for rewards that are not 0 or 1."""
        if not self.checked:
            raise DataError(
                f"{self.table.source}: the rewards are not all 0 or 1; give the threshold at which a response counts "
                "as right, or measure best-of-K, worst-of-K or avg@K"
            )
        return np.asarray(np.add.reduceat(self.rewards, self.groups.starts))

    def values(self, metric: Metric) -> Array:
        """Return the metric of each prompt of each model, (G,). Raises as `measure`."""
        votes_count, groups = isinstance(metric.procedure, MajorityVote), self.groups
        right_G = self.right() if self.checked or metric.name.startswith(("pass", "maj")) else None
        answers = None
        if votes_count:  # answers are compared as numbers if all are, else as text
            labels = self.table.column("answer")
            codes = labels.codes[groups.order]
            answers = np.array([*votes(labels.names), np.nan])[codes]
            if not self._differ(codes).any() and self._differ(self.rewards).any():
                raise DataError(
                    "column answer has one value for each prompt, and their rewards differ: it is the right answer, "
                    "not the responses'; choose: --columns answer=NAME"
                )
        values_G = np.empty(groups.sizes.size)
        for size in np.unique(groups.sizes):
            own = np.flatnonzero(groups.sizes == size)
            if right_G is not None and not votes_count:  # prompts with as many right have one value
                right, which = np.unique(right_G[own], return_inverse=True)
                values = [metric.of_prompts(np.arange(size) >= size - c[:, None]) for c in _pieces(right, size)]
                values_G[own] = np.concatenate(values)[which]
                continue
            for some in _pieces(own, size):
                rows_GM = groups.starts[some][:, None] + np.arange(size)
                values_G[some] = metric.of_prompts(self.rewards[rows_GM], None if answers is None else answers[rows_GM])
        return values_G

    def _differ(self, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Return for which prompts of each model the values of their responses differ, (G,)."""
        starts = self.groups.starts
        return np.asarray(np.maximum.reduceat(values, starts) != np.minimum.reduceat(values, starts))

    def about(self, metric: Metric, prompts: int) -> Record:
        """Return what a record of a metric says besides its values."""
        unit = "share" if self.checked else "reward"
        return {"part": self.name, "metric": metric.name, "k": metric.k, "unit": unit, "prompts": prompts}

    def interval(self, values_P: Array, own: NDArray[Any], *, paired: bool = False) -> Record:
        """Return the mean of the values of the groups ``own``, or of their paired differences, with its interval."""
        confidence = self.how.confidence
        of_shares = confidence.of_differences if paired else confidence.of_shares
        values = of_clusters(values_P, None if self.clusters is None else self.clusters[own])
        if values.size < 2:
            where = f"{self.how.by} {self.name}" if self.name else self.table.source
            what = f"values of {self.how.cluster}" if self.how.cluster else "prompts"
            raise DataError(f"{where}: an interval needs at least 2 {what}, found 1")
        return (of_shares if self.checked else confidence.of)(values)

    def counts(self, own: NDArray[Any]) -> Counts:
        """Return how many responses of the groups ``own`` are right."""
        clusters = None if self.clusters is None else self.clusters[own]
        return Counts(self.right()[own], self.groups.sizes[own], clusters, seed=self.how.confidence.seed)


def measure(rewards: Rewards, metrics: Sequence[str], how: Measuring | None = None) -> list[Record]:
    """Return each of ``metrics``, such as ``pass@8``, of each model, with its interval over prompts.

    A record has the model, the metric, its ``mean`` with ``low`` and ``high``, the number of ``prompts`` and the
    ``fewest`` and ``most`` samples of one. pass@k beyond the fewest samples n is no measurement, as its ``claim`` says:
    that of a ``model`` up to 2n, and ``bounds`` without a mean above (`Counts.pass_at`). Raises DataError for rewards
    that are not 0 or 1 without a threshold, for fewer samples than another metric needs, and for ``maj@k`` without
    answers; ConfigError for an unknown metric.

    >>> found = measure([[0, 0, 1, 1], [0, 1, 0, 0]], ["pass@2", "pass^2"])
    >>> [(one["metric"], round(one["mean"], 3), one["prompts"]) for one in found]
    [('pass@2', 0.667, 2), ('pass^2', 0.083, 2)]
    """
    records = []
    for part in (how or Measuring()).parts(RewardTable.of(rewards)):
        for metric in map(Metric.parse, metrics):
            within = metric.k <= part.groups.sizes.min() or not metric.name.startswith("pass@")
            values_G = part.values(metric) if within else None
            for code, model in enumerate(part.table.models.names):
                own = np.flatnonzero(part.groups.models == code)
                sizes = {"fewest": int(part.groups.sizes[own].min()), "most": int(part.groups.sizes[own].max())}
                if values_G is None:
                    mean = part.counts(own).pass_at(metric.k, confidence=part.how.confidence.level)
                else:
                    mean = {"claim": "unbiased"} | part.interval(values_G[own], own)
                records.append({"model": model, **sizes, **part.about(metric, own.size), **mean})
    return records


def training_worth(rewards: Rewards, k: int, kls: Sequence[float], how: Measuring | None = None) -> list[Record]:
    """Return pass@k today and what training for it could be worth at each KL, for each model (`worth`).

    A record has the ``kl`` in nats, and with their intervals ``today``, ``ordinary`` RLHF, ``law``, that of Best-of-k,
    its ``gain`` over today and its ``difference`` to ordinary RLHF. Raises as `worth` and `measure`.

    >>> rng = np.random.default_rng(0)
    >>> rewards = rng.random((300, 32)) < rng.beta(0.4, 1.6, (300, 1))
    >>> (found,) = training_worth(rewards, 8, [0.1])
    >>> [round(found[what]["mean"], 2) for what in ("today", "ordinary", "law")]
    [0.54, 0.69, 0.76]
    """
    from infalign.evaluation.worth import worth

    records = []
    for part in (how or Measuring()).parts(RewardTable.of(rewards)):
        for code, model in enumerate(part.table.models.names):
            own = np.flatnonzero(part.groups.models == code)
            worths = worth(part.counts(own), f"best-of-{k}", kls, confidence=part.how.confidence.level)
            about = {"part": part.name, "model": model, "metric": f"pass@{k}", "k": k, "prompts": own.size}
            records += [{**about, **asdict(one)} for one in worths]
    return records


def paired_differences(
    rewards: Rewards, metrics: Sequence[str], how: Measuring | None = None, *, against: str | None = None
) -> list[Record]:
    """Return the paired difference of each two models on the prompts that they share, a record for each metric.

    A record has ``model`` and ``against``, the ``mean`` of the difference with its interval, the number of shared
    ``prompts``, and how many ``alone`` one of the two has. Of more than 8 models, each is compared with the first only,
    or with ``against``. Raises as `measure`, ConfigError for a model that the table has not, and DataError for two
    models that share fewer than two prompts.

    >>> found = paired_differences({"before": [[0, 1], [0, 0]], "after": [[1, 1], [0, 1]]}, ["pass@1"])
    >>> [(one["model"], one["against"], one["mean"]) for one in found]
    [('after', 'before', 0.5)]
    """
    table = RewardTable.of(rewards)
    names = list(table.models.names)
    if against is not None and against not in names:
        raise ConfigError(f"no model is named {against!r}; the table has {', '.join(names)}")
    if against is not None and len(names) == 1:
        raise ConfigError(f"{against!r} is the only model of the table; give another to compare it with")
    other = against or names[0]
    pairs = [(name, first) for first, name in combinations(names, 2)]
    if against is not None or len(names) > ALL_PAIRS:
        pairs = [(name, other) for name in names if name != other]
    records = []
    for part in (how or Measuring()).parts(table):
        models, groups = list(part.table.models.names), part.groups
        place_MP = np.full((len(models), len(part.table.prompts.names)), -1)
        place_MP[groups.models, groups.prompts] = np.arange(groups.sizes.size)
        for metric in map(Metric.parse, metrics):
            values_G = part.values(metric)
            for name, other in pairs:
                if name not in models or other not in models:
                    continue
                ours, theirs = place_MP[models.index(name)], place_MP[models.index(other)]
                both = (ours >= 0) & (theirs >= 0)
                if both.sum() < 2:
                    shared = f"{name} and {other} share {both.sum()} prompts"
                    raise DataError(f"{shared}; a difference needs at least 2: measure them apart, or choose others")
                difference = part.interval(values_G[ours[both]] - values_G[theirs[both]], ours[both], paired=True)
                alone = int(((ours >= 0) | (theirs >= 0)).sum() - both.sum())
                about = {"model": name, "against": other, "alone": alone, **part.about(metric, int(both.sum()))}
                records.append(about | difference)
    return records


def measure_all(
    table: RewardTable, metrics: Sequence[str], how: Measuring, against: str | None = None
) -> dict[str, list[Record]]:
    """Return what `measure` finds and, for several models and where there is a measurement, `paired_differences`."""
    records = measure(table, metrics, how)
    measured = [m for m in metrics if all(r["claim"] == "unbiased" for r in records if r["metric"] == m)]
    several = len(table.models.names) > 1 or against is not None
    apart = paired_differences(table, measured, how, against=against) if several else []
    return {"metrics": records, "differences": apart}


def over_k(table: RewardTable, kind: str = "pass@", how: Measuring | None = None) -> list[str]:
    """Return the metrics of a ``kind`` for k = 1, 2, 4, … up to the fewest samples of a prompt, in any part."""
    fewest = min(part.groups.sizes.min() for part in (how or Measuring()).parts(table))
    return [f"{kind}{2**j}" for j in range(int(fewest).bit_length())]


def _pieces(values: NDArray[Any], width: int) -> Iterator[NDArray[Any]]:
    return (values[rows] for rows in chunks(len(values), width))
