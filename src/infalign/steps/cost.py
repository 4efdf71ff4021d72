"""What units of work cost: time, tokens and memory, from the speeds of a probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean
from typing import Any

from infalign.data.examples import Example
from infalign.models.gguf import gguf_file
from infalign.models.pretrained import conversation_ids, load_tokenizer
from infalign.models.settings import Scratch
from infalign.pipeline.units import Unit
from infalign.steps.data import split
from infalign.steps.passes import Speeds, Texts, UnknownSizeError
from infalign.steps.run import Run

TAUGHT, SAMPLE = 2000, 256  # examples that a tokenizer is trained on here, and those whose lengths are measured
FITTED = 2000  # prompts of a split of which it is seen whether they fit
LETTERS = 4  # of a token, where no tokenizer is here


@dataclass(frozen=True, slots=True)
class Cost:
    """What a unit costs if the whole of it is to be done, but for what is ``unknown`` here."""

    seconds: float = 0.0
    tokens: float = 0.0
    memory: float = 0.0
    unknown: str = ""


def cost(unit: Unit, texts: Texts, speeds: Speeds) -> Cost:
    """Return the cost of a unit."""
    found = Cost()
    try:
        for one in unit.passes(texts):
            found = replace(found, tokens=found.tokens + one.tokens)
            try:
                taken = one.at(speeds)
            except UnknownSizeError as error:
                found = replace(found, unknown=str(error))
            else:
                seconds, memory = found.seconds + taken.seconds, max(found.memory, taken.memory)
                found = replace(found, seconds=seconds, memory=memory)
    except UnknownSizeError as error:  # not even how many passes there are
        found = replace(found, unknown=str(error))
    return found


def makespan(seconds: Mapping[str, float], needed: Mapping[str, Iterable[str]], at_once: int) -> float:
    """Return when the last unit ends, with ``at_once`` at a time, each as soon as those it needs are done.

    >>> makespan({"a": 2.0, "b": 1.0, "c": 3.0}, {"c": ["b"]}, 2)
    4.0
    """
    waiting, done, running, now = dict(seconds), set[str](), list[tuple[float, str]](), 0.0
    while waiting or running:
        ready = [name for name in waiting if not {n for n in needed.get(name, ()) if n in seconds} - done]
        for name in ready[: at_once - len(running)]:
            heappush(running, (now + waiting.pop(name), name))
        now, name = heappop(running)
        done.add(name)
    return now


def stand_in(run: Run, examples: Sequence[Example]) -> tuple[Any, bool]:
    """Return the policy's tokenizer, or else one of the data, and whether it counts tokens as the policy's does."""
    from infalign.models.scratch import train_tokenizer

    policy = run.recipe.policy
    if policy.model is not None and Path(policy.model).is_dir():
        return load_tokenizer(policy.model, template=policy.chat_template), True
    if policy.model is not None and policy.model in run.ggufs:
        file = gguf_file(run.ggufs[policy.model])
        return load_tokenizer(file.parent, template=policy.chat_template, gguf_file=file.name), True
    some = examples[:: max(1, len(examples) // TAUGHT)]
    texts = (text for e in some for text in (*(turn["content"] for turn in e.prompt), e.chosen, e.rejected or ""))
    return train_tokenizer(texts, policy.scratch or Scratch()), policy.scratch is not None


def texts_of(run: Run, train: list[Example], test: list[Example], whole: bool, tokenizer: Any, exact: bool) -> Texts:
    """Return how much text a run has, before it is prepared: the rows of its splits, lengths of a sample.

    ``whole`` says whether no other rows are on the hub. Without examples here, texts are as long as the recipe allows.
    """
    data, longest = run.recipe.data, run.recipe.rollout.max_new_tokens
    if not train:
        return Texts({}, data.max_prompt_tokens, longest, longest)

    def tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1 if exact else 1 + len(text) // LETTERS

    def asked(example: Example) -> int:
        if exact:
            return len(conversation_ids(tokenizer, list(example.prompt), add_generation_prompt=True))
        return sum(tokens(turn["content"]) for turn in example.prompt)

    sample = tuple(
        (asked(example), tokens(example.chosen), max(tokens(example.chosen), tokens(example.rejected or "")))
        for example in train[:: max(1, len(train) // SAMPLE)]
    )
    prompts, responses, _ = zip(*sample, strict=True)
    short = [length for length in prompts if length <= data.max_prompt_tokens] or [data.max_prompt_tokens]
    rows = _rows(run, train, test, lambda example: asked(example) <= data.max_prompt_tokens) if whole else {}
    drawn = fmean(min(length, longest) for length in responses)
    return Texts(rows, fmean(short), fmean(responses), drawn, sample)


def _rows(run: Run, train: list[Example], test: list[Example], fits: Callable[[Example], bool]) -> Mapping[str, int]:
    """Return the rows of the tables that the stage data will write, and how many prompts will be too long."""
    recipe = run.recipe
    found = split(recipe.data, train, test, judge_learns=recipe.judge_learns, seed=recipe.seed)
    rows = {name: len(table) for name, table in found.tables.items()}
    for name, asking in found.asking.items():
        distinct = list({example.prompt_id: example for example in asking}.values())
        some = distinct[:: max(1, len(distinct) // FITTED)]
        rows[f"{name}_prompts"] = round(len(distinct) * fmean(map(fits, some))) if some else 0
        rows[f"{name}_prompts_too_long"] = len(distinct) - rows[f"{name}_prompts"]
    return rows
