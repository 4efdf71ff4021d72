"""Draw responses from an OpenAI-compatible server. Needs the ``serve`` extra."""

import math
import re
import shlex
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, Field

from infalign.core.errors import ConfigError
from infalign.core.http import RETRY_SECONDS, Post, Server, api_key, checked_url, checked_variable, quote_answer
from infalign.core.settings import Count
from infalign.models.pretrained import config_of, generation_of
from infalign.models.settings import Compute
from infalign.models.tokenizers import load_tokenizer
from infalign.sampling.engine import AskedDraws, EngineSettings, Prompt, Response, Sampling, Vocabulary, stream_key
from infalign.sampling.launch import serving

IN_FLIGHT = 32  # requests to a server, of one prompt each, so a server that batches has K times as many responses
SEEDS = 2**53  # below it every JSON reader keeps an integer as it is
MIN_LOG_PROBABILITY = math.log(1e-9)  # of equal responses, below which the server does not sample
TOKEN_BYTES = 10_000  # of an answer for each token, at most: its id, text and log-probabilities take some hundred
SECRET_WORD = re.compile(  # an option, a variable that is set, a header
    r"(?<![\w-])(--(api[-_]?key|hf[-_]token|[a-z_-]*(password|secret))\b|\w*(key|token|secret|password)(?==)"
    r"|((proxy-)?authorization|x-api-key)(?=:))",
    re.IGNORECASE,
)

Tokens = list[Annotated[int, Field(ge=0, lt=2**31)]]


class _Logprobs(BaseModel, strict=True):
    token_logprobs: list[float] | None = None


class _Choice(BaseModel, strict=True):
    """A response as servers give it; other fields are not read."""

    finish_reason: str | None = None
    token_ids: Tokens | None = None
    prompt_token_ids: Tokens | None = None
    logprobs: _Logprobs | None = None


class _Completion(BaseModel):
    choices: list[_Choice]


