"""One answer: a procedure asks for draws, they are drawn and scored, and it says which of them is served."""

import asyncio
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from infalign.core.errors import ConfigError, DataError
from infalign.core.user_code import user_code
from infalign.data.messages import Message, prompt_id
from infalign.method.procedures import BaseQuantile, Draws, Served, Votes, parse_procedure
from infalign.method.procedures.base import read_n
from infalign.method.procedures.majority import MajorityVote, votes
from infalign.models.conversations import prompt_ids
from infalign.sampling.engine import Prompt, Response, Sampling
from infalign.serving.batches import Batches
from infalign.serving.draws import DrawSource

MAX_DRAWS = 1024  # of one answer
ANSWERS_AT_ONCE = 64  # answers
MAX_KNOWN_PROMPTS = 1024  # prompts whose base rewards are kept


class RefusedError(ConfigError):
    """What is asked cannot be served."""


Scores = Batches[tuple[list[Message], str, str], float]
"""Of rows with a conversation, a response, and the columns that a reward may need, as JSON."""
AnyServed = Served | MajorityVote


def parse_served(name: str, *, loads: bool = True) -> AnyServed:
    """Return the procedure that ``name`` spells, ``majority-of-8`` too. Raises ConfigError as `parse_procedure`."""
    number = name.removeprefix("majority-of-")
    return MajorityVote(read_n(number)) if number != name and number.isdecimal() else parse_procedure(name, loads=loads)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked: a conversation, its prompt, how it is served, and the seed and maximum length of its draws."""

    conversation: list[Message]
    prompt: Prompt
    procedure: AnyServed
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Answer:
    """All draws of one answer in their order, the rewards of those that the procedure looked at, and who is served.

    ``base_draws`` are further ones, of the base policy, that showed the procedure a quantile.
    """

    draws: list[Response]
    rewards: list[float]
    served: int
    base_draws: list[Response] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text that is served."""
        return self.draws[self.served].text

    @property
    def tokens(self) -> int:
        """The number of tokens of all draws."""
        return sum(len(response.token_ids) for response in (*self.draws, *self.base_draws))

    @property
    def ranks(self) -> list[int]:
        """The place of each reward among all, 1 for the best; those that tie share the first of their places."""
        return [1 + sum(other > reward for other in self.rewards) for reward in self.rewards]


@dataclass(slots=True)
class _Known:
    """The rewards of the base's draws for one prompt, once they are made; who asks meanwhile waits at the lock."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    rewards: list[float] | None = None


class BaseRewards:
    """The rewards of the base policy's own draws, ``k`` a prompt; the base is loaded when it is first needed."""

    def __init__(self, load: Callable[[], DrawSource], scores: Scores, k: int, sampling: Sampling) -> None:
        self._load, self._scores, self._k, self._sampling = load, scores, k, sampling
        self._source: DrawSource | None = None
        self._loading = threading.Lock()
        self._work: asyncio.Task[None] | None = None
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def quantile(self, asked: Asked, quantile: float) -> tuple[float, list[Response]]:
        """Return the reward at a quantile, and the draws that were made for it now.

        It lies between two of the K rewards: its rank is the quantile on average. Raises RefusedError where K is too
        small for that.
        """
        if not 1 <= quantile * (self._k + 1) <= self._k:
            raise RefusedError(
                f"{self._k} rollouts per prompt are too few for the quantile {quantile:g}; raise rollout.k"
            )
        identity = f"{asked.prompt.prompt_id} {asked.prompt.columns}"
        known = self._known.setdefault(identity, _Known())
        self._known.move_to_end(identity)
        if len(self._known) > MAX_KNOWN_PROMPTS:
            self._known.popitem(last=False)
        drawn: list[Response] = []
        async with known.lock:
            if known.rewards is None:
                drawn = await self._draw(asked)
                known.rewards = await self._scores.done(_rows(asked, drawn))
        return float(np.quantile(known.rewards, quantile, method="weibull")), drawn

    def close(self) -> None:
        """Stop drawing."""
        if self._work is not None:
            self._work.cancel()

    async def _draw(self, asked: Asked) -> list[Response]:
        source = await asyncio.to_thread(self._loaded)
        self._work = self._work or asyncio.create_task(source.work())
        try:
            source.check(asked.prompt, self._sampling)
        except DataError as error:  # its draws have the run's own length, also where those of the policy are shorter
            raise RefusedError(f"the base policy's quantile is unknown: {error}") from error
        return await source.draw(asked.prompt, range(self._k), self._sampling)

    def _loaded(self) -> DrawSource:
        """Return where the base's draws come from, loaded once, also if who asked first has gone meanwhile."""
        with self._loading:
            self._source = self._source or self._load()
            return self._source


