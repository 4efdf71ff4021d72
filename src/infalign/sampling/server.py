"""Draw responses from an OpenAI-compatible server. Needs the ``serve`` extra."""

from __future__ import annotations

import math
import re
import shlex
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from infalign.errors import ConfigError, PartialError, first_line
from infalign.http import api_key, checked_url, checked_variable, may_pass, post, quoted
from infalign.models.pretrained import eos_token_id, load_tokenizer
from infalign.sampling.engine import Engine, EngineSettings, Prompt, Response, Sampling, check_not_empty
from infalign.sampling.launch import serving

TOKEN_BYTES = 10_000  # of an answer for each token, at most: its id, text and log-probabilities take some hundred
SECRET_OPTION = re.compile(r"--(api[-_]?key|hf[-_]token|[a-z_-]*(password|secret))\b", re.IGNORECASE)


class ServerEngine:
    """Draw responses from an OpenAI-compatible server such as ``vllm serve MODEL --generation-config vllm``.

    ``url`` is the server's root; ``api_key_env`` names the environment variable with its key. A request waits
    ``read_seconds`` for its answer and is repeated after a broken connection, 408, 429 or 5xx for up to
    ``retry_seconds``. Servers have their own random streams, so
    ``sampling.seed`` is not sent and drawing again gives other responses.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: Any,
        sampling: Sampling,
        *,
        api_key_env: str | None = None,
        read_seconds: float = 600.0,
        retry_seconds: float = 300.0,
    ) -> None:
        import httpx2

        self.url = f"{url.rstrip('/').removesuffix('/v1')}/v1/completions"
        self.model, self.tokenizer, self.sampling, self.retry_seconds = model, tokenizer, sampling, retry_seconds
        self.eos = eos_token_id(tokenizer)
        self.key = api_key(api_key_env)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.client = httpx2.Client(headers=headers, timeout=httpx2.Timeout(read_seconds, connect=10.0))
        weakref.finalize(self, self.client.close)  # with the connections that it keeps open

    def sample(self, prompt_ids: Sequence[int], prompt_id: str, indices: Sequence[int]) -> list[Response]:
        """Return ``len(indices)`` responses.

        Raises `ConfigError` if the server refuses or gives an invalid answer, `PartialError` if it does not answer.
        """
        check_not_empty(prompt_ids, prompt_id)
        responses = self._complete(prompt_ids, len(indices), self.sampling)
        ids = [response.token_ids for response in responses]
        if len(ids) >= 8 and len(set(ids)) == 1 and len(ids[0]) > 4:
            raise ConfigError(
                f"{self.url} gave {len(ids)} equal responses to prompt {prompt_id!r} at temperature "
                f"{self.sampling.temperature}; make it sample, for vLLM with --generation-config vllm"
            )
        return responses

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Raise `ConfigError` if 200 first tokens after a prompt do not look sampled from the whole vocabulary.

        A server that truncates (top-k, top-p) never draws part of its own distribution. The probability of all tokens
        that were not drawn is estimated by the share of draws whose token occurs once (Good–Turing, deviation < 0.1),
        so a difference over 0.3 is not chance. Needs log-probabilities; also raises whatever `sample` raises.
        """
        first = self._complete(prompt_ids, 200, Sampling(max_new_tokens=1))
        counts = Counter(response.token_ids for response in first)
        unseen = 1 - sum(math.exp(response.logprob) for response in {r.token_ids: r for r in first}.values())
        singles = sum(count == 1 for count in counts.values()) / len(first)
        if unseen - singles > 0.3:
            raise ConfigError(
                f"{self.url} truncates its distribution: 200 first tokens were {len(counts)} different ones, and "
                f"{unseen:.0%} of the probability was never drawn; for vLLM, start it with --generation-config vllm"
            )
        self.sample(prompt_ids, "probe", range(8))

    def _complete(self, prompt_ids: Sequence[int], n: int, sampling: Sampling) -> list[Response]:
        """Return ``n`` responses, repeating the request for those that an answer lacks."""
        responses: list[Response] = []
        while len(responses) < n:
            wanted = n - len(responses)
            body = {
                "model": self.model,
                "prompt": list(prompt_ids),
                "n": wanted,
                "max_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": -1,  # disables top-k; SGLang refuses 0
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "logprobs": 1,
                "return_token_ids": True,
            }
            choices = self._post(body, TOKEN_BYTES * wanted * (len(prompt_ids) + sampling.max_new_tokens))
            if not 1 <= len(choices) <= wanted:
                raise ConfigError(f"{self.url} returned {len(choices)} responses where {wanted} were asked for")
            responses += [self._response(choice, prompt_ids, sampling) for choice in choices]
        return responses

    def _post(self, body: dict[str, Any], most_bytes: int) -> list[dict[str, Any]]:
        """Return the choices in the server's answer."""
        import httpx2

        try:
            answer = post(self.client, self.url, body, retry_seconds=self.retry_seconds, most_bytes=most_bytes)
        except httpx2.HTTPError as error:
            if may_pass(error):
                raise PartialError(
                    f"{self.url} did not answer for {self.retry_seconds:.0f} s "
                    f"({quoted(first_line(error), self.key)}); what is drawn is kept, so start the server and run the "
                    "same command again"
                ) from error
            said = error.response.text if isinstance(error, httpx2.HTTPStatusError) else str(error)
            raise ConfigError(f"{self.url} refused the request: {quoted(said, self.key)}") from error
        try:
            choices: list[dict[str, Any]] = answer.json()["choices"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.url} is no OpenAI-compatible server; it answered {quoted(answer.text, self.key)}"
            ) from error
        return choices

    def _response(self, choice: dict[str, Any], prompt_ids: Sequence[int], sampling: Sampling) -> Response:
        ids, finish = choice.get("token_ids"), choice.get("finish_reason")
        if not ids:
            raise ConfigError(
                f"{self.url} returns no token ids, and text does not encode back to them; use a server that knows "
                "return_token_ids, such as vLLM 0.10.2 or later"
            )
        if list(choice.get("prompt_token_ids") or prompt_ids) != list(prompt_ids):
            raise ConfigError(f"{self.url} answered another prompt than it was asked; switch its prompt rewriting off")
        if finish not in ("stop", "length") or (finish == "stop") != (ids[-1] == self.eos):
            raise ConfigError(
                f"{self.url} ended a response with {finish!r} after token {ids[-1]}, but responses end with the "
                f"tokenizer's EOS, {self.eos}; for vLLM, start it with --generation-config vllm"
            )
        # Servers report log-probabilities of the model; these apply to the samples only if nothing modifies them.
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        sampled = logprobs if sampling.temperature == 1 and sampling.top_p == 1 else None
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return Response(tuple(ids), text, finish, math.fsum(sampled) if sampled else math.nan)


