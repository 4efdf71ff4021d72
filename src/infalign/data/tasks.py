"""Questions of reasoning-gym, which are made and not read. Needs the ``rlvr`` extra."""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from infalign.core.errors import ConfigError
from infalign.core.spelling import did_you_mean
from infalign.data.messages import reply


def task_rows(
    task: str, *, size: int, seed: int, config: Mapping[str, Any], examples: int = 0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, row) of ``size`` questions of a task, with the columns prompt, answer and metadata.

    The last two are what `infalign.rewards.checkers.reasoning_gym` needs. With ``examples``, as many other questions
    and their answers are the turns before each one, other ones for each row. No question comes twice. Raises
    ConfigError for a task or a ``config`` that reasoning-gym does not have, and for a task whose checker cannot read
    what is stored of a question.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError("reasoning_gym needs its package; pip install 'infalign[rlvr]'") from error

    if task not in DATASETS:
        raise ConfigError(f"reasoning-gym has no task {task}{did_you_mean(task, DATASETS, after='; ')}")
    try:
        made = reasoning_gym.create_dataset(task, size=size * (1 + examples), seed=seed, **config)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"reasoning-gym cannot make {task} with config {dict(config)}: {error}") from error
    asked = set[str]()
    for number, (entry, *shown) in enumerate(zip(*[iter(made)] * (1 + examples), strict=True)):
        if number == 0:
            kept = json.loads(json.dumps(entry, default=str))
            if made.score_answer(entry["answer"], kept) != made.score_answer(entry["answer"], entry):
                raise ConfigError(f"the checker of {task} needs data that JSON cannot store; use another task")
        prompt = entry["question"]
        if prompt in asked:
            continue
        asked.add(prompt)
        if examples:
            answered = [({"role": "user", "content": one["question"]}, reply(one["answer"])) for one in shown]
            prompt = [*chain.from_iterable(answered), {"role": "user", "content": prompt}]
        row = {"prompt": prompt, "answer": entry["answer"], "metadata": entry["metadata"]}
        yield f"{task} {number} of reasoning-gym, seed {seed}", row
