"""Building blocks of the request schemas: strictness, unions with clean error paths, fields without a meaning here."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_PROMPTS = 64
MAX_CHOICES_OF_PROMPT = 128
MAX_CHOICES = 1024
"""Choices of one HTTP request, over all of its prompts."""
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 10.0
MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: with less they would not be finite for long."""
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0
MAX_BIASED_TOKENS = 4096
MAX_BAD_WORDS = 256
MAX_DOCUMENTS = 1024
MAX_TEMPLATE_CHARS = 2**20
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_ID_CHARS = 1024

_TOKEN_KEY = re.compile(r"[0-9]{1,10}")

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Identifier = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
RepetitionPenalty = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY, allow_inf_nan=False)]


class Body(BaseModel):
    """Strict: no string is a number, no float an integer, no boolean either of them, and no field is unknown."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class only:
    """Accept a field that clients know and that means nothing here only with a value that changes nothing (or null)."""

    def __init__(self, *neutral: Any) -> None:
        self._neutral = neutral

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self._neutral]}

    def _check(self, value: Any) -> Any:
        if value is None or value in self._neutral:
            return value
        allowed = " or ".join(repr(n) for n in self._neutral) or "null"
        raise PydanticCustomError("unsupported", "only {allowed} is accepted", {"allowed": allowed})


def _check_bias(bias: dict[str, Any]) -> dict[str, float]:
    """OpenAI's rules. The error is the field's: a key is the user's own word."""
    if len(bias) > MAX_BIASED_TOKENS:
        raise _wrong(f"has {len(bias)} tokens, at most {MAX_BIASED_TOKENS} are allowed")
    for key, value in bias.items():
        if not _TOKEN_KEY.fullmatch(key):
            raise _wrong("its keys must be token ids in decimal digits")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_LOGIT_BIAS:
            raise _wrong(f"its values must be numbers from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}")
    return bias


def _wrong(rule: str) -> PydanticCustomError:
    return PydanticCustomError("value", "{rule}", {"rule": rule})


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
    continuous_usage_stats: bool | None = None


LogitBias = Annotated[dict[str, Any], AfterValidator(_check_bias)]
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
