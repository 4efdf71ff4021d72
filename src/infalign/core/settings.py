"""The base of all settings: an unknown key is an error, values do not change, and text becomes a value on reading."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, ClassVar, Protocol, Union

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Tag,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticKnownError

from infalign.core.errors import ConfigError

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
MAX_DRAWS = 10_000  # of one prompt; what compares them grows with their square
Draws = Annotated[int, Field(ge=2, le=MAX_DRAWS)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=100)]  # also of files and folders
NOT_IN_TEXT = re.compile("[\0\ud800-\udfff]")  # what neither a file's name nor UTF-8 can have


class Settings(BaseModel):
    """Base of all settings: an unknown key is an error and values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _means_itself(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation is not bool:
            raise ValueError(f"it is no switch, found {value} (YAML reads yes and on as true, no and off as false)")
        if isinstance(value, str) and NOT_IN_TEXT.search(value):
            raise ValueError(f"text with NUL or half a surrogate pair cannot be stored, found {shown(value)}")
        return value


class Kind(Settings):
    """Base of settings that are one of several kinds, told apart by one key (`one_of`)."""

    ignored: ClassVar[Collection[str] | None] = ()  # keys of other kinds that do no harm; None: all
    discriminator: ClassVar[str] = "kind"  # what messages call such a kind

    @classmethod
    def check_keys(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what was given without what says nothing. Raises ValueError for what this kind refuses by name."""
        return given


class Named(Protocol):
    """A value with a spelling."""

    @property
    def name(self) -> str:
        """The spelling for recipes, the command line and reports."""


def spelled(parse: Callable[[str], Named]) -> tuple[PlainValidator, PlainSerializer]:
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

    return PlainValidator(read), PlainSerializer(lambda value: value.name, return_type=str)


def one_of(kinds: Mapping[str, type[Kind]], *, key: str, default: str) -> Any:
    """Return the type of settings of one of ``kinds``, told apart by ``key``, which may be left out for ``default``.

    A key of another kind is refused with the kinds that take it, unless it is `ignored`, off, or has their default.
    """

    def kind_of(value: Any) -> Any:
        found = value.get(key, default) if isinstance(value, Mapping) else getattr(value, key, None)
        return found if isinstance(found, str) else None

    def cleaned(value: Any) -> Any:
        own = kinds.get(kind_of(value) or "")
        if own is None or not isinstance(value, Mapping):
            return value
        kept = {}
        for name, given in own.check_keys(value).items():
            others = [kind for kind, other in kinds.items() if name in other.model_fields]
            if name in own.model_fields or not others:
                kept[name] = given
            elif own.ignored is None or name in own.ignored:
                continue
            elif given not in (None, False) and given != kinds[others[0]].model_fields[name].default:
                raise ValueError(f"{name} is for the {own.discriminator} {' or '.join(others)}, found {kind_of(value)}")
        return kept

    union = Union[tuple(Annotated[kind, Tag(name)] for name, kind in kinds.items())]  # type: ignore[valid-type] # noqa: UP007
    return Annotated[union, Discriminator(kind_of), BeforeValidator(cleaned), OneOf(key, default, kinds)]


def kinds_in(package: str, modules: Sequence[str]) -> dict[str, Any]:
    """Return the class ``Settings`` of each module of a package, by the module's name with hyphens."""
    return {module.replace("_", "-"): import_module(f"{package}.{module}").Settings for module in modules}


@dataclass(frozen=True, slots=True)
class OneOf:
    """Says of an annotated type which kinds of settings it takes, and which key tells them apart."""

    key: str
    default: str
    kinds: Mapping[str, type[Kind]]


def shown(value: object) -> str:
    """Return a value as a message shows it, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
