"""Kinds of settings: what a number, a text or a path may be in ServeConfig, wherever it comes from."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

_NOT_OF: dict[Any, tuple[str, tuple[type, ...]]] = {
    bool: ("bool_type", (int, float)),
    int: ("int_type", (bool,)),
    float: ("float_type", (bool,)),
    ByteSize: ("byte_size", (bool, float)),
}
"""For a field of each kind, what pydantic would convert and nobody means: 1 for true, true for a number."""


class Settings(BaseModel):
    """What can be set, by field; a field's docstring is its help. Immutable, and unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_conversions(cls, value: Any, info: ValidationInfo) -> Any:
        kind, refused = _NOT_OF.get(plain_type(cls.model_fields[info.field_name or ""].annotation), ("", ()))
        if type(value) in refused:
            raise PydanticCustomError(kind, "is of another type")
        return value


def plain_type(annotation: Any) -> Any:
    """``int`` for ``int``, ``Annotated[int, …] | None`` and the like; a Literal as it is."""
    if typing.get_origin(annotation) is typing.Annotated:
        return plain_type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return next(plain_type(part) for part in typing.get_args(annotation) if part is not type(None))
    return annotation


def absolute(value: Any) -> Any:
    """A path made absolute, since the cluster runs in another folder."""
    if value == "":
        raise PydanticCustomError("empty_path", "must not be empty")
    return Path(value).expanduser().absolute() if isinstance(value, str | Path) else value


Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
AbsolutePath = Annotated[Path, BeforeValidator(absolute), WithJsonSchema({"type": "string", "minLength": 1})]
