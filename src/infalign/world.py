"""The small text world of the recipe `preferences`: requests for advice, replies of graded care, and a hidden quality.

No weights and no download: tables of phrases (world.json), an author who composes them with more or less care, and a
judge who finds them again in any text. The judge is not the author: long replies come from careful authors, yet length
itself costs, so a reward model trained on `preferences` can be hacked where `gold` cannot.
Every list of phrases goes from the best to the worst and is written as the judge reads it: lower case, no marks.
"""

import json
import math
import random
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from infalign.core.errors import DataError


class _Topic(NamedTuple):
    do: str
    doing: str
    offset: float  # gold of a reply of quality 0
    spread: float  # gold per unit of quality: raw rewards of two topics do not compare
    tips: tuple[str, ...]


class _Constraint(NamedTuple):
    stated: tuple[str, ...]  # how a request states it
    heeded: tuple[str, ...]  # how a reply acknowledges it


def _ladder(best: float, worst: float, phrases: Sequence[str]) -> dict[str, float]:
    """Return the worth of each phrase, falling from ``best`` to ``worst`` in equal steps."""
    step = (worst - best) / (len(phrases) - 1)
    return {phrase: best + step * rank for rank, phrase in enumerate(phrases)}


_WORDS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_TOPICS = tuple(_Topic(**{**topic, "tips": tuple(topic["tips"])}) for topic in _WORDS["topics"])
_CONSTRAINTS = tuple(_Constraint(tuple(one["stated"]), tuple(one["heeded"])) for one in _WORDS["constraints"])
_BANKS = tuple(_ladder(**bank) for bank in _WORDS["banks"].values())
_OPENINGS, _VAGUE, _REASONS, _CHEERS, _CLOSINGS, _RUDE = _BANKS
_LINKS = ("also", "then", "next")  # worth nothing and free to repeat

_FADE = 0.61  # each further phrase of one kind counts by this factor less
_NO_TIP = 0.83
_OFF_TOPIC = 0.71
_IGNORED = 0.64
_NOT_ASKED = 0.37  # heeding a constraint that the request does not state
_REPEATED = 0.59
_UNKNOWN_WORD = 0.11
_LONG_FROM, _LONG_WORD = 20, 0.09
_MOST_WORDS = 30  # of an author's reply

_TIPS = {tip: worth for topic in _TOPICS for tip, worth in _ladder(1.23, 0.67, topic.tips).items()}
_HEEDS = {phrase: worth for c in _CONSTRAINTS for phrase, worth in _ladder(0.93, 0.58, c.heeded).items()}
_REPLY_PHRASES = frozenset().union(_TIPS, _HEEDS, _LINKS, *_BANKS)
_TOPIC_OF = {phrase: topic for topic in _TOPICS for phrase in (topic.do, topic.doing)}
_CONSTRAINT_OF = {phrase: constraint for constraint in _CONSTRAINTS for phrase in constraint.stated}
_REQUEST_PHRASES = frozenset(_TOPIC_OF) | frozenset(_CONSTRAINT_OF)


def dialogues(n: int, *, seed: int) -> list[tuple[str, str]]:
    """Return ``n`` pairs (request, reply) of authors whose care is uniform on [0, 1].

    The same seed gives the same list, and a longer list starts with the shorter one.
    """
    rng = random.Random(f"dialogues {seed}")  # a string, so that the two functions never share a stream
    rows = []
    for _ in range(n):
        request, topic, constraint = _request(rng)
        rows.append((request, _reply(topic, constraint, rng.random(), rng)))
    return rows


def preferences(n: int, *, seed: int, temperature: float) -> list[tuple[str, str, str]]:
    """Return ``n`` triples (request, chosen, rejected) of two independent authors' replies, which always differ.

    The label is drawn from Bradley–Terry: the first reply is chosen with probability
    ``sigmoid((gold(first) - gold(second)) / temperature)``.
    """
    rng = random.Random(f"preferences {seed}")
    triples = []
    for _ in range(n):
        request, topic, constraint = _request(rng)
        first = second = _reply(topic, constraint, rng.random(), rng)
        while second == first:
            second = _reply(topic, constraint, rng.random(), rng)
        logit = (_gold(request, first) - _gold(request, second)) / temperature
        first_wins = rng.random() < (1 + math.tanh(logit / 2)) / 2  # the sigmoid, which cannot overflow
        triples.append((request, first, second) if first_wins else (request, second, first))
    return triples


def gold(prompts: list[list[dict[str, str]]], responses: list[str]) -> list[float]:
    """Return the hidden quality of each response to the last user turn of its prompt; finite for any text.

    On-topic tips, a heeded constraint and kind phrases add worth, each further one of a kind less than the one before.
    Off-topic tips, rude phrases, an ignored constraint, repeats, unknown words and words beyond 20 cost.
    The sum is scaled and shifted by topic; for a request of no known topic the tips count neither for nor against.
    Raises DataError when the numbers of prompts and responses differ or a prompt has no user turn.
    """
    if len(prompts) != len(responses):
        raise DataError(f"{len(prompts)} prompts but {len(responses)} responses; give one response for each prompt")
    requests = [_last_user_turn(place, prompt) for place, prompt in enumerate(prompts)]
    return [_gold(request, response) for request, response in zip(requests, responses, strict=True)]


def _request(rng: random.Random) -> tuple[str, _Topic, _Constraint | None]:
    topic = rng.choice(_TOPICS)
    text = rng.choice(_WORDS["templates"]).format(do=topic.do, doing=topic.doing)
    if rng.random() < 0.4:
        return text, topic, None
    constraint = rng.choice(_CONSTRAINTS)
    stated = _sentence(rng.choice(constraint.stated))
    return (f"{stated} {text}" if rng.random() < 0.5 else f"{text} {stated}"), topic, constraint


