"""Whether a recursive JSON Schema makes sense: it comes to an end, in itself and in its values. In linear time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

_WITHOUT_END = {"object", "array"}
"""Types whose values hold values of other schemas."""

_Place: TypeAlias = int | bool | tuple[int, str]
"""A schema by its identity, one that is a boolean, or a part of one: what can be found to have a finite value."""


def without_values(subschemas: Mapping[int, Mapping[str, Any]], resolve: Callable[[str], Any]) -> list[int]:
    """Which of the subschemas (by identity, outer ones first) have no finite value, as far as recursion goes: least
    fixed point of "all that a value must hold has a finite value"."""
    finite = _FiniteValues()
    for key, schema in subschemas.items():
        finite.add_schema(key, schema, resolve)
    found = finite.found()
    return [key for key in subschemas if key not in found]


class _FiniteValues:
    """Propagates "has a finite value" from place to place, each of which counts the places that it still waits for."""

    def __init__(self) -> None:
        self._num_missing: dict[_Place, int] = {}
        self._waiting_for: dict[_Place, list[_Place]] = {}

    def add_schema(self, key: int, schema: Mapping[str, Any], resolve: Callable[[str], Any]) -> None:
        needs: list[_Place] = [_place(each) for each in schema.get("allOf", ())]
        if "$ref" in schema:
            needs.append(_place(resolve(schema["$ref"])))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                needs.append(self._add((key, keyword), map(_place, schema[keyword]), num_needed=1))
        if (parts := _parts(schema)) is not None:
            ways = [self._add((key, name), map(_place, held)) for name, held in parts.items()]
            needs.append(self._add((key, "type"), ways, num_needed=1))
        self._add(key, needs)

    def _add(self, place: _Place, needs: Iterable[_Place], *, num_needed: int | None = None) -> _Place:
        """``num_needed``: of the needs; None: all."""
        needs = list(needs)
        self._num_missing[place] = len(needs) if num_needed is None else num_needed
        for need in needs:
            self._waiting_for.setdefault(need, []).append(place)
        return place

    def found(self) -> set[_Place]:
        """All places that have a finite value."""
        found: list[_Place] = [True, *(place for place, number in self._num_missing.items() if number == 0)]
        for place in found:
            for waiting in self._waiting_for.get(place, ()):
                self._num_missing[waiting] -= 1
                if self._num_missing[waiting] == 0:
                    found.append(waiting)
        return set(found)


def _place(schema: Any) -> _Place:
    return schema if isinstance(schema, bool) else id(schema)


def _parts(schema: Mapping[str, Any]) -> dict[str, list[Any]] | None:
    """What a value must hold, by its type; None where it need not hold any."""
    if "const" in schema or "enum" in schema:
        return None
    types = schema.get("type", "string")
    types = {types} if isinstance(types, str) else set(types)
    if types - _WITHOUT_END:
        return None
    parts = {"object": _required, "array": _first_items}
    return {name: parts[name](schema) for name in types}


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


def _required(schema: Mapping[str, Any]) -> list[Any]:
    properties, further = schema.get("properties", {}), schema.get("additionalProperties", True)
    return [properties.get(name, further) for name in schema.get("required", ())]


def _first_items(schema: Mapping[str, Any]) -> list[Any]:
    """The schemas of the items that there must be."""
    prefix: list[Any] = schema.get("prefixItems", [])
    least = schema.get("minItems", 0)
    return prefix[:least] + ([schema.get("items", True)] if least > len(prefix) else [])
