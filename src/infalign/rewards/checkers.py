"""Checkers of answers, as reward functions: ``reward: {function: infalign.rewards.checkers:reasoning_gym}``.

They need the ``rlvr`` extra.
"""

import logging
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from infalign.data.messages import Message
from infalign.rewards.limited import SECONDS, limited

MARKED = re.compile(r"\\boxed|\$.*\$|(?<!\\)\\[([]", re.DOTALL)  # mathematics in a text
LAYOUT = re.compile(r"\\(begin|end)\{\w+\*?\}|\\text\{\s*(and|or)\s*\}|\\[a-zA-Z]+")
WORD = r"(?<![A-Za-z])(?!(?:and|or|sqrt)\b)[A-Za-z]{3,}"
ONE_NUMBER = re.compile(r"[A-Za-z\s$€£¥.,:;=()]*-?(\d+(,\d{3})*)?\.?\d+[A-Za-z\s%.,:;=()]*(/[a-z]+)?")
NAMES = r"(?<![A-Za-z])(pi|a?(sin|cos|tan)|arc\w+|log|ln|exp|inf|infinity)(?![A-Za-z])"  # which LaTeX needs \\ for
UNIT = re.compile(r"(?<=[\d})])(\s+([A-Za-z]{3,}|of|an|in|ft|[ckm]m|[km]g|[ck]?m/s|km/h)(\^\{?\d\}?)?)+$")
UNREAD = re.compile(rf"{NAMES}|(?<![_^\d])\d+(\s|\\[,;: ])+\d|\d[eE][+-]?\d|{WORD}.*\d")


@limited(SECONDS, "reasoning_gym")
def reasoning_gym(
    prompts: Sequence[list[Message]], responses: Sequence[str], answer: Sequence[Any], metadata: Sequence[Any]
) -> list[float]:
    """Return the score of each response by its task's own checker: 1 if it is right, less and often .01 if it is not.

    The answer is what stands between the last <answer> and </answer>, or else the whole response. ``metadata`` names
    the task, as it does in rows that `data.sources` makes or that reasoning-gym wrote.
    """
    from reasoning_gym.utils import extract_answer

    return [
        _checker(about["source_dataset"])(
            extract_answer(response) or response.strip(),
            {"question": prompt[-1]["content"], "answer": true, "metadata": about},
        )
        for prompt, response, true, about in zip(prompts, responses, answer, metadata, strict=True)
    ]


@cache
def _checker(task: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn

    checker: Callable[..., float] = get_score_answer_fn(task)
    return checker


@limited(SECONDS, "math_verify")
def math_verify(responses: Sequence[str], answer: Sequence[Any]) -> list[float | None]:
    """Return 1 for each response that is mathematically equal to its ``answer``, else 0; None for no such answer.

    An answer is read whole as LaTeX, unless it is a number among words or a text with marked mathematics, a solution.
    """
    from math_verify import parse, verify

    for name in ("parser", "grader"):
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)  # which warns that it has no time limit
    rewards: list[float | None] = []
    for response, true in zip(responses, answer, strict=True):
        known = [] if true is None else _read(str(true).rpartition("####")[2].strip().rstrip(".,;"))
        said = parse(response, parsing_timeout=None) if known else None
        rewards.append(float(verify(known, said, timeout_seconds=None)) if known else None)
    return rewards


def _read(answer: str) -> list[Any]:
    """Return what math_verify reads of an answer, any of which is right; nothing if it would drop a part of it."""
    from math_verify import LatexExtractionConfig, parse

    plain = LAYOUT.sub("~", answer)
    words = re.search(rf"{WORD}|\d\s+[a-z]{{2}}", plain)
    is_number = ONE_NUMBER.fullmatch(answer) and (words or not re.search("[A-Za-z]", answer))
    is_number = is_number and not re.search(NAMES, answer)
    is_text = MARKED.search(answer) or (words and "\n" in answer)
    readings = [*parse(answer, parsing_timeout=None)] if is_text or is_number else []
    if is_text or (UNREAD.search(plain) and not readings):
        return readings
    whole = " ".join(answer.split())
    for latex in dict.fromkeys([whole, UNIT.sub("", whole)]):
        how = [LatexExtractionConfig()]
        readings += parse(f"${latex}$", how, fallback_mode="no_fallback", parsing_timeout=None)
    return readings