def _reply(topic: _Topic, constraint: _Constraint | None, care: float, rng: random.Random) -> str:
    """Return a reply of at most 30 words; ``care`` in [0, 1] moves all of its parts together."""
    while True:
        reply = " ".join(_sentences(topic, constraint, lambda: _near(care, rng), rng))
        if len(reply.split()) <= _MOST_WORDS:
            return reply


def _near(care: float, rng: random.Random) -> float:
    """Return ``care`` moved by up to 0.6 either way and reflected into [0, 1], which keeps a uniform care uniform."""
    return 1 - abs(1 - abs(care + rng.uniform(-0.6, 0.6)))


def _sentences(
    topic: _Topic, constraint: _Constraint | None, level: Callable[[], float], rng: random.Random
) -> Iterable[str]:
    """Yield the sentences of one reply; every decision asks for its own noisy ``level`` of care."""
    yield _sentence(_pick(_OPENINGS, level()))
    if constraint and level() > 0.4:
        yield _sentence(_pick(constraint.heeded, level()))
    elif level() < 0.05:
        yield _sentence(rng.choice(rng.choice(_CONSTRAINTS).heeded))
    used: set[str] = set()
    for place in range(1 + (level() > 0.55)):
        part = _advice(topic, used, level, rng)
        used.add(part)
        if part not in _TIPS:
            yield _sentence(part)
            continue
        link = f"{rng.choice(_LINKS)} " if place and rng.random() < 0.5 else ""
        reason = f" {_pick(_REASONS, level())}" if level() > 0.85 else ""
        yield _sentence(link + part + reason)
    if level() > 0.8:
        yield _sentence(_pick(_CHEERS, level()), "!")
    if level() > 0.55:
        yield _sentence(_pick(_CLOSINGS, level()))


def _advice(topic: _Topic, used: Collection[str], level: Callable[[], float], rng: random.Random) -> str:
    """Return a rude or vague phrase, a tip on another topic, or a tip on this one, as the level rises."""
    here = level()
    if here < 0.1:
        return _pick(_RUDE, level())
    if here < 0.2:
        return _pick(_VAGUE, level())
    if here < 0.3:
        return rng.choice(rng.choice([other for other in _TOPICS if other is not topic]).tips)
    careless = level() < 0.1  # may repeat itself
    return _pick([tip for tip in topic.tips if careless or tip not in used], level())


def _pick(phrases: Collection[str], level: float) -> str:
    """Return the phrase at a level in [0, 1] of phrases listed from the best to the worst."""
    return tuple(phrases)[min(int((1 - level) * len(phrases)), len(phrases) - 1)]


def _sentence(phrase: str, mark: str = ".") -> str:
    return phrase[0].upper() + phrase[1:] + mark


def _last_user_turn(place: int, prompt: list[dict[str, str]]) -> str:
    for turn in reversed(prompt):
        if turn["role"] == "user":
            return turn["content"]
    raise DataError(f"prompt {place} has no user turn; gold scores a reply to the last one")


def _gold(request: str, reply: str) -> float:
    asked, _ = _find(_words(request), _REQUEST_PHRASES)
    topic = next((_TOPIC_OF[phrase] for phrase in asked if phrase in _TOPIC_OF), None)
    constraint = next((_CONSTRAINT_OF[phrase] for phrase in asked if phrase in _CONSTRAINT_OF), None)

    words = _words(reply)
    found, unknown_words = _find(words, _REPLY_PHRASES)
    phrases = [phrase for phrase in found if phrase not in _LINKS]
    distinct = dict.fromkeys(phrases)  # not a set, whose order changes from run to run

    quality = sum(_fading(bank[phrase] for phrase in distinct if phrase in bank) for bank in _BANKS)
    quality -= _REPEATED * (len(phrases) - len(distinct))
    quality -= _UNKNOWN_WORD * unknown_words
    quality -= _LONG_WORD * max(0, len(words) - _LONG_FROM)

    heeds = [phrase for phrase in distinct if phrase in _HEEDS]
    heeded = [_HEEDS[phrase] for phrase in heeds if constraint and phrase in constraint.heeded]
    quality += -_IGNORED if constraint and not heeded else _fading(heeded)
    quality -= _NOT_ASKED * (len(heeds) - len(heeded))

    if topic is None:
        return quality
    tips = [phrase for phrase in distinct if phrase in _TIPS]
    on_topic = [_TIPS[tip] for tip in tips if tip in topic.tips]
    quality += _fading(on_topic) if on_topic else -_NO_TIP
    quality -= _OFF_TOPIC * (len(tips) - len(on_topic))
    return topic.offset + topic.spread * quality


def _fading(worths: Iterable[float]) -> float:
    """Return the sum of the worths, strongest first, each weighted 0.61 times the one before."""
    return sum(worth * _FADE**place for place, worth in enumerate(sorted(worths, key=abs, reverse=True)))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _find(words: Sequence[str], phrases: Collection[str]) -> tuple[list[str], int]:
    """Return the phrases read from left to right, the longest first at each word, and the number of other words."""
    read = _longest_first(frozenset(phrases)).findall(" ".join(words))
    found = [one for one in read if one in phrases]
    return found, len(read) - len(found)


@cache
def _longest_first(phrases: frozenset[str]) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(sorted(phrases, key=len, reverse=True))}|\w+)\b")
