"""JSON Schemas that outputs can be made to follow: judged keyword by keyword, then handed to llguidance.

Whatever follows the grammar validates against the schema. So a keyword is honoured, or an annotation, or refused with
its path; llguidance alone would pass over those that it has never heard of. What it takes for granted beside:

* Properties come in the order of ``properties``. ``strict`` changes nothing: schemas that OpenAI's strict mode would
  refuse (optional properties, open objects) are followed all the same. ``schema_grammar.py`` closes objects.
* ``oneOf`` only where its options exclude each other by type, constant or a required property's constant.
* ``$ref`` within the schema only; it may be recursive. Drafts 2020-12 (the default), 2019-09 and 7.
"""

from __future__ import annotations

import bisect
import math
import re
import time
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

import orjson

from ....worker.errors import InvalidRequest
from .regex_size import check_regex
from .schema_values import circular, without_values

MAX_SCHEMA_BYTES = 256 * 2**10
MAX_DEPTH = 100
"""Of the schema's JSON; llguidance itself reads 127."""
MAX_SUBSCHEMAS = 5_000
MAX_PROPERTIES = 500
"""Of one object: the work for optional ones grows with their square."""
MAX_ENUM_VALUES = 5_000
MAX_LENGTH = 1_000_000
"""Of minLength, maxLength, minItems, maxItems, minProperties and maxProperties."""
MAX_PATTERN_CHARS = 2**16
"""Of all regular expressions of a schema together."""
JUDGE_LIMIT_S = 2.0
"""Each rule takes time in proportion to the schema, in all about 0.2 s; this is for a machine that has none left."""
MAX_MULTIPLE_OF = 100_000
"""Product of the different ``multipleOf`` of a schema: an automaton has so many states."""

FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_DRAFTS = ("https://json-schema.org/draft/2020-12/schema", "https://json-schema.org/draft/2019-09/schema")
_DRAFT_7 = ("http://json-schema.org/draft-07/schema", "https://json-schema.org/draft-07/schema")
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
    | {"contentMediaType", "contentEncoding", "discriminator"}
)
"""Say nothing of which values are valid; ``discriminator`` (pydantic's) only repeats what the options say."""
SUBSCHEMA = frozenset({"items", "additionalProperties"})
SUBSCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
SUBSCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_BOUNDS = frozenset(_LOWER + _UPPER)

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_schema(schema: Mapping[str, Any], param: str) -> None:
    """Raises InvalidRequest, which names the keyword by its path from ``param``."""
    _check_depth(schema, param)
    try:
        size = len(orjson.dumps(schema))
    except TypeError as error:  # beyond 64 bits, or half a surrogate pair
        raise InvalidRequest(f"{param} holds what JSON cannot: {error}", param=param) from error
    if size > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{param} has {size} bytes, at most {MAX_SCHEMA_BYTES} are allowed.", param=param)
    _Judge(schema, param).judge()


