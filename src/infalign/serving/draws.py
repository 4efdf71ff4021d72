"""Where the draws of a policy come from: a model on this machine, or a server at a URL.

Both draw responses for many requests at once. ``seeded`` says whether a draw depends on its seed, prompt and number
only; ``counts`` has the finished draws, their tokens and the abandoned draws; ``in_progress`` is how many are not done.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from infalign.sampling.engine import Prompt, Response, Sampling, check_prompt
from infalign.sampling.server import ServerEngine
from infalign.sampling.shared_prefix import Row, SharedPrefixBatch


@dataclass(eq=False, slots=True)
class _Draw:
    prompt: Prompt
    index: int
    sampling: Sampling
    answer: asyncio.Future[Response]
    row: Row | None = None  # once it has begun


class LocalDraws:
    """Draws of a model on this machine: those of all requests are drawn together, at most ``rows`` at a time.

    Raises ConfigError for a model that cannot draw for several prompts.
    """

    seeded = True

    def __init__(self, model: Any, tokenizer: Any, *, rows: int) -> None:
        self.counts = Counter(draws=0, draw_tokens=0, abandoned_draws=0)
        self._batch, self._rows = SharedPrefixBatch(model, tokenizer), rows
        self._waiting: deque[_Draw] = deque()
        self._begun: list[_Draw] = []
        self._asked = asyncio.Event()

    @property
    def in_progress(self) -> int:
        """The number of draws that wait or are being drawn."""
        return len(self._waiting) + len(self._begun)

    def check(self, prompt: Prompt, sampling: Sampling) -> None:
        """Raise DataError for a prompt that is too long for the model, or empty."""
        check_prompt(prompt, self._batch.model, sampling)

    async def draw(self, prompt: Prompt, indices: Sequence[int], sampling: Sampling) -> list[Response]:
        """Return draws number ``indices`` of a prompt that was checked; abandon those that nobody waits for."""
        future = asyncio.get_running_loop().create_future
        draws = [_Draw(prompt, index, sampling, future()) for index in indices]
        self._waiting += draws
        self._asked.set()
        try:
            return await asyncio.gather(*(draw.answer for draw in draws))
        except BaseException:
            for draw in draws:  # nobody waits for the others of one that failed
                draw.answer.cancel()
            self._waiting = deque(draw for draw in self._waiting if not self._abandoned(draw))
            raise

    async def work(self) -> None:
        """Draw a token of every row at each step; between steps draws begin, end and are abandoned."""
        while True:
            left = [draw for draw in self._begun if self._abandoned(draw)]
            self._begun = [draw for draw in self._begun if not draw.answer.cancelled()]
            begin = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._rows - len(self._begun)))]
            self._begun += begin
            try:
                self._tell(await asyncio.to_thread(self._step, begin, left))
            except Exception as error:  # of the model, or of memory: what is being drawn is lost
                self._batch.leave(self._batch.rows)
                for draw in self._begun:
                    if not draw.answer.done():
                        draw.answer.set_exception(error)
                self._begun = []
            if not self.in_progress:
                self._asked.clear()
                await self._asked.wait()

    def _step(self, begin: Sequence[_Draw], left: Sequence[_Draw]) -> set[Row]:
        """Return the rows that end with the next token."""
        self._batch.leave([draw.row for draw in left if draw.row is not None])
        if begin:
            rows = self._batch.join((draw.prompt, draw.index, draw.sampling) for draw in begin)
            for draw, row in zip(begin, rows, strict=True):
                draw.row = row
        return set(self._batch.step()) if self._batch.rows else set()

    def _tell(self, ended: set[Row]) -> None:
        """Give those who wait the draws that have ended."""
        for draw in self._begun:
            if draw.row is not None and draw.row in ended and not draw.answer.cancelled():
                (response,) = self._batch.responses([draw.row])
                draw.answer.set_result(response)
                self.counts.update(draws=1, draw_tokens=len(draw.row.token_ids))
        self._begun = [draw for draw in self._begun if draw.row not in ended or draw.answer.cancelled()]

    def _abandoned(self, draw: _Draw) -> bool:
        gone = draw.answer.cancelled()
        self.counts["abandoned_draws"] += gone
        return gone


class RemoteDraws:
    """Draws of an engine that batches them itself, such as a vLLM server, asked by ``at_once`` requests at a time.

    ``engine`` returns the engine for a seed and a length. The request of draws that are abandoned is ended.
    """

    seeded = False

    def __init__(self, engine: Callable[[Sampling], ServerEngine], *, at_once: int) -> None:
        self.counts = Counter(draws=0, draw_tokens=0, abandoned_draws=0)
        self.in_progress = 0
        self._engine = engine
        self._turns = asyncio.Semaphore(at_once)

    def check(self, prompt: Prompt, sampling: Sampling) -> None:
        """Raise DataError for an empty prompt."""
        prompt.check_not_empty()

    async def draw(self, prompt: Prompt, indices: Sequence[int], sampling: Sampling) -> list[Response]:
        """Return draws number ``indices`` of a prompt. Raises as the engine."""
        self.in_progress += len(indices)
        try:
            async with self._turns:
                drawn = await self._engine(sampling).drawn((prompt, indices))
        except asyncio.CancelledError:
            self.counts["abandoned_draws"] += len(indices)
            raise
        finally:
            self.in_progress -= len(indices)
        self.counts.update(draws=len(drawn), draw_tokens=sum(len(response.token_ids) for response in drawn))
        return drawn

    async def work(self) -> None:
        """Return: the engine does the work."""


DrawSource = LocalDraws | RemoteDraws
