"""The base of all settings: an unknown key is an error and values do not change."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Draws = Annotated[int, Field(ge=2, le=10_000)]  # of one prompt; what compares them grows with their square
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


def shown(value: object) -> str:
    """Return a value as a message shows it, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"
