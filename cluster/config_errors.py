"""Turns pydantic's findings into sentences that name the flag, the limit and the value."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

_WHOLE_NUMBER = "must be a whole number"
_TEMPLATES: Mapping[str, str] = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
    "int_type": _WHOLE_NUMBER,
    "int_parsing": _WHOLE_NUMBER,
    "int_from_float": _WHOLE_NUMBER,
    "int_parsing_size": "must be a smaller number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "string_too_short": "must not be empty",
    "byte_size": "must be a size in bytes, such as 2GiB",
    "byte_size_unit": "must be a size in bytes, such as 2GiB",
    "path_type": "must be a path",
    "dict_type": "must be a mapping of names",
    "string_pattern_mismatch": "must be of the form {pattern}",
    "tuple_type": "must be a list",
    "model_type": "must be a mapping of settings",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
}
_SHOWN_LENGTH = 80
_SECRET = frozenset({"api_key", "ssl_keyfile"})
"""Fields in whose place a secret may have been given."""


Place = Callable[[Sequence[int | str]], str]
"""What to call a value, by the names of settings and the numbers of list entries that lead to it."""


def flag(field: str) -> str:
    """The flag of a field. ``model`` is an argument."""
    return "MODEL" if field == "model" else "--" + field.replace("_", "-")


def field_of(name: str) -> str:
    """The field of a flag."""
    return "model" if name == "MODEL" else name[2:].replace("-", "_")


def flag_place(location: Sequence[int | str]) -> str:
    """The flag, and the way to a value within it: ``--tenants: alice.weight``. ``models`` has no flag."""
    if location[0] == "models":
        return dotted(location)
    return ": ".join([flag(str(location[0])), *([dotted(location[1:])] if location[1:] else [])])


def dotted(location: Sequence[int | str]) -> str:
    """``tenants.alice.weight``"""
    return ".".join(map(str, location))


def describe(error: ValidationError, fields: Sequence[str], place: Place = flag_place) -> str:
    """One line for everything that is wrong: ``--port: must be at most 65535, got 70000``. ``fields`` are those of the
    configuration, for hints; ``place`` says what to call a value."""
    return "; ".join(_sentence(dict(details), fields, place) for details in error.errors(include_url=False))


def _sentence(details: dict[str, Any], fields: Sequence[str], place: Place) -> str:
    location, kind = details["loc"], details["type"]
    if not location:
        return f"the configuration must be a mapping of settings, got a {type(details['input']).__name__}"
    if kind == "extra_forbidden":
        return _unknown(location, fields, place)
    template = _TEMPLATES.get(kind)
    wanted = template.format(**details.get("ctx", {})) if template else details["msg"]
    given = "" if location[0] in _SECRET else f", got {_shown(details['input'])}"
    return f"{place(location)}: {wanted}{given}"


def _unknown(location: Sequence[int | str], fields: Sequence[str], place: Place) -> str:
    name = str(location[-1])
    if len(location) == 1:  # no flag has that name
        said = name if place is flag_place else place(location)
        return f"{said}: no such setting{_hint(name, fields)}"
    if location[0] == "models" and name in fields:
        return f"{place(location)}: is a setting of the whole cluster, not of one model"
    return f"{place(location)}: no such setting{_hint(name, fields if location[0] == 'models' else ())}"


def _hint(name: str, fields: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name.replace("-", "_"), fields, n=1)
    return f", did you mean {matches[0]}?" if matches else ""


def _shown(value: Any) -> str:
    """The value as it was typed, in quotes where it would not be seen as one word; never long."""
    if value is None:
        return "nothing"
    is_plain = isinstance(value, int | float) or (isinstance(value, str) and value.isprintable() and " " not in value)
    text = str(value) if is_plain and value != "" else repr(value)
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "…"
