"""Random JSON Schemas of the kinds that outputs can follow, and random outputs that follow a grammar."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import jsonschema
import numpy as np
from tokenizers import Tokenizer

from octavo.cluster.api.grammar.json_schema import check_schema
from octavo.cluster.api.grammar.schema_grammar import grammar_of_schema
from octavo.worker.errors import InvalidRequest
from octavo.worker.grammar import GrammarCompiler

Schema: TypeAlias = dict[str, Any]
Decode: TypeAlias = Callable[[list[int]], str]

_END_OF_TURN = 2

NAMES = ("a", "b", "größe", "x y", 'q"t', "a/b", "~t", "$ref", "type", "properties")
PATTERNS = (
    "^[a-z]{2,5}$",
    "ab+c",
    "^(red|green|blue)$",
    "[A-F0-9]{4}",
    "^.{0,6}$",
    '^[^"\\\\]*$',
    "\\.",
    "^\\d{3}-\\d{4}$",
)
VALUES = (
    1,
    2.5,
    "x",
    "two words",
    None,
    True,
    False,
    'q"',
    "é\n",
    -3,
    {"k": 1, "l": [1]},
    [1, "a"],
    0.1,
    {},
    "\x01",
    "☃",
)

FORMATS: dict[str, Callable[[str], Any]] = {
    "date": datetime.date.fromisoformat,
    "time": lambda text: datetime.time.fromisoformat(_plain_time(text)),
    "date-time": lambda text: datetime.datetime.fromisoformat(text[:10] + "T" + _plain_time(text[11:])),
    "duration": re.compile(r"P(?=[\dT])(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)").fullmatch,
    "email": re.compile(r"\S+@\S+").fullmatch,
    "hostname": re.compile(r"[a-zA-Z0-9-]{1,63}(\.[a-zA-Z0-9-]{1,63})*").fullmatch,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*:\S*").fullmatch,
}


def _plain_time(text: str) -> str:
    """RFC 3339's time as Python reads it: upper case, no leap second, an offset or none, six decimals at the most."""
    text = re.sub(r":60", ":59", text.upper())
    return re.sub(r"(\.\d{1,6})\d*", lambda decimals: decimals[1].ljust(7, "0"), text)


def format_checker() -> jsonschema.FormatChecker:
    """Of all formats that are claimed; jsonschema's own knows some only with other packages, and another "time"."""
    checker = jsonschema.FormatChecker(())
    for name, read in FORMATS.items():
        checker.checks(name, raises=ValueError)(
            lambda value, read=read: not isinstance(value, str) or bool(_read(read, value))
        )
    return checker


def _read(read: Callable[[str], Any], text: str) -> bool:
    return read(text) is not None


def random_schema(rng: random.Random) -> Schema:
    """With definitions, perhaps, some of which refer to each other and to themselves."""
    names = [f"d{index}" for index in range(rng.randrange(3))]
    schema = _schema(rng, 3, names)
    return {**schema, "$defs": {name: _schema(rng, 2, names) for name in names}} if names else schema


def _schema(rng: random.Random, depth: int, names: list[str]) -> Schema:
    if names and rng.random() < 0.1:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}
    if depth == 0 or rng.random() < 0.3:
        return rng.choice((_string, _string, _integer, _number, _constant, _simple))(rng)

    def inner() -> Schema:
        return _schema(rng, depth - 1, names)

    kind = rng.choice((_object, _object, _object, _array, _any_of, _one_of, _all_of))
    return kind(rng, inner)


