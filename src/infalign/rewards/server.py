"""Rewards from a model behind an HTTP server, by OpenRLHF's protocol or vLLM's. Needs the ``serve`` extra."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from infalign.core.errors import DataError
from infalign.core.http import RETRY_SECONDS, Post, Server, api_key, quote_answer
from infalign.data.lines import reject_duplicate_keys
from infalign.data.messages import Message, prompt_id, reply
from infalign.rewards.base import Batch, checked_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Request = tuple[int, int, list[list[Message]], list[str]]  # rows: number of their batch, first of them, what they hold
ROW_BYTES = 1_000_000  # of an answer for each row, at most; one of a server that repeats the text takes some thousand


@dataclass(frozen=True, slots=True)
class RewardProtocol:
    """The body of a request for the rewards of some rows, and what its answer says of them.

    ``rewards`` returns what should be one reward per row; it raises LookupError, TypeError or ValueError otherwise.
    """

    rows: int  # of a request
    in_flight: int  # requests at once to each server, by default
    answers: str  # what an answer is, for messages
    body: Callable[[list[list[Message]], list[str]], dict[str, Any]]
    rewards: Callable[[Any], object]


def is_vllm(url: str) -> bool:
    """Return whether a server speaks vLLM's protocol, by its path; others speak OpenRLHF's."""
    return urlsplit(url).path.rstrip("/").endswith(("/classify", "/pooling"))


def vllm_protocol() -> RewardProtocol:
    """Return the protocol of vLLM, whose requests are a conversation each, rendered by its model's chat template.

    So the text is the one that the model was trained on. ``use_activation`` is off: a sigmoid would round large rewards
    to 1. The output is ``probs`` of a classifier at /classify; at /pooling ``data``, or its last if each token has one.
    """

    def body(prompts: list[list[Message]], responses: list[str]) -> dict[str, Any]:
        return {"messages": [*prompts[0], reply(responses[0])], "use_activation": False}

    def rewards(answer: Any) -> object:
        (output,) = answer["data"]
        if "probs" in output:
            return output["probs"]
        values = output["data"]
        return values[-1] if isinstance(values[-1], list) else values

    answers = "JSON object with one `data`, whose output is `probs` or `data`"
    return RewardProtocol(1, 64, answers, body, rewards)


def openrlhf_protocol(tokenizer: PreTrainedTokenizerBase, rows: int) -> RewardProtocol:
    """Return OpenRLHF's protocol with this many rows per request.

    ``query`` is the prompt as ``tokenizer`` renders it for generation, followed by the response; ``prompts`` has only
    the rendered prompt, and ``labels`` the prompt's id. Only ``rewards`` is read from the answer.
    """

    def body(prompts: list[list[Message]], responses: list[str]) -> dict[str, Any]:
        named: list[tuple[str, str]] = []
        for prompt, same in groupby(prompts):  # rows that follow each other are rendered once
            text = str(tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
            named += [(text, prompt_id(prompt))] * len(list(same))
        rendered, labels = zip(*named, strict=True)
        return {"query": list(map(str.__add__, rendered, responses)), "prompts": rendered, "labels": labels}

    return RewardProtocol(rows, 16, "JSON object with `rewards`", body, lambda answer: answer["rewards"])


@dataclass(frozen=True, slots=True)
class RemoteReward:
    """A reward model behind HTTP, with the protocol that its URL tells (`is_vllm`).

    A request holds ``batch`` rows, one with vLLM's protocol, and ``in_flight`` of them are under way at once, by
    default the protocol's number. A request waits ``read_seconds`` for an answer; it is repeated after a broken
    connection, no answer, 408, 429 and 5xx for up to ``retry_seconds``. ``api_key_env`` names the environment
    variable with the server's key.
    """

    url: str
    tokenizer: PreTrainedTokenizerBase
    api_key_env: str | None = None
    batch: int = 64
    in_flight: int | None = None
    read_seconds: float = 120.0
    retry_seconds: float = RETRY_SECONDS

    def __post_init__(self) -> None:
        api_key(self.api_key_env)  # raises before anything is asked

    def __call__(self, prompts: list[list[Message]], responses: list[str]) -> list[float]:
        """Return the reward of each row, as the server gave it.

        Raises ConfigError if the server refuses a request, PartialError if it does not answer, and DataError naming the
        batch and row for an answer that does not hold one finite number for each row.
        """
        if not responses:
            return []
        ((_, rewards),) = self.score_each([Batch(prompts, responses)])
        return rewards

    def score_each(self, batches: Iterable[Batch]) -> Generator[tuple[int, list[float]]]:
        """Yield the number of each batch and its rewards, as they come; raises as a call, after those under way."""
        protocol = vllm_protocol() if is_vllm(self.url) else openrlhf_protocol(self.tokenizer, self.batch)
        in_flight = self.in_flight or protocol.in_flight
        server = Server(self.url, in_flight, self.read_seconds, self.retry_seconds, api_key(self.api_key_env))
        by_batch: dict[int, dict[int, list[float]]] = {}  # of the batches under way, by the first row of a request

        def requests() -> Iterator[_Request]:
            for number, (prompts, responses, _) in enumerate(batches):
                by_batch[number] = {first: [] for first in range(0, len(responses), protocol.rows)}
                for first in by_batch[number]:
                    rows = slice(first, first + protocol.rows)
                    yield number, first, list(prompts[rows]), list(responses[rows])

        async def ask(post: Post, request: _Request) -> list[float]:
            _, first, prompts, responses = request
            answer = await post(protocol.body(prompts, responses), max_bytes=ROW_BYTES * (1 + len(responses)))
            name = f"{answer.url} (batch {first // protocol.rows + 1})"
            try:
                rewards = protocol.rewards(json.loads(answer.content, object_pairs_hook=reject_duplicate_keys))
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                said = quote_answer(answer.text, server.key)
                raise DataError(f"reward {name}: no {protocol.answers} but {said!r}") from error
            return checked_rewards(rewards, prompts, first=first, name=name)

        with closing(server.answers(ask, requests())) as answered:
            for (number, first, *_), given in answered:
                parts = by_batch[number]
                parts[first] = given
                if all(parts.values()):
                    del by_batch[number]
                    yield number, [reward for part in parts.values() for reward in part]
