"""Kinds of settings: what a number, a text or a path may be in ServeConfig, wherever it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError


def refuse_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "must be a whole number")
    return value


def absolute(value: Any) -> Any:
    """A path made absolute, since the cluster runs in another folder."""
    if value == "":
        raise PydanticCustomError("empty_path", "must not be empty")
    return Path(value).expanduser().absolute() if isinstance(value, str | Path) else value


Int = Annotated[int, BeforeValidator(refuse_bool)]
Count = Annotated[Int, Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
AbsolutePath = Annotated[Path, BeforeValidator(absolute)]
