"""The JSON schema of octavo.yaml, for editors: draft 2020-12, made from the fields of ServeConfig.

It says what a value must be by itself. What must not be together, and what a number as text is taken for, is judged by
``ServeConfig.parse`` alone.
"""

from __future__ import annotations

from typing import Any

from pydantic import ByteSize

from .config import ServeConfig

DRAFT = "https://json-schema.org/draft/2020-12/schema"

_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
"""What pydantic calls a bound of a type whose schema it does not know."""


_SIZE = r"^\s*\d*\.?\d+\s*([bB]|[kmgtpeKMGTPE]([iI]?[bB])?)?\s*$"
"""A number of bytes, as pydantic reads it; its own pattern takes any unit."""


def config_schema() -> dict[str, Any]:
    schema = _tidy(ServeConfig.model_json_schema())
    tenants = schema["properties"]["tenants"]
    description = tenants.pop("description")
    schema["properties"]["tenants"] = {
        "description": description,
        "anyOf": [tenants, {"type": "string", "minLength": 1}],
    }
    return {"$schema": DRAFT, "title": "octavo.yaml", **schema}


def _tidy(node: Any, *, of_names: bool = False) -> Any:
    """Without generated titles, line breaks of docstrings, and pydantic's own words; ``of_names``: keys are names."""
    if isinstance(node, list):
        return [_tidy(part) for part in node]
    if not isinstance(node, dict):
        return node
    if of_names:
        return {name: _tidy(part) for name, part in node.items()}
    if node.get("pattern") == ByteSize.byte_string_pattern:
        return {**node, "pattern": _SIZE}
    kept = {_BOUNDS.get(key, key): value for key, value in node.items() if key != "title"}
    return {
        key: " ".join(value.split()) if key == "description" else _tidy(value, of_names=key in ("properties", "$defs"))
        for key, value in kept.items()
    }