def _string(rng: random.Random) -> Schema:
    schema: Schema = {"type": "string"}
    if (kind := rng.randrange(4)) == 0:
        return schema | {"pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return schema | {"format": rng.choice(list(FORMATS))}
    least = rng.randrange(4)
    schema |= {"minLength": least} if rng.random() < 0.6 else {}
    return schema | ({"maxLength": least + rng.randrange(9)} if rng.random() < 0.8 else {})


def _integer(rng: random.Random) -> Schema:
    schema: Schema = {"type": "integer"}
    least = rng.randrange(-200, 200)
    schema |= {rng.choice(("minimum", "exclusiveMinimum")): least} if rng.random() < 0.6 else {}
    if rng.random() < 0.2:
        return schema | {"multipleOf": rng.choice((1, 2, 5, 7))}
    return schema | {rng.choice(("maximum", "exclusiveMaximum")): least + rng.randrange(2, 300)}


def _number(rng: random.Random) -> Schema:
    schema: Schema = {"type": "number"}
    least = rng.choice((rng.randrange(-50, 50), round(rng.uniform(-5, 5), 3)))
    schema |= {rng.choice(("minimum", "exclusiveMinimum")): least} if rng.random() < 0.6 else {}
    return schema | {rng.choice(("maximum", "exclusiveMaximum")): least + rng.choice((1, 0.5, 2.25, 100))}


def _constant(rng: random.Random) -> Schema:
    return {"const": rng.choice(VALUES)} if rng.random() < 0.4 else {"enum": rng.sample(VALUES, rng.randrange(1, 5))}


def _simple(rng: random.Random) -> Schema:
    return {"type": rng.choice(("boolean", "null", ["string", "null"], ["integer", "boolean"], ["array", "null"]))}


def _object(rng: random.Random, inner: Callable[[], Schema]) -> Schema:
    names = rng.sample(NAMES, rng.randrange(5))
    schema: Schema = {"type": "object", "properties": {name: inner() for name in names}}
    if rng.random() < 0.8:
        schema["required"] = [name for name in names if rng.random() < 0.6]
    further = rng.choice((None, False, False, True, "schema"))
    if further is not None:
        schema["additionalProperties"] = inner() if further == "schema" else further
    if rng.random() < 0.1:
        schema |= {"title": "T", "description": "d", "default": {}, "examples": [1]}
    return schema


def _array(rng: random.Random, inner: Callable[[], Schema]) -> Schema:
    schema: Schema = {"type": "array", "items": inner()}
    least = rng.randrange(3)
    schema |= {"minItems": least} if rng.random() < 0.5 else {}
    schema |= {"maxItems": least + rng.randrange(4)} if rng.random() < 0.8 else {}
    return schema | ({"prefixItems": [inner(), inner()]} if rng.random() < 0.15 else {})


def _any_of(rng: random.Random, inner: Callable[[], Schema]) -> Schema:
    return {"anyOf": [inner() for _ in range(rng.randrange(1, 4))]}


def _one_of(rng: random.Random, inner: Callable[[], Schema]) -> Schema:
    kinds = [{"kind": {"const": name}, "value": inner()} for name in "ab"]
    return {"oneOf": [{"type": "object", "properties": kind, "required": ["kind"]} for kind in kinds]}


def _all_of(rng: random.Random, inner: Callable[[], Schema]) -> Schema:
    parts = [{"type": "object", "properties": {name: inner()}, "required": [name]} for name in ("a", "b")]
    return {"allOf": parts}


class RandomWalker:
    """Draws any token that a grammar allows, as a model without sense would. ``stop`` ends an output."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int, stop: int, closing: Sequence[int]) -> None:
        """``closing``: tokens that bring a document to its end; drawn more often when it is long."""
        self._compiler, self._stop, self._closing = compiler, stop, closing
        self._row = np.zeros((vocab_size + 31) // 32, dtype=np.int32)

    def walk(self, grammar: str, rng: random.Random, max_tokens: int = 300) -> tuple[list[int], bool]:
        """The tokens, and whether the output was complete."""
        matcher = self._compiler.matcher(grammar, (self._stop,))
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            matcher.fill_mask(self._row)
            if matcher.error is not None:
                raise RuntimeError(matcher.error)
            token = self._draw(rng, len(tokens))
            if token == self._stop:
                return tokens, True
            matcher.accept(token)
            tokens.append(token)
        return tokens, False

    def _draw(self, rng: random.Random, position: int) -> int:
        allowed = np.flatnonzero(np.unpackbits(self._row.view(np.uint8), bitorder="little"))
        closing = [token for token in (self._stop, *self._closing) if self._row[token >> 5] >> (token & 31) & 1]
        if closing and rng.random() < (0.3 if position < 40 else 0.9):
            return rng.choice(closing)
        return int(allowed[rng.randrange(len(allowed))])


REFUSALS = (
    "is circular",
    "describes no finite value",
    "less than 1 away",
    "Unsatisfiable schema",
    "oneOf constraints are not supported",
)
"""What a random schema may be refused for: nothing can follow it, or it is of a kind that is not claimed."""


@dataclass
class Walks:
    """What became of random schemas."""

    refused: list[str] = field(default_factory=list)
    num_followed: int = 0
    num_documents: int = 0


def walk_random_schemas(compiler: GrammarCompiler, walker: RandomWalker, decode: Decode, seeds: range) -> Walks:
    """Walk three times through a schema for each seed. Raises ValidationError for a complete output that is invalid."""
    walks, checker = Walks(), format_checker()
    for seed in seeds:
        rng = random.Random(seed)
        schema = random_schema(rng)
        try:
            check_schema(schema, "schema")
            grammar = grammar_of_schema(schema)
            compiler.prepare(grammar)
        except InvalidRequest as error:
            walks.refused.append(str(error))
            continue
        walks.num_followed += 1
        validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
        for _ in range(3):
            tokens, is_complete = walker.walk(grammar, rng)
            if is_complete:
                validator.validate(json.loads(decode(tokens)))
                walks.num_documents += 1
    return walks


def walks_on_model(model_dir: Path, seeds: range) -> Walks:
    """With SmolLM2's tokens."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    compiler = GrammarCompiler.of_model(model_dir, tokenizer.get_vocab_size())
    closing = [tokenizer.encode(text, add_special_tokens=False).ids[0] for text in ('"', "}", "]", '"}', '",', '"]')]
    walker = RandomWalker(compiler, tokenizer.get_vocab_size(), _END_OF_TURN, closing)
    return walk_random_schemas(compiler, walker, tokenizer.decode, seeds)
