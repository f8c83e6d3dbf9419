"""Structured outputs: from what a request says of its output's form to one grammar, judged and compiled.

| field | what the output is |
|---|---|
| response_format {"type": "json_schema"} | JSON that validates against json_schema.schema, see ``json_schema.py`` |
| response_format {"type": "json_object"} | any JSON object |
| structured_outputs.json, guided_json | as json_schema; also as JSON text |
| structured_outputs.json_object | as json_object, if true |
| structured_outputs.regex, guided_regex | text that matches as a whole; no look-around or back-references; \\d is 0-9 |
| structured_outputs.choice, guided_choice | one of these texts |
| structured_outputs.grammar, guided_grammar | Lark or GBNF, see ``lark.py`` |
| structured_outputs.disable_any_whitespace | true: compact JSON |

One of them at the most; what other fields cannot go with it is judged in ``sampling.py``. All is judged before anything
is computed, in threads, in linear time for what is judged here and within a time limit for the compiler.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import orjson
from llguidance import regex_to_lark
from pydantic import Field

from ....worker.errors import InvalidRequest
from ....worker.grammar import GrammarCompiler, Prototype
from ..request.fields import Body, only
from .json_schema import check_schema
from .lark import lark_of
from .regex_size import check_regex
from .schema_grammar import grammar_of_schema

COMPILE_LIMIT_S = 2.0
MAX_CHOICE_TEXTS = 5_000
MAX_CHOICE_CHARS = 2**16
"""Of all choices together."""

_ASCII_DIGITS = "d"
_NUM_COMPILERS = 2


class JsonSchemaFormat(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsField(Body):
    """vLLM's ``structured_outputs``."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    """Accepted: there is one engine, and nothing to fall back to."""
    disable_additional_properties: Annotated[bool | None, only(False)] = None
    whitespace_pattern: Annotated[str | None, only()] = None
    structural_tag: Annotated[Any, only()] = None


class _Wishes(Body):
    """Makes the paths in errors begin with the field."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None


class StructuredFields(Protocol):
    """Of a body: what is said of the output's form."""

    response_format: dict[str, Any] | None
    structured_outputs: dict[str, Any] | None
    guided_json: dict[str, Any] | str | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


Build: TypeAlias = Callable[[str], str]
"""The name of the field → the grammar."""


@dataclass(frozen=True, slots=True)
class FieldGrammar:
    text: str
    """For ``SamplingParams.grammar``."""
    field: str
    """Of the request: what asks for it, and is to blame if it cannot be followed."""


class StructuredOutputs:
    """Judges for one model. Raises InvalidRequest that names the field, or pydantic's ValidationError."""

    def __init__(self, compiler: GrammarCompiler, *, limit_s: float = COMPILE_LIMIT_S) -> None:
        self._compiler = compiler
        self._limit_s = limit_s
        self._judging = ThreadPoolExecutor(1, thread_name_prefix="schema")
        self._compiling = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="grammar")

    async def grammar(self, body: StructuredFields) -> FieldGrammar | None:
        """None where the output may be any text."""
        wish = _wish(body)
        if wish is None:
            return None
        field, build = wish
        return await self.check(FieldGrammar(await self._built(build, field), field))

    async def check(self, grammar: FieldGrammar) -> FieldGrammar:
        """The grammar, once it has been compiled."""
        prototype = self._compiler.known(grammar.text) or await self._compile_in_time(grammar)
        if prototype.failure is not None:
            raise InvalidRequest(f"{grammar.field}: {prototype.failure}", param=grammar.field)
        return grammar

    async def _built(self, build: Build, field: str) -> str:
        return await asyncio.get_running_loop().run_in_executor(self._judging, build, field)

    async def _compile_in_time(self, grammar: FieldGrammar) -> Prototype:
        """A thread that is late is left alone: ``parser_limits`` end its work a little later. The time begins when a
        thread is free, which others may have to wait for."""
        loop, started = asyncio.get_running_loop(), asyncio.Event()

        def work() -> Prototype:
            try:
                with contextlib.suppress(InvalidRequest):  # told by ``prepare``
                    self._compiler.load()
            finally:
                loop.call_soon_threadsafe(started.set)
            return self._compiler.prepare(grammar.text)

        compiling = asyncio.wrap_future(self._compiling.submit(work))
        try:
            await started.wait()
            return await asyncio.wait_for(compiling, self._limit_s)
        except TimeoutError:
            message = f"{grammar.field} takes more than {self._limit_s:g} s to compile: it is too complex."
            raise InvalidRequest(message, param=grammar.field) from None
        finally:
            compiling.cancel()

    def close(self) -> None:
        for threads in (self._judging, self._compiling):
            threads.shutdown(wait=False, cancel_futures=True)


