"""From a judged JSON Schema to a grammar.

* An object that names properties and says nothing of further ones gets none, as OpenAI's strict mode demands;
  ``"additionalProperties": true`` allows them. (Not where several schemas are merged into one object.)
* Between JSON's tokens there is nothing, one space, or a line break and up to 16 spaces, so that a model cannot go on
  with blanks for ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from .json_schema import SUBSCHEMA, SUBSCHEMA_LISTS, SUBSCHEMA_MAPS, below

_WHITESPACE = r"[ ]|\n[ ]{0,16}"
_MERGING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})
_OF_FURTHER_PROPERTIES = frozenset({"additionalProperties", "patternProperties", "minProperties", "maxProperties"})


def grammar_of_schema(schema: Mapping[str, Any], *, compact: bool = False) -> str:
    """For ``SamplingParams.grammar``."""
    return orjson.dumps({"grammars": [{"json_schema": spaced(schema, compact=compact)}]}).decode()


def spaced(schema: Mapping[str, Any], *, compact: bool = False) -> dict[str, Any]:
    """A judged schema as llguidance is to read it: with closed objects and bounded blanks, none if ``compact``."""
    merges = any(_merges(subschema) for subschema in _subschemas(schema))
    read = dict(schema) if merges else _closed(schema)
    style = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _WHITESPACE}
    return {**read, "x-guidance": style}


def _subschemas(schema: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All of them, the schema itself first."""
    waiting: list[Any] = [schema]
    while waiting:
        if isinstance(each := waiting.pop(), dict):
            yield each
            waiting += [subschema for subschema, _ in below(each, "")]


def _merges(schema: dict[str, Any]) -> bool:
    """Whether one object's properties come from several schemas, none of which may then be closed by itself."""
    merging = _MERGING & schema.keys()
    return "allOf" in merging or len(merging) > 1 or (bool(merging) and "properties" in schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = {keyword: _closed_below(keyword, value) for keyword, value in schema.items()}
    if "properties" in schema and not schema.keys() & _OF_FURTHER_PROPERTIES and _names_all_required(schema):
        closed["additionalProperties"] = False
    return closed


def _closed_below(keyword: str, value: Any) -> Any:
    if keyword in SUBSCHEMA:
        return _closed(value)
    if keyword in SUBSCHEMA_LISTS:
        return [_closed(each) for each in value]
    if keyword in SUBSCHEMA_MAPS:
        return {name: _closed(each) for name, each in value.items()}
    return value


def _names_all_required(schema: dict[str, Any]) -> bool:
    return all(name in schema["properties"] for name in schema.get("required", ()))
