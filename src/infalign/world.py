"""The small text world of the recipe `preferences`: requests for advice, replies of graded care, and a hidden quality.

No weights and no download: tables of phrases, an author who composes them with more or less care, and a judge
who finds them again in any text. The judge is not the author: long replies come from careful authors, yet
length itself costs, so a reward model trained on `preferences` can be hacked where `gold` cannot.
Every tuple of phrases is listed from the best to the worst and written as the judge reads it: lower case, no marks.
"""

import math
import random
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from infalign.core.errors import ConfigError, DataError


class Dialogue(NamedTuple):
    """A request and one author's reply to it."""

    request: str
    reply: str


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


# fmt: off
_TOPICS = (
    _Topic("grow a garden", "growing a garden", 0.5, 1.3, (
        "water the roots early in the morning", "mix old leaves into the soil", "plant where the sun stays longest",
        "pull the weeds while they are small", "give each plant room to spread", "keep a note of what grows",
        "buy a nice hat for the garden")),
    _Topic("fix a bike", "fixing a bike", 2.0, 0.7, (
        "clean and oil the chain each month", "check both brakes before you ride",
        "pump the tires until they feel hard", "look for glass in the tires", "tighten loose parts with the right tool",
        "turn the bike over to work", "wipe the seat with a wet cloth")),
    _Topic("bake bread", "baking bread", -1.5, 1.9, (
        "weigh the flour on a scale", "let the dough rise until it doubles", "heat the oven until it is very hot",
        "fold the dough with wet hands", "put a pan of water below", "wait an hour before you cut it",
        "shake some seeds on top")),
    _Topic("run a first race", "running a first race", 3.5, 1.0, (
        "run slow enough to talk", "add a little distance each week", "rest one day between two runs",
        "wear shoes that fit your feet", "eat a light meal two hours before", "walk a minute when you get tired",
        "run with a friend on weekends", "pick a shirt in a bright color")),
    _Topic("save money", "saving money", -0.5, 0.6, (
        "write down all that you spend", "set some pay aside on pay day", "pay the most costly debt first",
        "cook at home on week days", "wait two days before you buy", "end the plans you never use",
        "keep your coins in a jar")),
    _Topic("learn guitar", "learning guitar", 1.2, 1.5, (
        "change slowly between two easy chords", "tune the strings each time you play",
        "practice ten minutes every day", "tap your foot to keep the beat", "press each string close to the fret",
        "learn a song that you love", "keep your guitar where you see it")),
    _Topic("keep house plants alive", "keeping house plants alive", -2.2, 1.1, (
        "let the soil dry between two drinks", "use a pot with holes below", "turn the pot toward the light",
        "wipe the dust from the leaves", "move it to a bigger pot in spring", "cut dead leaves near the stem",
        "give your plant a funny name")),
    _Topic("pass a job interview", "passing a job interview", 0.0, 2.2, (
        "bring three short stories of your work", "read about the company the night before",
        "practice your answers out loud", "ask them two smart questions", "arrive ten minutes early",
        "send a short note of thanks", "wear clean clothes in dark colors")),
    _Topic("sleep better", "sleeping better", 4.0, 0.8, (
        "wake at the same hour every day", "turn off screens an hour before bed", "skip all coffee after noon",
        "keep the bedroom cool and dark", "write your worries on paper", "read a calm book in bed")),
    _Topic("train a puppy", "training a puppy", 1.8, 1.2, (
        "give a treat the moment it obeys", "take it outside after each meal", "use the same word each time",
        "keep the lessons under five minutes", "let it meet calm people early", "hide your good shoes from it",
        "teach it to spin for fun")),
    _Topic("paint a room", "painting a room", -1.0, 0.9, (
        "clean the walls before you begin", "cover the edges with tape", "put on two thin coats",
        "paint from the top to the bottom", "try the color on a small spot", "open a window while it dries",
        "wear an old shirt for this")),
    _Topic("move house", "moving house", 2.7, 1.7, (
        "pack one room at a time", "write the room on every box", "give away what you never use",
        "put heavy books in small boxes", "keep one bag for the first night", "take a photo of the wires",
        "buy pizza for your friends")),
)
_CONSTRAINTS = (
    _Constraint(("i have little time", "my days are very busy"), ("this fits into a busy day",
        "a few minutes are enough", "keep it short on busy days")),
    _Constraint(("i have little money", "money is tight right now"), ("all of this is almost free",
        "borrow the things you lack", "you need not spend much")),
    _Constraint(("i am new to this", "i have never tried it"), ("you need no skill to begin",
        "start with the easy parts", "beginners do fine with this")),
    _Constraint(("i have a bad back", "my back often hurts"), ("sit down when your back hurts",
        "be gentle with your back", "stop if it hurts")),
    _Constraint(("it is very cold here", "the winter is long here"), ("dress in warm layers",
        "warm your hands well first", "do not mind the cold")),
    _Constraint(("my home is very small", "i share a small flat"), ("a small corner is enough",
        "you need very little space", "this works in a small home")),
)
_OPENINGS = _ladder(0.83, -0.82, (
    "hello and thank you for asking", "what a lovely thing to try", "i am glad that you asked",
    "that is a great question", "i am happy to help", "good plan", "sure thing", "here is what works", "okay", "well",
    "let me see", "fine", "this again", "if you must know"))
