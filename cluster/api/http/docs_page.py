"""``GET /docs``: the OpenAPI document as a page without scripts, so that it needs nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "pre{background:#f4f4f4;color:#222;padding:.7rem;overflow:auto}"
    "table{border-collapse:collapse}td,th{padding:.15rem .8rem .15rem 0;text-align:left;vertical-align:top}"
    "summary{cursor:pointer}h2{margin:2rem 0 0;font-size:1.1rem}"
)


def docs_page(document: Mapping[str, Any], base_url: str) -> str:
    """Every endpoint with a command to try it, its fields, its answer and its errors."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Octavo API</title><style>{_STYLE}</style>",
        f"<h1>Octavo {escape(document['info']['version'])}</h1>",
        "<p>This page as a document for machines: <a href=openapi.json>openapi.json</a>.</p>",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _endpoint(document, base_url, path, method, operation)
    return "".join(parts)


def _endpoint(
    document: Mapping[str, Any], base_url: str, path: str, method: str, operation: Mapping[str, Any]
) -> Iterator[str]:
    yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>"
    body = operation.get("requestBody")
    example = None if body is None else body["content"]["application/json"]["example"]
    yield f"<pre>{escape(_command(base_url + path, method, example))}</pre>"
    if body is not None:
        name = body["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        yield from _fields(document["components"]["schemas"][name])
    for media_type, content in operation["responses"]["200"]["content"].items():
        answer = content["example"]
        text = answer if isinstance(answer, str) else json.dumps(answer, indent=1)
        yield f"<p>{escape(media_type)}</p><pre>{escape(text)}</pre>"
    errors = [
        f"{status} {answer['description']}" for status, answer in operation["responses"].items() if status != "200"
    ]
    yield f"<p>Otherwise: {escape(', '.join(errors))}</p>" if errors else ""


def _command(url: str, method: str, example: Any) -> str:
    if example is not None:
        return f"curl {url} -H 'Content-Type: application/json' -d '{json.dumps(example)}'"
    return f"curl {url}" if method == "get" else f"curl -X {method.upper()} {url}"


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", [])
    yield "<details><summary>Fields</summary><table>"
    for name, field in schema["properties"].items():
        kind = _kind(field) + (" (required)" if name in required else "")
        yield f"<tr><td><code>{escape(name)}</code><td>{escape(kind)}"
    yield "</table></details>"


def _kind(field: Mapping[str, Any]) -> str:
    """A type in a few words."""
    for key in ("anyOf", "oneOf"):
        if key in field:
            return " or ".join(dict.fromkeys(_kind(part) for part in field[key] if part.get("type") != "null"))
    if "$ref" in field:
        return str(field["$ref"].rsplit("/", 1)[1])
    if "enum" in field or "const" in field:
        return " or ".join(json.dumps(value) for value in field.get("enum", [field.get("const")]) if value is not None)
    bounds = [f"{word} {field[key]:g}" for key, word in _BOUNDS.items() if key in field]
    kind = str(field.get("type", "any"))
    if kind == "array":
        kind = f"list of {_kind(field.get('items', {}))}"
    return " ".join([kind, *bounds])


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
