"""Whether a recursive JSON Schema makes sense: it comes to an end, in itself and in its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MAX_PASSES = 100
"""References, each of which can be judged only after the one that comes behind it in the schema."""

_WITHOUT_END = {"object", "array"}
"""Types whose values hold values of other schemas."""


def without_values(subschemas: Mapping[int, Mapping[str, Any]], resolve: Callable[[str], Any]) -> list[int]:
    """Which of the subschemas (by identity, outer ones first) have no finite value, as far as recursion goes: least
    fixed point of "all that a value must hold has a finite value". Whatever MAX_PASSES leave open counts as without.
    """
    finite: set[int] = set()

    def is_finite(schema: Any) -> bool:
        return schema if isinstance(schema, bool) else id(schema) in finite

    for _ in range(MAX_PASSES):
        before = len(finite)
        for key in reversed(list(subschemas)):
            if key not in finite and _has_value(subschemas[key], is_finite, resolve):
                finite.add(key)
        if len(finite) == before:
            break
    return [key for key in subschemas if key not in finite]


def circular(subschemas: Mapping[int, Mapping[str, Any]], resolve: Callable[[str], Any]) -> list[int]:
    """Which of the subschemas say of a value, by themselves or by what they refer to, that it follows themselves, or
    lead to one that does. JSON Schema forbids it (2020-12 Core, section 9.4.1): no validator comes to an end."""
    waits_for = {key: _about_same_value(schema, resolve) & subschemas.keys() for key, schema in subschemas.items()}
    waited_for_by: dict[int, list[int]] = {key: [] for key in subschemas}
    for key, others in waits_for.items():
        for other in others:
            waited_for_by[other].append(key)
    settled = [key for key, others in waits_for.items() if not others]
    for key in settled:
        for waiting in waited_for_by[key]:
            waits_for[waiting].discard(key)
            if not waits_for[waiting]:
                settled.append(waiting)
    return [key for key, others in waits_for.items() if others]


def _about_same_value(schema: Mapping[str, Any], resolve: Callable[[str], Any]) -> set[int]:
    same = [each for keyword in ("allOf", "anyOf", "oneOf") for each in schema.get(keyword, ())]
    return {id(each) for each in (*same, *([resolve(schema["$ref"])] if "$ref" in schema else ()))}


def _has_value(schema: Mapping[str, Any], is_finite: Callable[[Any], bool], resolve: Callable[[str], Any]) -> bool:
    if "$ref" in schema and not is_finite(resolve(schema["$ref"])):
        return False
    if not all(map(is_finite, schema.get("allOf", ()))):
        return False
    if any(not any(map(is_finite, schema[keyword])) for keyword in ("anyOf", "oneOf") if keyword in schema):
        return False
    if "const" in schema or "enum" in schema:
        return True
    types = schema.get("type", "string")
    types = {types} if isinstance(types, str) else set(types)
    return bool(
        types - _WITHOUT_END
        or ("object" in types and all(map(is_finite, _required(schema))))
        or ("array" in types and all(map(is_finite, _first_items(schema))))
    )


def _required(schema: Mapping[str, Any]) -> list[Any]:
    properties, further = schema.get("properties", {}), schema.get("additionalProperties", True)
    return [properties.get(name, further) for name in schema.get("required", ())]


def _first_items(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the items that there must be."""
    prefix: list[Any] = schema.get("prefixItems", [])
    least = schema.get("minItems", 0)
    return prefix[:least] + ([schema.get("items", True)] if least > len(prefix) else [])
