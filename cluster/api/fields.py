"""Building blocks of the request schemas: strictness, unions with clean error paths, and fields not built yet."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

MAX_PROMPTS = 64
MAX_CHOICES_OF_PROMPT = 128
MAX_CHOICES = 1024
"""Choices of one HTTP request, over all of its prompts."""
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 10.0
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_ID_CHARS = 1024

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Identifier = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class Body(BaseModel):
    """Strict: no string is a number, no float an integer, no boolean either of them, and no field is unknown."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def only(*neutral: Any) -> AfterValidator:
    """Accept a field that is not built yet only with a value that changes nothing (or null)."""

    def check(value: Any) -> Any:
        if value is None or value in neutral:
            return value
        allowed = " or ".join(repr(n) for n in neutral) or "null"
        raise PydanticCustomError("unsupported", "this is not supported yet, only {allowed} is", {"allowed": allowed})

    return AfterValidator(check)


def _kind_of_text(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


def _kind_of_prompt(value: Any) -> str:
    """By the first element, so that an error names the element that does not fit the others."""
    if not isinstance(value, list):
        return "<text>"
    match value[:1]:
        case [list()]:
            return "<id lists>"
        case [str()]:
            return "<texts>"
        case _:
            return "<ids>"


class TextPart(Body):
    """The one kind of content part that a text model can read."""

    type: Literal["text"]
    text: str


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, only(False)] = None
    continuous_usage_stats: Annotated[bool | None, only(False)] = None


TokenIds = Annotated[list[int], Field(min_length=1)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]

Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Field(min_length=1), Tag("<parts>")],
    Discriminator(_kind_of_text),
]
Stop = Annotated[
    Annotated[StopText, Tag("<text>")] | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag("<parts>")],
    Discriminator(_kind_of_text),
]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<ids>")]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<id lists>")],
    Discriminator(_kind_of_prompt),
]
