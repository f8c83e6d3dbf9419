"""Kinds of settings: what a number, a text or a path may be in ServeConfig, wherever it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, Field, WithJsonSchema
from pydantic_core import PydanticCustomError


def refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "must be a whole number")
    return value


def _none_but(rule: str, *refused: type) -> BeforeValidator:
    """Values of ``refused`` are not taken for what they could be converted to: true is no number, 1 is not true."""

    def judge(value: Any) -> Any:
        if isinstance(value, refused):
            raise PydanticCustomError("refused", "must be {rule}", {"rule": rule})
        return value

    return BeforeValidator(judge)


def absolute(value: Any) -> Any:
    """A path made absolute, since the cluster runs in another folder."""
    if value == "":
        raise PydanticCustomError("empty_path", "must not be empty")
    return Path(value).expanduser().absolute() if isinstance(value, str | Path) else value


SIZE_PATTERN = r"^\s*\d*\.?\d+\s*([bB]|[kmgtpeKMGTPE]([iI]?[bB])?)?\s*$"

Int = Annotated[int, BeforeValidator(refuse_bool)]
Count = Annotated[Int, Field(ge=1)]
Number = Annotated[float, _none_but("a number", bool)]
Bool = Annotated[bool, _none_but("true or false", int, float), WithJsonSchema({"type": "boolean"})]
Size = Annotated[
    ByteSize,
    _none_but("a size in bytes, such as 2GiB", bool, float),
    WithJsonSchema({"anyOf": [{"type": "integer"}, {"type": "string", "pattern": SIZE_PATTERN}]}),
]
Text = Annotated[str, Field(min_length=1)]
AbsolutePath = Annotated[Path, BeforeValidator(absolute)]
