"""OpenAI's protocol: what a request may ask, what an answer says, and errors. Needs the ``serve`` extra."""

import json
import logging
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError
from starlette.responses import JSONResponse, Response

from infalign.core.errors import DataError, InfalignError, PartialError, RequestError
from infalign.core.settings import Count, shortened
from infalign.serving.answers import Answer, RefusedError
from infalign.serving.web import TooLargeError, read_json

LOGGER = logging.getLogger(__name__)
MAX_TURNS = 2048
MAX_STOP = 1000  # characters of a stop, which every token is compared with
MAX_NAME = 1000  # characters of a model's name with its procedure, and of an error, which may repeat what was sent
IGNORED_FIELDS = {
    *("user", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
    *("tools", "parallel_tool_calls"),  # `parse_body` refuses tools that may be called
}
# Values of further fields that ask for nothing: the policy is served as it was trained.
NEUTRAL_VALUES: dict[str, Any] = {
    "top_p": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "logprobs": False,
    "modalities": ["text"],
    "response_format": {"type": "text"},
    "tool_choice": "none",
}
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]


class _Options(BaseModel):
    include_usage: bool = False


def _join_parts(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    texts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(content):
        raise ValueError("only text parts are supported")
    return "".join(texts)


def _as_tuple(stop: Any) -> Any:
    if stop is None or isinstance(stop, list):
        return tuple(stop or ())
    return (stop,) if isinstance(stop, str) else stop


def _checked_temperature(temperature: float) -> float:
    if temperature not in (0.0, 1.0):
        raise ValueError("the policy was trained and measured at temperature 1; leave temperature out or set it to 1")
    return temperature


class _Turn(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[str, BeforeValidator(lambda role: "system" if role == "developer" else role)]
    content: Annotated[str, BeforeValidator(_join_parts)]


class Body(BaseModel):
    """The fields of a request that are served; others are in ``model_extra``."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: Annotated[str, Field(max_length=MAX_NAME)]
    messages: Annotated[list[_Turn], FailFast(), Field(min_length=1, max_length=MAX_TURNS)]
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    temperature: Annotated[float, AfterValidator(_checked_temperature)] | None = None
    stop: Annotated[tuple[Stop, ...], FailFast(), BeforeValidator(_as_tuple), Field(max_length=4)] = ()
    metadata: dict[str, Any] | None = None  # columns that the reward may need, such as an answer
    stream: bool | None = None
    stream_options: _Options | None = None


class ApiError(Exception):
    """Why a request has no answer, as OpenAI says it."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        message, param = message[:MAX_NAME], param and param[:MAX_NAME]
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """Return the answer that says it."""
        return JSONResponse(self.body, self.status, {"Retry-After": "1"} if self.status == 503 else None)


def parse_body(content: bytes) -> Body:
    """Return what was asked. Raises `ApiError` for what is not served, naming the field."""
    try:
        read_json(content)  # pydantic takes the last value of a key
        body = Body.model_validate_json(content)
    except DataError as error:
        raise ApiError(400, str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        said = first["msg"].replace("unexpected end of hex escape", "half a surrogate pair")
        raise ApiError(400, f"{place or 'the body'}: {said}", param=place or None) from error
    extra = body.model_extra or {}
    if extra.get("tools") and extra.get("tool_choice") != "none":
        raise ApiError(400, 'tools are not supported; leave tools out or set tool_choice to "none"', param="tools")
    for name, value in extra.items():
        neutral = NEUTRAL_VALUES.get(name)
        if value not in (None, neutral) and name not in IGNORED_FIELDS:
            other = "" if neutral is None else f" or set it to {json.dumps(neutral)}"
            said = "is not supported: the policy is served as it was trained and measured; leave it out"
            raise ApiError(400, f"{name} = {shortened(value)} {said}{other}", param=name, code="unsupported_parameter")
    return body


def as_error(error: Exception) -> ApiError:
    """Return what an exception says to the client."""
    match error:
        case ApiError():
            return error
        case TooLargeError():
            return ApiError(413, str(error))
        case RefusedError():
            return ApiError(400, str(error), param="model")
        case RequestError():  # of the engine, or of a reward server
            return ApiError(400, str(error), param="messages")
        case DataError():  # of the reward, which gets the request's columns
            return ApiError(400, str(error), param="metadata")
        case PartialError():
            return ApiError(503, str(error), code="engine_unavailable")
        case InfalignError():
            return ApiError(500, str(error))
    LOGGER.error("a request failed", exc_info=error)
    return ApiError(500, f"unexpected {type(error).__name__}; see the server's log")


def completion(model: str, seed: int | None, prompt_tokens: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the whole answer to a request, with the ``seed`` by which the same request gives it again.

    Its usage has the tokens of the prompt, once, and of all draws, served or not, and how many draws these are.
    """
    drawn, draws = sum(a.tokens for a in answers), sum(len(a.draws) + len(a.base_draws) for a in answers)
    tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": drawn, "total_tokens": prompt_tokens + drawn}
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(place, answer) for place, answer in enumerate(answers)],
        "usage": tokens | {"draws": draws},
    } | ({} if seed is None else {"infalign": {"seed": seed}})


def chunks(whole: dict[str, Any], *, usage: bool) -> Iterator[str]:
    """Yield a whole answer as server-sent events: an answer is chosen before anything of it can be sent."""
    head = {name: value for name, value in whole.items() if name != "usage"} | {"object": "chat.completion.chunk"}
    for choice in whole["choices"]:
        piece = {"delta" if name == "message" else name: value for name, value in choice.items()}
        yield _sent(head | {"choices": [piece]})
    if usage:
        yield _sent(head | {"choices": [], "usage": whole["usage"]})
    yield "data: [DONE]\n\n"


def _choice(place: int, answer: Answer) -> dict[str, Any]:
    about = {"draws": len(answer.draws), "served": answer.served, "rewards": answer.rewards}
    about |= {"base_draws": len(answer.base_draws)}
    said, finish = {"role": "assistant", "content": answer.text}, answer.draws[answer.served].finish
    return {"index": place, "message": said, "logprobs": None, "finish_reason": finish, "infalign": about}


def _sent(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
