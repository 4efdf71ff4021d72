"""Checkers of answers, as reward functions: ``reward: {function: infalign.rewards.checkers:reasoning_gym}``.

They need the ``rlvr`` extra.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from infalign.data.messages import Message


def reasoning_gym(
    prompts: Sequence[list[Message]], responses: Sequence[str], answer: Sequence[Any], metadata: Sequence[Any]
) -> list[float]:
    """Return the score of each response by its task's own checker: 1 if it is right, less and often .01 if it is not.

    The answer is what stands between the last <answer> and </answer>, or else the whole response. ``metadata`` names
    the task, as it does in rows that `data.sources` makes or that reasoning-gym wrote.
    """
    from reasoning_gym import get_score_answer_fn
    from reasoning_gym.utils import extract_answer

    checkers: Mapping[str, Any] = {
        task: get_score_answer_fn(task) for task in {about["source_dataset"] for about in metadata}
    }
    return [
        checkers[about["source_dataset"]](
            extract_answer(response) or response.strip(),
            {"question": prompt[-1]["content"], "answer": true, "metadata": about},
        )
        for prompt, response, true, about in zip(prompts, responses, answer, metadata, strict=True)
    ]


def math_verify(responses: Sequence[str], answer: Sequence[Any]) -> list[float | None]:
    """Return 1 for each response that is mathematically equal to its ``answer``, else 0; None for no such answer.

    Reading and comparing have five seconds each in the main thread; in others SIGALRM, by which math_verify ends
    them, does not work, and they have no limit.
    """
    from math_verify import parse, verify

    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    rewards: list[float | None] = []
    for response, true in zip(responses, map(str, answer), strict=True):
        known = parse(true, parsing_timeout=seconds) or parse(f"${true}$", parsing_timeout=seconds)
        said = parse(response, parsing_timeout=seconds) if known else None
        rewards.append(float(verify(known, said, timeout_seconds=seconds)) if known else None)
    return rewards
