"""What callers of LLM hand over, as the bodies that HTTP clients would send."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ...worker.errors import ContextLengthExceeded, InvalidRequest, OctavoError
from ..api.errors import describe

Prompt = str | Sequence[int]
Params = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None

_SAID_BY_THE_CALL = {
    "model": "the LLM has one model",
    "prompt": "it is the first argument",
    "input": "it is the first argument",
    "messages": "it is the first argument",
    "stream": "results come when all are there",
    "stream_options": "results come when all are there",
    "return_token_ids": "results have them",
    "return_tokens_as_token_ids": "results have token ids",
    "encoding_format": "embeddings are arrays",
}
"""Fields of the HTTP API that mean nothing in a call."""


def listed_prompts(prompts: Any) -> list[Any]:
    """Prompts in a list; a text and a list of token ids are one prompt each. Raises InvalidRequest."""
    prompts = plain(prompts, "prompts")
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list):
        raise InvalidRequest("prompts must be a text, token ids, or a list of such prompts.", param="prompts")
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def listed_chats(messages: Any) -> list[Any]:
    """Conversations in a list; a list of messages is one. Raises InvalidRequest."""
    messages = plain(messages, "messages")
    if not isinstance(messages, list):
        raise InvalidRequest("messages must be a list of messages, or a list of such lists.", param="messages")
    return [messages] if messages and isinstance(messages[0], dict) else messages


def bodies_of(field: str, prompts: Sequence[Any], params: Params, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A body for each prompt, which is in ``field``: ``params``, its own ones or those of all, go before ``fields``.

    Raises InvalidRequest that names a field that a call does not take.
    """
    common = _plain_fields(fields)
    if params is None or isinstance(params, Mapping):
        shared = common | _plain_fields(params or {})
        return [{field: prompt, **shared} for prompt in prompts]
    if len(params) != len(prompts):
        message = f"params has {len(params)} entries for {len(prompts)} prompts: one for each, or one mapping for all."
        raise InvalidRequest(message, param="params")
    return [{field: prompt, **common, **_plain_fields(own)} for prompt, own in zip(prompts, params, strict=True)]


def _plain_fields(fields: Any) -> dict[str, Any]:
    if not isinstance(fields, Mapping):
        raise InvalidRequest("params must be a mapping of fields, or a list of such mappings.", param="params")
    for name, reason in _SAID_BY_THE_CALL.items():
        if name in fields:
            raise InvalidRequest(f"{name} is no field of a call: {reason}.", param=name)
    return {str(name): plain(value, str(name)) for name, value in fields.items()}


def plain(value: Any, path: str) -> Any:
    """``value`` as JSON's types: tuples and arrays as lists, keys as texts. What is none of them is left as it is.

    Raises InvalidRequest, with ``path``, for what JSON cannot say: NaN, infinities, half a surrogate pair, and what is
    nested too deeply.
    """
    try:
        return _plain(value, path)
    except RecursionError:
        raise InvalidRequest(f"{path} is nested too deeply.", param=path) from None


def _plain(value: Any, path: str) -> Any:
    match value:
        case str():
            return _check_text(value, path)
        case bool() | int() | None:
            return value
        case float():
            if math.isfinite(value):
                return value
            raise InvalidRequest(f"{path} holds {value}, which is no number in JSON.", param=path)
        case Mapping():
            return {str(key): _plain(item, path) for key, item in value.items()}
        case list() | tuple():
            if all(type(item) is int for item in value):
                return list(value)
            return [_plain(item, path) for item in value]
        case _:
            return _plain(value.tolist(), path) if hasattr(value, "tolist") else value


def _check_text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{path} holds half a surrogate pair at character {error.start}.", param=path) from None
    return text


def as_refusal(error: ValidationError | OctavoError) -> OctavoError:
    """A body's fault, said as an HTTP client would read it."""
    if not isinstance(error, ValidationError):
        return error
    described = describe(error)
    return InvalidRequest(described.message, param=described.param, code=described.code)


def of_prompt(error: OctavoError, name: str) -> OctavoError:
    """The same of one of several prompts, which it names."""
    message = f"{name}: {error}"
    if isinstance(error, ContextLengthExceeded):
        return ContextLengthExceeded(message, param=error.param)
    if isinstance(error, InvalidRequest):
        return InvalidRequest(message, param=error.param, code=error.code)
    return error
