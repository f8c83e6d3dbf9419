"""A small reader of PromQL: which series an expression needs, and which labels its result has.

It knows what Octavo's dashboard and alerts use, and refuses the rest: selectors with ranges, functions, aggregations
with by and without, and binary operators on all labels. https://prometheus.io/docs/prometheus/latest/querying/
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

Exported = Mapping[str, frozenset[str]]
"""Sample name → its labels; of any of its series, where they differ."""

AGGREGATIONS = {"sum", "min", "max", "avg", "count"}
OF_RANGES = {"rate", "increase"}
OF_VECTORS = {"abs", "absent", "histogram_quantile"}
OPERATORS = {"or", "unless", "and", "==", "!=", ">", "<", ">=", "<=", "+", "-", "*", "/"}
COUNTERS = ("_total", "_sum", "_count", "_bucket")

_TOKEN = re.compile(
    r"""\s*(?:(?P<number>\d+(?:\.\d+)?) | (?P<name>[A-Za-z_:][\w:]*) | (?P<text>"(?:[^"\\]|\\.)*")
    | (?P<range>\[(?:\d+[smhd]|\$__rate_interval)\]) | (?P<sign>=~|!~|==|!=|>=|<=|[-+*/(){},=<>]))""",
    re.VERBOSE,
)


class PromQLError(ValueError):
    """The expression cannot be read, or asks for what is not there."""


class Vector(NamedTuple):
    """What a part of an expression gives. ``labels`` None: a number without any."""

    labels: frozenset[str] | None
    name: str = ""
    """Of a selector: its sample."""
    is_range: bool = False


def result_labels(expression: str, exported: Exported) -> frozenset[str]:
    """Labels of the expression's result. Raises PromQLError."""
    reader = _Reader(expression, exported)
    vector = reader.expression()
    if reader.token is not None:
        raise PromQLError(f"{expression!r}: {reader.token!r} was not expected")
    if vector.is_range:
        raise PromQLError(f"{expression!r}: a range is no result")
    return vector.labels or frozenset()


class _Reader:
    def __init__(self, text: str, exported: Exported) -> None:
        self._text = text
        self._exported = exported
        self._tokens = self._cut(text.strip())
        self._place = 0

    def _cut(self, text: str) -> list[str]:
        tokens, at = [], 0
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise PromQLError(f"{self._text!r} cannot be read from {text[at : at + 20]!r} on")
            tokens.append(found[0].strip())
            at = found.end()
        return tokens

    @property
    def token(self) -> str | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def _take(self, *wanted: str) -> str:
        token = self.token
        if token is None or (wanted and token not in wanted):
            raise PromQLError(f"{self._text!r}: {token!r} stands where {wanted or 'something'} should")
        self._place += 1
        return token

    def expression(self) -> Vector:
        vector = self._operand()
        while self.token in OPERATORS:
            self._take()
            vector = _both(self._text, vector, self._operand())
        return vector

    def _operand(self) -> Vector:
        token = self._take()
        if token == "(":
            vector = self.expression()
            self._take(")")
            return vector
        if token[0].isdigit():
            return Vector(None)
        if token in AGGREGATIONS:
            return self._aggregation()
        if token in OF_RANGES or token in OF_VECTORS:
            return self._call(token)
        return self._selector(token)

    def _aggregation(self) -> Vector:
        how = self._take() if self.token in ("by", "without") else ""
        named = self._labels() if how else frozenset()
        self._take("(")
        inner = self.expression()
        self._take(")")
        if inner.labels is None or not named <= inner.labels:
            raise PromQLError(f"{self._text!r}: {sorted(named - (inner.labels or frozenset()))} are no labels there")
        return Vector(inner.labels - named if how == "without" else named)

    def _labels(self) -> frozenset[str]:
        self._take("(")
        names = [self._take()]
        while self._take(",", ")") == ",":
            names.append(self._take())
        return frozenset(names)

    def _call(self, function: str) -> Vector:
        self._take("(")
        arguments = [self.expression()]
        while self._take(",", ")") == ",":
            arguments.append(self.expression())
        last = arguments[-1]
        if last.is_range is not (function in OF_RANGES):
            raise PromQLError(f"{self._text!r}: {function} of {'no ' if function in OF_RANGES else ''}range")
        if function in OF_RANGES and not last.name.endswith(COUNTERS):
            raise PromQLError(f"{self._text!r}: {function} of {last.name}, which is no counter")
        if function == "histogram_quantile":
            if last.labels is None or "le" not in last.labels:
                raise PromQLError(f"{self._text!r}: a quantile of what has no label le")
            return Vector(last.labels - {"le"})
        return Vector(frozenset() if function == "absent" else last.labels)

    def _selector(self, name: str) -> Vector:
        if name not in self._exported:
            raise PromQLError(f"{self._text!r}: nothing exports {name}")
        labels = self._exported[name]
        if self.token == "{":
            self._take("{")
            while self.token != "}":
                if (label := self._take()) not in labels:
                    raise PromQLError(f"{self._text!r}: {name} has no label {label}")
                self._take("=", "!=", "=~", "!~")
                self._take()
                if self.token == ",":
                    self._take()
            self._take("}")
        is_range = self.token is not None and self.token.startswith("[")
        if is_range:
            self._take()
        return Vector(labels, name, is_range)


def _both(text: str, left: Vector, right: Vector) -> Vector:
    if left.is_range or right.is_range:
        raise PromQLError(f"{text!r}: an operator on a range")
    if left.labels is None or right.labels is None:
        return Vector(left.labels if right.labels is None else right.labels)
    if left.labels != right.labels:
        raise PromQLError(f"{text!r}: {sorted(left.labels)} and {sorted(right.labels)} match nothing")
    return Vector(left.labels)