@dataclass(frozen=True)
class ServedPolicy:
    """A policy with what serves it; ``procedure`` is the one that is meant where nobody says another.

    ``others`` are the run's policies that are not served. ``answer_in`` finds in a response what a majority votes on.
    """

    name: str
    procedure: AnyServed
    max_new_tokens: int
    tokenizer: Any
    draws: DrawSource
    scores: Scores
    base: BaseRewards
    others: Sequence[str] = ()
    answer_in: Callable[[str], object] = str.strip

    def asked(
        self,
        conversation: list[Message],
        procedure: AnyServed,
        sampling: Sampling,
        *,
        choices: Sequence[int] = (0,),
        columns: str = "{}",
        tools: Any = None,
    ) -> list[Asked]:
        """Return what is asked, with a random stream of its own for each choice; its length can only be shorter.

        ``tools`` are what the chat template shows, as `models.conversations.prompt_ids` takes those of a prompt.
        Raises DataError for a conversation that the policy cannot answer.
        """
        (ids,) = prompt_ids(self.tokenizer, [conversation], [tools])
        prompt = Prompt(prompt_id(conversation), ids, columns)
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, self.max_new_tokens))
        self.draws.check(prompt, sampling)
        names = (f"serve {sampling.seed} {choice}".encode() for choice in choices)
        streams = (int.from_bytes(blake2b(name, digest_size=4).digest(), "little") for name in names)
        return [Asked(conversation, prompt, procedure, replace(sampling, seed=seed)) for seed in streams]

    async def answer(self, asked: Asked, *, score_all: bool = False) -> Answer:
        """Return one answer.

        With ``score_all`` all draws have a reward, also where the procedure looks at none. Raises as
        `DrawSource.draw` and the reward, and RefusedError for a procedure that asks for more than 1024 draws, or that
        would compare shortened draws with whole ones of the base.
        """
        draws: list[Response] = []
        rewards: list[float] = []
        base_draws: list[Response] = []
        serving = asked.procedure.serving(np.random.default_rng(asked.sampling.seed))
        try:
            ask = next(serving)
            while True:
                match ask:
                    case Draws(number):
                        draws += await self._draw(asked, len(draws), number)
                        rewards += await self.scores.done(_rows(asked, draws[len(rewards) :]))
                        ask = serving.send(rewards[-number:])
                    case Votes(number):
                        draws += await self._draw(asked, len(draws), number)
                        ask = serving.send(await asyncio.to_thread(self._votes, draws[-number:]))
                    case BaseQuantile(quantile):
                        if asked.sampling.max_new_tokens < self.max_new_tokens or asked.sampling.stop:
                            raise RefusedError(
                                "the base policy's quantile is unknown except for whole responses of up to "
                                f"{self.max_new_tokens} tokens; leave max_tokens and stop out"
                            )
                        threshold, drawn = await self.base.quantile(asked, quantile)
                        base_draws += drawn
                        ask = serving.send([threshold])
        except StopIteration as ended:
            served: int = ended.value
        if served == len(draws):
            draws += await self._draw(asked, served, 1)
        if score_all:
            rewards += await self.scores.done(_rows(asked, draws[len(rewards) :]))
        return Answer(draws, rewards, served, base_draws)

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Draw and score inside the block, which is entered once."""
        tasks = [asyncio.create_task(work) for work in (self.draws.work(), self.scores.work())]
        try:
            yield
        finally:
            self.base.close()
            for task in tasks:
                task.cancel()

    async def _draw(self, asked: Asked, first: int, number: int) -> list[Response]:
        if first + number > MAX_DRAWS:
            raise RefusedError(f"{asked.procedure.name} needs {first + number:,} samples; the limit is {MAX_DRAWS:,}")
        drawn = await self.draws.draw(asked.prompt, range(first, first + number), asked.sampling)
        return [_ended(response, asked.sampling.stop) for response in drawn]

    def _votes(self, draws: list[Response]) -> list[float]:
        with user_code("the function that extracts the answer raised"):
            return [*votes(self.answer_in(draw.text) for draw in draws).tolist()]


def _rows(asked: Asked, draws: Sequence[Response]) -> list[tuple[list[Message], str, str]]:
    return [(asked.conversation, response.text, asked.prompt.columns) for response in draws]


def _ended(response: Response, stop: Sequence[str]) -> Response:
    """Return a response that ends before the first of the texts ``stop``; it was drawn to its end."""
    text = response.text[: min((place for one in stop if (place := response.text.find(one)) >= 0), default=None)]
    return response if text == response.text else response._replace(text=text, finish="stop")


async def answer_each(
    policy: ServedPolicy,
    questions: Sequence[tuple[list[Message], str]],
    on_answer: Callable[[Asked, Answer], None],
    *,
    seed: int,
    score_all: bool = False,
) -> None:
    """Answer conversations by the policy's own procedure, many at a time, and give the answers in their order.

    With a conversation come the columns of its row, as JSON. One that comes again gets another choice. Raises DataError
    for one that cannot be answered, before anything is drawn.
    """
    choices, sampling = Counter[str](), Sampling(policy.max_new_tokens, seed=seed)
    asked = list[Asked]()
    for conversation, columns in questions:
        identity, tools = prompt_id(conversation), json.loads(columns).get("tools")
        chosen = [choices[identity]]
        asked += policy.asked(conversation, policy.procedure, sampling, choices=chosen, columns=columns, tools=tools)
        choices[identity] += 1
    at_once = asyncio.Semaphore(ANSWERS_AT_ONCE)

    async def answer(one: Asked) -> Answer:
        async with at_once:
            return await policy.answer(one, score_all=score_all)

    async with policy.working():
        tasks = [asyncio.create_task(answer(one)) for one in asked]
        try:
            for one, task in zip(asked, tasks, strict=True):
                on_answer(one, await task)
        finally:
            for task in tasks:
                task.cancel()