def _root(url: str) -> str:
    if {"?", "#"} & set(checked_url(url)):
        raise ValueError("the URL of a server ends with its path; use api_key_env for a key")
    return url


def _starts(command: str) -> str:
    words = shlex.split(command)  # raises ValueError for an unclosed quotation
    if secret := next((word.partition("=")[0] for word in words if SECRET_OPTION.match(word)), None):
        raise ValueError(
            f"a command with {secret} would be written into the run directory; set the variable that the server reads, "
            "such as VLLM_API_KEY, and api_key_env"
        )
    return command


class Settings(EngineSettings):
    """An OpenAI-compatible server, or a command that starts one."""

    parts: ClassVar[int] = 1  # one part: a server batches all prompts itself
    own_models: ClassVar[bool] = False
    rounds_as_training: ClassVar[bool] = False

    kind: Literal["server"]
    url: Annotated[str, AfterValidator(_root)] = Field(
        "http://127.0.0.1:8000", description="an OpenAI-compatible server"
    )
    command: Annotated[str, Field(min_length=1), AfterValidator(_starts)] | None = Field(
        None,
        description="starts the server for a model and is stopped afterwards; {model}, {port} and {seed} are filled in",
    )
    api_key_env: Annotated[str, AfterValidator(checked_variable)] | None = Field(
        None, description="environment variable that holds the server's API key"
    )

    @property
    def asks(self) -> tuple[str, str | None] | None:
        """The server's URL and the variable with its key, unless a command starts the server."""
        return (self.url, self.api_key_env) if self.command is None else None

    @contextmanager
    def opened(self, model: str, sampling: Sampling, device: Callable[[], str], probe: Prompt) -> Iterator[Engine]:
        """Yield the engine on the server, checked on ``probe``; stop the server afterwards if a command started it."""
        tokenizer = load_tokenizer(model)
        with serving(self.command, model, self.url) as url:
            engine = ServerEngine(url, model, tokenizer, sampling, api_key_env=self.api_key_env)
            engine.check(probe.token_ids)
            yield engine
