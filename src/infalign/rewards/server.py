"""Rewards from a model behind an HTTP server. Needs the ``serve`` extra."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infalign.data.examples import Message, prompt_id
from infalign.errors import ConfigError, DataError, PartialError
from infalign.http import api_key, may_pass, post, quoted
from infalign.rewards.base import checked_rewards

if TYPE_CHECKING:
    import httpx2
    from transformers import PreTrainedTokenizerBase


CONNECT_SECONDS = 10.0
ROW_BYTES = 1_000_000  # of an answer for each row, at most; one of a server that repeats the text takes some thousand


@dataclass(frozen=True, slots=True)
class RemoteReward:
    """A reward model behind HTTP, with OpenRLHF's request and response format; the guide shows an example of each.

    ``query`` is the prompt as ``tokenizer`` renders it for generation, followed by the response; ``prompts`` has
    only the rendered prompt, and ``labels`` the prompt's id. Only ``rewards`` is read from the answer. A request holds
    ``batch`` rows and waits ``read_seconds`` for an answer; it is repeated after a broken connection, no answer, 408,
    429 and 5xx for up to ``retry_seconds``. ``api_key_env`` names the environment variable with the server's key.
    """

    url: str
    tokenizer: PreTrainedTokenizerBase
    api_key_env: str | None = None
    batch: int = 64
    read_seconds: float = 120.0
    retry_seconds: float = 300.0

    def __post_init__(self) -> None:
        api_key(self.api_key_env)  # raises before anything is asked

    @property
    def _key(self) -> str | None:
        return api_key(self.api_key_env)

    def __call__(self, prompts: list[list[Message]], responses: list[str]) -> list[float]:
        """Return the reward of each row, as the server gave it.

        Raises ConfigError if the server refuses a request, PartialError if it does not answer, and DataError naming the
        batch and row for an answer that does not hold one finite number for each row.
        """
        import httpx2

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        timeout = httpx2.Timeout(self.read_seconds, connect=CONNECT_SECONDS)
        rewards: list[float] = []
        with httpx2.Client(headers=headers, timeout=timeout) as client:
            for start in range(0, len(responses), self.batch):
                rows = slice(start, min(start + self.batch, len(responses)))
                rewards += self._ask(client, prompts[rows], responses[rows], start)
        return rewards

    def _ask(
        self, client: httpx2.Client, prompts: list[list[Message]], responses: list[str], first: int
    ) -> list[float]:
        """Return the rewards of one batch, which starts at row ``first``."""
        import httpx2

        name = f"{self.url} (batch {first // self.batch + 1})"
        rendered = [
            str(self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
            for prompt in prompts
        ]
        body = {
            "query": [prompt + response for prompt, response in zip(rendered, responses, strict=True)],
            "prompts": rendered,
            "labels": [prompt_id(prompt) for prompt in prompts],
        }
        try:
            most_bytes = ROW_BYTES * (1 + len(responses))
            answer = post(client, self.url, body, retry_seconds=self.retry_seconds, most_bytes=most_bytes)
        except httpx2.HTTPError as error:
            if isinstance(error, httpx2.HTTPStatusError):
                said = f"status {error.response.status_code}: {self._shown(error.response.text)}"
            else:
                said = f"{type(error).__name__}: {self._shown(str(error))}"
            if not may_pass(error):
                raise ConfigError(f"reward {name}: the server refused the request with {said}") from error
            raise PartialError(
                f"reward {name}: no rewards within {self.retry_seconds:.0f} s for rows {first} to "
                f"{first + len(responses) - 1} (first prompt {body['labels'][0]}), the last answer was {said}; the "
                "scores so far are kept, so start the server and run the same command again"
            ) from error
        try:
            rewards = json.loads(answer.content)["rewards"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(
                f"reward {name}: the answer is no JSON object with `rewards`, it begins {self._shown(answer.text)!r}"
            ) from error
        return checked_rewards(rewards, prompts, first=first, name=name)

    def _shown(self, text: str) -> str:
        return quoted(text, self._key)