def _wish(body: StructuredFields) -> tuple[str, Build] | None:
    """The one field that says something of the output's form, and what makes a grammar of it."""
    wishes = _wishes(body)
    if not wishes:
        return None
    if len(wishes) > 1:
        names = sorted(wishes)
        message = f"{' and '.join(names)} both say what the output must follow: send one of them."
        raise InvalidRequest(message, param=names[0])
    return next(iter(wishes.items()))


def _wishes(body: StructuredFields) -> dict[str, Build]:
    own = {"response_format": body.response_format, "structured_outputs": body.structured_outputs}
    given = _Wishes.model_validate(own)
    wishes = {} if given.response_format is None else _of_response_format(given.response_format)
    if given.structured_outputs is not None:
        wishes |= _of_structured_outputs(given.structured_outputs)
    guided = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    return wishes | _of_kinds("guided_", *guided)


def _of_response_format(given: ResponseFormat) -> dict[str, Build]:
    if (given.type == "json_schema") != (given.json_schema is not None):
        message = f"response_format.type is {given.type}: json_schema goes with json_schema, and with it alone."
        raise InvalidRequest(message, param="response_format.json_schema")
    if given.json_schema is not None:
        return {"response_format.json_schema.schema": partial(_json_grammar, given.json_schema.schema_)}
    return {"response_format": _json_object_grammar} if given.type == "json_object" else {}


def _of_structured_outputs(given: StructuredOutputsField) -> dict[str, Build]:
    compact = bool(given.disable_any_whitespace)
    kinds = (given.json_, given.regex, given.choice, given.grammar)
    wishes = _of_kinds("structured_outputs.", *kinds, compact=compact)
    if given.json_object:
        wishes["structured_outputs.json_object"] = partial(_json_object_grammar, compact=compact)
    if not wishes:
        message = "structured_outputs needs one of json, regex, choice, grammar and json_object."
        raise InvalidRequest(message, param="structured_outputs")
    return wishes


def _of_kinds(
    prefix: str,
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choices: list[str] | None,
    grammar: str | None,
    *,
    compact: bool = False,
) -> dict[str, Build]:
    wishes: dict[str, Build] = {}
    if schema is not None:
        wishes[f"{prefix}json"] = partial(_json_grammar, schema, compact=compact)
    if regex is not None:
        wishes[f"{prefix}regex"] = partial(_regex_grammar, regex)
    if choices is not None:
        wishes[f"{prefix}choice"] = partial(_choice_grammar, choices)
    if grammar is not None:
        wishes[f"{prefix}grammar"] = partial(lark_of, grammar)
    return wishes


def _json_object_grammar(field: str, *, compact: bool = False) -> str:
    return grammar_of_schema({"type": "object"}, compact=compact)


def _json_grammar(schema: dict[str, Any] | str, field: str, *, compact: bool = False) -> str:
    if isinstance(schema, str):
        schema = _parsed(schema, field)
    check_schema(schema, field)
    return grammar_of_schema(schema, compact=compact)


def _parsed(text: str, field: str) -> dict[str, Any]:
    try:
        schema = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{field} is a string that is no JSON: {error}", param=field) from error
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{field} must be an object.", param=field)
    return schema


def _regex_grammar(regex: str, field: str) -> str:
    check_regex(regex, field)
    return f"start: /{regex_to_lark(regex, _ASCII_DIGITS)}/\n"


def _choice_grammar(choices: list[str], field: str) -> str:
    num_chars = sum(map(len, choices))
    if not 1 <= len(choices) <= MAX_CHOICE_TEXTS or num_chars > MAX_CHOICE_CHARS:
        given = f"{field} has {len(choices)} choices of {num_chars} characters together"
        allowed = f"1 to {MAX_CHOICE_TEXTS} choices of at most {MAX_CHOICE_CHARS} characters are allowed"
        raise InvalidRequest(f"{given}; {allowed}.", param=field)
    return f"start: CHOICE\nCHOICE: {' | '.join(map(json.dumps, choices))}\n"
