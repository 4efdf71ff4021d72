"""The base of all settings: an unknown key is an error, values do not change, and text becomes a value on reading."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Union

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError, PydanticKnownError

from infalign.core.errors import ConfigError
from infalign.core.spelling import did_you_mean, nearest, spelling

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
MAX_DRAWS = 10_000  # of one prompt; what compares them grows with their square
DrawCount = Annotated[int, Field(ge=2, le=MAX_DRAWS)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=100)]  # also of files and folders
NOT_IN_TEXT = re.compile("[\0\ud800-\udfff]")  # what neither a file's name nor UTF-8 can have


class Settings(BaseModel):
    """Base of all settings: an unknown key is an error and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _knows_its_keys(cls, given: Any) -> Any:
        """Raise an error of type ``no_settings`` or, for each unknown key, ``unknown_key``, with what is known."""
        if not isinstance(given, (Mapping, cls)):
            raise PydanticCustomError("no_settings", "takes settings: {known}", {"known": ", ".join(cls.model_fields)})
        unknown = [key for key in given if key not in cls.model_fields] if isinstance(given, Mapping) else []
        if unknown:
            raise errors_at({str(key): ("unknown_key", _hint(str(key), cls.model_fields)) for key in unknown})
        return given

    @field_validator("*", mode="before")
    @classmethod
    def _means_itself(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"cannot be true or false, found {value}")
        if isinstance(value, int) and value.bit_length() > 63:
            raise ValueError("must be a whole number of at most 64 bits")
        if isinstance(value, str) and NOT_IN_TEXT.search(value):
            raise ValueError(f"text with NUL or half a surrogate pair cannot be stored; found {shortened(value)}")
        return value


def errors_at(found: Mapping[str, tuple[str, str]]) -> ValidationError:
    """Return pydantic's error for several keys of a section, from the type and the message of each."""
    lines = [
        InitErrorDetails(type=PydanticCustomError(kind, message), loc=(key,), input=None)
        for key, (kind, message) in found.items()
    ]
    return ValidationError.from_exception_data("settings", lines)


def _hint(key: str, known: Collection[str]) -> str:
    near = nearest(key, known)
    return f"did you mean `{near}`?" if near else f"known keys: {', '.join(known)}"


def spelled(parse: Callable[[str], object]) -> tuple[PlainValidator, PlainSerializer]:
    """Return how a setting is read from its spelling by ``parse``, and written; its errors come with the key."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            if hasattr(value, "name"):
                return value
            raise PydanticKnownError("string_type")
        try:
            return parse(value)
        except ConfigError as error:
            raise ValueError(str(error)) from error

    return PlainValidator(read, json_schema_input_type=str), PlainSerializer(spelling, return_type=str)


def one_of(kinds: Mapping[str, type[Settings]], *, key: str, default: str, what: str) -> Any:
    """Return the type of settings of one of ``kinds``, selected by ``key``, which may be left out for ``default``.

    A key of other kinds is refused with their names; ``what`` is what messages call a kind.
    """

    def read(value: Any, _: Any) -> Any:
        given = value if isinstance(value, Mapping) else {}
        name = given.get(key, default)
        if not isinstance(name, str) or name not in kinds:
            *others, last = map(repr, kinds)
            asked = did_you_mean(str(name), kinds, after="; ")
            message = f"Input should be {', '.join(others)} or {last}, found {shortened(name)}{asked}"
            raise errors_at({key: ("no_kind", message)})
        for other in given:
            takes = [kind for kind, settings in kinds.items() if other in settings.model_fields]
            if takes and name not in takes:
                raise ValueError(f"{other} is for the {what} {' or '.join(takes)}, found {name}")
        if isinstance(value, tuple(kinds.values())):
            return value
        return kinds[name].model_validate({key: default, **value} if isinstance(value, Mapping) else value)

    union = Union[tuple(kinds.values())]  # type: ignore[valid-type] # noqa: UP007
    return Annotated[union, WrapValidator(read)]


def shortened(value: object) -> str:
    """Return a value as a message shows it, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Raise a ConfigError that begins with ``what`` for settings that the block cannot read."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError(f"{what}: " + "; ".join(explain(e) for e in error.errors())) from error
    except ValueError as error:
        raise ConfigError(f"{what}: {error}") from error


def explain(error: ErrorDetails) -> str:
    """Say in one clause what is wrong with one key."""
    location = ".".join(str(part) for part in error["loc"] if part != "[key]")
    match error["type"]:
        case "unknown_key":
            return f"unknown key `{location}`; {error['msg']}"
        case "missing":
            return f"`{location}` is missing"
        case "no_settings":
            return f"`{location}` {error['msg']}{_found(error)}"
        case "string_pattern_mismatch":
            return f"`{location}`: a name can contain letters, digits, - and _ only"
        case "value_error":
            message = error["msg"].removeprefix("Value error, ")
            return f"`{location}`: {message}" if location else message
        case _:
            return f"`{location}`: {error['msg']}{_found(error)}"


def _found(error: ErrorDetails) -> str:
    return f", found {shortened(error['input'])}" if isinstance(error["input"], (str, int, float, bool)) else ""