class _Judge:
    """Walks through one schema, without recursion."""

    def __init__(self, schema: Mapping[str, Any], param: str) -> None:
        self._root = schema
        self._param = param
        self._is_draft_7 = False
        self._places: dict[int, str] = {}
        """Subschemas that were judged, by identity: their paths."""
        self._subschemas: dict[int, dict[str, Any]] = {}
        self._refs: list[tuple[str, str]] = []
        self._num_enum_values = 0
        self._num_pattern_chars = 0
        self._multiples: set[Decimal] = set()

    def judge(self) -> None:
        self._check_draft()
        ends_s = time.monotonic() + JUDGE_LIMIT_S
        waiting: list[tuple[Any, str]] = [(self._root, self._param)]
        while waiting:
            schema, path = waiting.pop()
            waiting += self._judge_one(schema, path)
            if len(self._places) > MAX_SUBSCHEMAS:
                raise self._bad(self._param, f"has more than {MAX_SUBSCHEMAS} subschemas")
            if time.monotonic() > ends_s:
                raise self._bad(self._param, f"takes more than {JUDGE_LIMIT_S:g} s to judge")
        for reference, path in self._refs:
            if id(self._resolve(reference)) not in self._places:
                raise self._bad(path, f"{reference[:100]!r} points to no schema in this schema")
        if any("allOf" in schema for schema in self._subschemas.values()):
            self._check_bounds(list(self._subschemas.values()), self._param)
        for key in circular(self._subschemas, self._resolve):
            raise self._bad(self._places[key], "is circular: it refers to itself for the same value")
        for key in without_values(self._subschemas, self._resolve):
            raise self._bad(self._places[key], "describes no finite value: its recursion has no way out")

    def _resolve(self, reference: str) -> Any:
        return _resolve(self._root, reference)

    def _judge_one(self, schema: Any, path: str) -> list[tuple[Any, str]]:
        if isinstance(schema, bool):
            return []
        if not isinstance(schema, dict):
            raise self._bad(path, "must be a schema: an object or a boolean")
        self._places[id(schema)], self._subschemas[id(schema)] = path, schema
        for keyword, value in schema.items():
            if keyword not in _ANNOTATIONS:
                self._judge_keyword(keyword, value, f"{path}.{keyword[:64]}", path)
        self._judge_together(schema, path)
        return below(schema, path)

    def _judge_keyword(self, keyword: str, value: Any, at: str, path: str) -> None:
        if (judge := _JUDGES.get(keyword)) is not None:
            judge(self, value, at)
        elif keyword in SUBSCHEMA:
            if isinstance(value, list):
                raise self._bad(at, "as a list is not supported, prefixItems is")
        elif keyword in SUBSCHEMA_LISTS:
            self._expect(isinstance(value, list) and bool(value), at, "must be a list of schemas, not empty")
        elif keyword in SUBSCHEMA_MAPS:
            self._expect(isinstance(value, dict), at, "must be an object of schemas")
        elif keyword in _COUNTS:
            is_count = _is_integer(value) and 0 <= value <= MAX_LENGTH
            self._expect(is_count, at, f"must be an integer from 0 to {MAX_LENGTH}")
        elif keyword in _BOUNDS:
            self._expect(_is_number(value), at, "must be a finite number")
        elif keyword != "$schema" or path != self._param:
            raise self._bad(at, "is not supported", code="unsupported_value")

    def _judge_together(self, schema: dict[str, Any], path: str) -> None:
        """What keywords mean only beside each other."""
        names = schema.get("properties", {})
        if len(names) > MAX_PROPERTIES:
            raise self._bad(f"{path}.properties", f"has {len(names)} properties, at most {MAX_PROPERTIES} are allowed")
        if any(_CONTROL.search(name) for name in names):
            raise self._bad(f"{path}.properties", "has a name with a control character")
        for pattern in schema.get("patternProperties", {}):
            self._check_regex(pattern, f"{path}.patternProperties")
        if schema.get("minProperties", 0) > max(1, len(schema.get("required", ()))):
            # Nothing keeps further properties from having the same name, and then there are fewer.
            raise self._bad(f"{path}.minProperties", "above 1 and the number of required ones is not supported")
        self._check_bounds([schema], path)
        if self._is_draft_7 and "$ref" in schema and schema.keys() - _ANNOTATIONS - {"$ref", "$schema", "definitions"}:
            raise self._bad(f"{path}.$ref", "makes draft 7 ignore the keywords beside it: say allOf")

    def _check_bounds(self, schemas: list[dict[str, Any]], path: str) -> None:
        """Of schemas that one number has to follow. llguidance lets the bound itself pass where a number must lie
        between an exclusive bound that is whole and another bound less than 1 away."""
        numbers = [schema for schema in schemas if schema.get("type") != "integer"]
        for exclusive, others in (("exclusiveMinimum", _UPPER), ("exclusiveMaximum", _LOWER)):
            bounds = {schema[exclusive] for schema in numbers if exclusive in schema}
            ends = sorted({schema[other] for schema in numbers for other in others if other in schema})
            if any(bound == int(bound) and _distance(bound, ends) < 1 for bound in bounds):
                raise self._bad(f"{path}.{exclusive}", "is not supported with another bound that is less than 1 away")

    def _check_draft(self) -> None:
        draft = self._root.get("$schema", _DRAFTS[0])
        name = draft.removesuffix("#") if isinstance(draft, str) else None
        self._is_draft_7 = name in _DRAFT_7
        if name not in _DRAFTS and name not in _DRAFT_7:
            raise self._bad(f"{self._param}.$schema", "must be that of draft 2020-12, 2019-09 or 7")

    def _type(self, value: Any, at: str) -> None:
        types = value if isinstance(value, list) else [value]
        known = bool(types) and all(isinstance(name, str) and name in _TYPES for name in types)
        self._expect(known, at, f"must be one or several of {', '.join(sorted(_TYPES))}")

    def _enum(self, value: Any, at: str) -> None:
        self._expect(isinstance(value, list) and bool(value), at, "must be a list of values, not empty")
        self._num_enum_values += len(value)
        if self._num_enum_values > MAX_ENUM_VALUES:
            raise self._bad(at, f"lists too much: at most {MAX_ENUM_VALUES} values are allowed in a schema")

    def _required(self, value: Any, at: str) -> None:
        self._expect(
            isinstance(value, list) and all(isinstance(name, str) for name in value), at, "must be a list of names"
        )

    def _pattern(self, value: Any, at: str) -> None:
        self._expect(isinstance(value, str), at, "must be a regular expression")
        self._check_regex(value, at)

    def _check_regex(self, pattern: str, at: str) -> None:
        self._num_pattern_chars += len(pattern)
        if self._num_pattern_chars > MAX_PATTERN_CHARS:
            message = (
                f"is too much: the regular expressions of a schema may have {MAX_PATTERN_CHARS} characters together"
            )
            raise self._bad(at, message)
        check_regex(pattern, self._param, at)

    def _format(self, value: Any, at: str) -> None:
        self._expect(isinstance(value, str), at, "must be a string")
        if value not in FORMATS:
            raise self._bad(at, f"can be {', '.join(sorted(FORMATS))}; {value[:64]!r} is not supported")

    def _multiple_of(self, value: Any, at: str) -> None:
        self._expect(_is_number(value) and value > 0, at, "must be a number above 0")
        self._multiples.add(Decimal(repr(value)))
        places = min(0, *(_exponent(multiple) for multiple in self._multiples))
        product = Decimal(1)
        for multiple in self._multiples:
            product *= multiple.scaleb(-places)
        if product > MAX_MULTIPLE_OF:
            raise self._bad(at, f"is too large: the product of all different ones may be {MAX_MULTIPLE_OF} at most")

    def _reference(self, value: Any, at: str) -> None:
        is_local = isinstance(value, str) and (value == "#" or value.startswith("#/"))
        self._expect(is_local, at, 'must begin with "#/": only references within the schema are followed')
        self._refs.append((value, at))

    def _anything(self, value: Any, at: str) -> None:
        pass

    def _expect(self, holds: bool, at: str, otherwise: str) -> None:
        if not holds:
            raise self._bad(at, otherwise)

    def _bad(self, at: str, what: str, *, code: str | None = None) -> InvalidRequest:
        return InvalidRequest(f"Invalid schema: {at} {what}.", param=self._param, code=code)