_VAGUE = _ladder(0.24, -0.31, (
    "take it one step at a time", "make a plan that suits you", "be patient and do not rush", "do a bit more each time",
    "think about what you need", "try to do it well", "just be yourself", "it is all about balance"))
_REASONS = _ladder(0.48, 0.05, (
    "because it saves work later", "because small mistakes cost the most", "because good habits beat talent",
    "because it shows you what works", "because slow steps last", "because experts do the same",
    "because it feels good", "because that is how it goes"))
_CHEERS = _ladder(0.36, 0.03, (
    "you are better than you think", "everyone starts somewhere", "you can do this", "each small win counts",
    "it gets easier soon", "mistakes are part of it", "do not give up", "hang in there"))
_CLOSINGS = _ladder(0.41, -0.43, (
    "write back and tell me how it goes", "ask me again at any time", "have fun with it", "i wish you the best of luck",
    "good luck", "enjoy it", "take care", "that should do", "that is all", "bye", "done", "whatever"))
_RUDE = _ladder(-0.62, -1.74, (
    "look it up", "i do not really know", "ask someone else", "figure it out", "do your own work",
    "i have no time for this", "stop asking me things", "not my problem", "who even cares", "that is a silly idea"))
# fmt: on
_BANKS = (_OPENINGS, _VAGUE, _REASONS, _CHEERS, _CLOSINGS, _RUDE)
_LINKS = ("also", "then", "next")  # worth nothing and free to repeat
_TEMPLATES = (
    "How do I {do}?",
    "I want to {do}. Where do I start?",
    "Any tips for {doing}?",
    "What matters most when {doing}?",
    "Can you help me {do}?",
    "I am not good at {doing}. What should I change?",
    "My friend says {doing} is easy. How do I begin?",
    "Next month I will {do}. What should I know?",
    "Please teach me to {do}.",
    "What do people get wrong about {doing}?",
)

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
_LONGEST_PHRASE = max(len(phrase.split()) for phrase in _REPLY_PHRASES | _REQUEST_PHRASES)


def dialogues(n: int, *, seed: int) -> list[Dialogue]:
    """Return ``n`` requests, each with the reply of an author whose care is uniform on [0, 1].

    The same seed gives the same list, and a longer list starts with the shorter one.
    Raises ConfigError when ``n`` is negative.
    """
    rng = _generator("dialogues", n, seed)
    rows = []
    for _ in range(n):
        request, topic, constraint = _request(rng)
        rows.append(Dialogue(request, _reply(topic, constraint, rng.random(), rng)))
    return rows


def preferences(n: int, *, seed: int, temperature: float) -> list[tuple[str, str, str]]:
    """Return ``n`` triples (request, chosen, rejected) of two independent authors' replies, which always differ.

    The label is drawn from Bradley–Terry: the first reply is chosen with probability
    ``sigmoid((gold(first) - gold(second)) / temperature)``.
    Raises ConfigError when ``n`` is negative or the temperature is not positive.
    """
    if not temperature > 0:
        raise ConfigError(f"temperature is {temperature}; Bradley–Terry labels need a positive one")
    rng = _generator("preferences", n, seed)
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


def _generator(purpose: str, n: int, seed: int) -> random.Random:
    if n < 0:
        raise ConfigError(f"cannot make {n} {purpose}; ask for 0 or more")
    return random.Random(f"{purpose} {seed}")  # a string, so that the two functions never share a stream


def _request(rng: random.Random) -> tuple[str, _Topic, _Constraint | None]:
    topic = rng.choice(_TOPICS)
    text = rng.choice(_TEMPLATES).format(do=topic.do, doing=topic.doing)
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
    found: list[str] = []
    unknown_words = start = 0
    while start < len(words):
        lengths = range(min(_LONGEST_PHRASE, len(words) - start), 0, -1)
        read = next((length for length in lengths if " ".join(words[start : start + length]) in phrases), 0)
        if read:
            found.append(" ".join(words[start : start + read]))
        else:
            unknown_words += 1
        start += max(read, 1)
    return found, unknown_words