@dataclass(eq=False)
class ServerEngine:
    """Draw responses from an OpenAI-compatible server such as ``vllm serve MODEL --generation-config vllm``.

    ``url`` is the server's root; ``api_key_env`` names the environment variable with its key. ``in_flight`` requests
    are under way at once. A request waits ``read_seconds`` for its answer and is repeated after a broken connection,
    408, 429 or 5xx for up to ``retry_seconds``, unless ``watch``, called after each failure, raises. If ``seeded``,
    each has its own seed, made of ``sampling.seed``, the prompt's id and its first index; not every server heeds it.
    """

    url: str
    model: str
    vocabulary: Vocabulary
    sampling: Sampling
    api_key_env: str | None = None
    in_flight: int = IN_FLIGHT
    read_seconds: float = 600.0
    retry_seconds: float = RETRY_SECONDS
    seeded: bool = True
    watch: Callable[[], None] = lambda: None
    server: Server = field(init=False)

    def __post_init__(self) -> None:
        url = f"{self.url.rstrip('/').removesuffix('/v1')}/v1/completions"
        key = api_key(self.api_key_env)
        self.server = Server(url, self.in_flight, self.read_seconds, self.retry_seconds, key, self.watch)

    def sample(self, prompt_ids: Sequence[int], prompt_id: str, indices: Sequence[int]) -> list[Response]:
        """Return ``len(indices)`` responses.

        Raises `ConfigError` if the server refuses or gives an invalid answer, `PartialError` if it does not answer.
        """
        ((_, responses),) = self.sample_each([(Prompt(prompt_id, prompt_ids), indices)])
        return responses

    def sample_each(self, asked: Iterable[AskedDraws]) -> Generator[tuple[AskedDraws, list[Response]]]:
        """Yield each of ``asked`` with its responses, as they come; raises as `sample`, after those under way."""
        return self.server.answers(self._complete, asked)

    async def drawn(self, asked: AskedDraws) -> list[Response]:
        """Return the responses to one prompt, asked for in the caller's event loop; raises as `sample`.

        If the caller's task is cancelled, the connection is closed, by which a server knows to stop.
        """
        async with self.server.posting() as post:
            return await self._complete(post, asked)

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Draw eight responses to a prompt. Raises `ConfigError` if they lack log-probabilities, and as `sample`."""
        if any(math.isnan(response.logprob) for response in self.sample(prompt_ids, "probe", range(8))):
            raise ConfigError(
                f"{self.url} returns no log-probabilities, so its sampling cannot be verified; use a server that "
                "returns them, such as vLLM"
            )

    async def _complete(self, post: Post, asked: AskedDraws) -> list[Response]:
        """Return the rollouts of a prompt, repeating the request for those that an answer lacks."""
        (prompt, indices), sampling = asked, self.sampling
        prompt.check_not_empty()
        responses: list[Response] = []
        while missing := indices[len(responses) :]:
            body: dict[str, object] = {
                "model": self.model,
                "prompt": list(prompt.token_ids),
                "n": 1 if sampling.greedy else len(missing),  # all greedy ones are equal, and vLLM refuses several
                "max_tokens": sampling.max_new_tokens,
                "temperature": 0.0 if sampling.greedy else 1.0,
                "top_p": 1.0,
                "top_k": -1,  # disables top-k; SGLang refuses 0
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "ignore_eos": True,  # and with it the further ends of a model's generation_config.json
                "stop_token_ids": self.vocabulary.ends,
                "logprobs": 1,
                "return_token_ids": True,
            }
            if self.seeded:
                body["seed"] = stream_key(sampling, prompt.prompt_id, missing[0]) % SEEDS
            max_bytes = TOKEN_BYTES * len(missing) * (len(prompt.token_ids) + sampling.max_new_tokens)
            answer = await post(body, max_bytes=max_bytes)
            url = str(answer.url)
            try:
                choices = _Completion.model_validate(answer.json()).choices
            except (ValueError, RecursionError) as error:
                said = quote_answer(answer.text, self.server.key)
                raise ConfigError(f"{url} is not an OpenAI-compatible server; it answered {said}") from error
            if not 1 <= len(choices) <= len(missing):
                raise ConfigError(f"{url} returned {len(choices)} responses instead of {len(missing)}")
            for choice in choices:
                if problem := self._problem(choice, prompt.token_ids):
                    raise ConfigError(f"{url} {problem}")
            responses += list(map(self._response, choices)) * (len(missing) if sampling.greedy else 1)
        ids = [response.token_ids for response in responses]
        equal = len(ids) >= 8 and len(set(ids)) == 1 and len(ids[0]) > 4
        sure = (len(ids) - 1) * responses[0].logprob > MIN_LOG_PROBABILITY  # False for NaN
        if equal and not sure and not sampling.greedy:
            raise ConfigError(
                f"{url} returned {len(ids)} identical responses to prompt {prompt.prompt_id!r} at temperature 1; "
                "make it sample, for vLLM with --generation-config vllm"
            )
        return responses

    def _problem(self, choice: _Choice, prompt_ids: Sequence[int]) -> str | None:
        """Return what is wrong with a response to a prompt."""
        longest = self.sampling.max_new_tokens
        ids, finish, logprobs = choice.token_ids, choice.finish_reason, choice.logprobs
        if not ids:
            return (
                "returns no token ids, and its text does not encode back to them; use a server that supports "
                "return_token_ids, such as vLLM 0.10.2 or later"
            )
        if unknown := set(self.vocabulary.absent).intersection(ids):
            return f"sampled the token id {min(unknown)}, unknown to the tokenizer; the vocabulary is padded"
        if (choice.prompt_token_ids or list(prompt_ids)) != list(prompt_ids):
            return "answered a different prompt; disable its prompt rewriting"
        if finish not in ("stop", "length") or (finish == "stop") != (ids[-1] in self.vocabulary.ends):
            return (
                f"ended a response with {finish!r} after token {ids[-1]}, but responses end with the model's EOS, "
                f"{', '.join(map(str, self.vocabulary.ends))}; for vLLM, start it with --generation-config vllm"
            )
        if len(ids) > longest or (finish == "length" and len(ids) < longest):
            return (
                f"cut a response off after {len(ids)} instead of {longest} tokens; raise its limit, for vLLM with a "
                "larger --max-model-len"
            )
        if logprobs and logprobs.token_logprobs is not None and len(logprobs.token_logprobs) != len(ids):
            return f"returns {len(logprobs.token_logprobs)} log-probabilities for {len(ids)} tokens"
        return None

    def _response(self, choice: _Choice) -> Response:
        ids, logprobs = choice.token_ids or [], choice.logprobs and choice.logprobs.token_logprobs
        (response,) = self.vocabulary.responses([ids], [math.fsum(logprobs) if logprobs else math.nan])
        return response


def _checked_root(url: str) -> str:
    if {"?", "#"} & set(checked_url(url)):
        raise ValueError("a server URL must end with its path, without a query; use api_key_env for a key")
    return url


def _checked_command(command: str) -> str:
    words = shlex.split(command)  # raises ValueError for an unclosed quotation
    if secret := next(filter(None, map(SECRET_WORD.search, words)), None):
        raise ValueError(
            f"the command must not contain {secret[0]}: it would be written into the run directory; set the "
            "variable that the server reads, such as VLLM_API_KEY, and api_key_env"
        )
    return command


class Settings(EngineSettings):
    """An OpenAI-compatible server, or a command that starts one."""

    is_local: ClassVar[bool] = False

    kind: Literal["server"]
    url: Annotated[str, AfterValidator(_checked_root)] = Field(
        "http://127.0.0.1:8000", description="an OpenAI-compatible server"
    )
    command: Annotated[str, Field(min_length=1), AfterValidator(_checked_command)] | None = Field(
        None,
        description=(
            "starts a server per model, stopped afterwards; {model}, {port}, {dtype} (compute.dtype) and {seed} "
            "are filled in"
        ),
    )
    api_key_env: Annotated[str, AfterValidator(checked_variable)] | None = Field(
        None, description="environment variable that holds the server's API key"
    )
    seed: Literal["request", "none"] = Field(
        "request", description="whether each request has a seed; vLLM on a CPU needs `none`"
    )
    in_flight: Count = Field(IN_FLIGHT, description="concurrent requests, each for one prompt")

    @property
    def server(self) -> tuple[str | None, str | None]:
        """The server's URL and the variable with its key, unless a command starts the server."""
        return (self.url, self.api_key_env) if self.command is None else (None, None)

    def has(self, *, reference: bool, guided: bool) -> bool:
        """Return whether a server has the model: no guides, and where it is there already, the reference alone."""
        return not guided and (reference or self.command is not None)

    @contextmanager
    def open(self, model: str, sampling: Sampling, compute: Compute, probe: Prompt) -> Iterator[ServerEngine]:
        """Yield the engine on the server, checked on ``probe``; stop the server afterwards if a command started it."""
        tokenizer = load_tokenizer(model, template="plain")  # prompts are token ids, so none is rendered
        words = Vocabulary(tokenizer, generation_of(model), config_of(model).get_text_config(decoder=True).vocab_size)
        seeded = self.seed == "request"
        engine = ServerEngine(self.url, model, words, sampling, self.api_key_env, self.in_flight, seeded=seeded)
        with nullcontext() if self.command is None else serving(self.command, model, compute.dtype) as started:
            if started is not None:
                engine = replace(engine, url=started.url, watch=started.check)
            engine.check(probe.token_ids)
            yield engine