_JUDGES: dict[str, Callable[[_Judge, Any, str], None]] = {
    "type": _Judge._type,
    "enum": _Judge._enum,
    "const": _Judge._anything,
    "required": _Judge._required,
    "pattern": _Judge._pattern,
    "format": _Judge._format,
    "multipleOf": _Judge._multiple_of,
    "$ref": _Judge._reference,
}


def below(schema: dict[str, Any], path: str) -> list[tuple[Any, str]]:
    """The subschemas of a schema, with their paths."""
    found = [(schema[keyword], f"{path}.{keyword}") for keyword in SUBSCHEMA & schema.keys()]
    for keyword in SUBSCHEMA_LISTS & schema.keys():
        found += [(each, f"{path}.{keyword}[{index}]") for index, each in enumerate(schema[keyword])]
    for keyword in SUBSCHEMA_MAPS & schema.keys():
        found += [(each, f"{path}.{keyword}.{name[:64]}") for name, each in schema[keyword].items()]
    return found


def _resolve(root: Mapping[str, Any], reference: str) -> Any:
    """What a local reference (RFC 6901) points to, or None."""
    place: Any = root
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict):
            place = place.get(name)
        elif isinstance(place, list) and name.isdecimal() and len(name) < 10 and int(name) < len(place):
            place = place[int(name)]
        else:
            return None
    return place


def _check_depth(value: Any, param: str) -> None:
    layer = [value]
    for _ in range(MAX_DEPTH):
        layer = [below for each in layer for below in _elements(each)]
        if not layer:
            return
    raise InvalidRequest(f"{param} is nested more than {MAX_DEPTH} levels deep.", param=param)


def _elements(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _distance(number: float, others: list[float]) -> float:
    """To the nearest of the others, which are in order."""
    place = bisect.bisect_left(others, number)
    return min((abs(other - number) for other in others[max(0, place - 1) : place + 1]), default=math.inf)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _exponent(number: Decimal) -> int:
    exponent = number.normalize().as_tuple().exponent
    return exponent if isinstance(exponent, int) else 0
