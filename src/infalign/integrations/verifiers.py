"""Stored laws for environments of verifiers: K rollouts of its evaluation become reference rewards of its tasks."""

from collections import defaultdict
from pathlib import Path

from infalign.core.errors import DataError
from infalign.integrations.logs.verifiers import read


def reference_rewards(traces: str | Path, *, score: str | None = None) -> dict[str, list[float]]:
    """Return the sorted rewards of each task's rollouts in ``traces``, a traces.jsonl, by ``task.key``.

    `infalign.optimum` takes the values, and its shaping the rewards of one task: a method with ``@reward`` returns
    ``shaping(reward, rewards[self.key])``. ``score`` is one of several rewards or metrics, by default their weighted
    sum. Raises DataError for a rollout that failed, and for a task with fewer than two.
    """
    by_task = defaultdict[str, list[float]](list)
    for sample in read(Path(traces), score, lambda _: None):
        if sample.reward is None:
            raise DataError(f"{traces}: a rollout has no reward ({sample.error}); finish it with `vf-eval --resume`")
        by_task[sample.about["key"]].append(sample.reward)
    if few := [key for key, rewards in by_task.items() if len(rewards) < 2]:
        raise DataError(f"{traces}: {len(few)} tasks have one rollout; evaluate with at least 2, better 32 per task")
    return {key: sorted(rewards) for key, rewards in by_task.items()}
