"""What KubeRay's API server side would say of a RayService: its CustomResourceDefinition, as a strict JSON Schema."""

from __future__ import annotations

import copy
import functools
import gzip
from pathlib import Path
from typing import Any

import jsonschema
import yaml

CRD = Path(__file__).parent.parent / "k8s" / "crds" / "rayservices.ray.io.yaml.gz"
_IN_PLACE = {"items", "additionalProperties", "not"}
_LISTS = {"allOf", "anyOf", "oneOf"}
_SAYS_NOTHING = {"description", "default", "format"}


@functools.cache
def structural_schema(version: str = "v1") -> dict[str, Any]:
    definition = yaml.load(gzip.decompress(CRD.read_bytes()), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (found,) = [entry for entry in definition["spec"]["versions"] if entry["name"] == version and entry["served"]]
    return dict(found["schema"]["openAPIV3Schema"])


def complaints(document: dict[str, Any]) -> list[str]:
    """Each violation with its path; unknown fields are violations. The schema's defaults are filled in first."""
    completed = copy.deepcopy(document)
    _fill_defaults(structural_schema(), completed)
    return [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in _validator().iter_errors(completed)
    ]


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    schema = _plain(structural_schema())
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(schema)


def _plain(schema: Any) -> Any:
    """A structural schema as JSON Schema that forbids fields which it does not name."""
    if not isinstance(schema, dict):
        return schema
    plain = {key: _plain_part(key, value) for key, value in schema.items() if not _is_silent(key)}
    if schema.get("x-kubernetes-int-or-string"):
        plain.pop("type", None)
        plain.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        plain.setdefault("additionalProperties", False)
    if schema.get("nullable") and "type" in plain:
        plain["type"] = [plain["type"], "null"]
    return plain


def _is_silent(key: str) -> bool:
    return key in _SAYS_NOTHING or key.startswith("x-kubernetes")


def _plain_part(key: str, value: Any) -> Any:
    if key == "properties":
        return {name: _plain(part) for name, part in value.items()}
    if key in _IN_PLACE:
        return _plain(value)
    return [_plain(part) for part in value] if key in _LISTS else value


def _fill_defaults(schema: dict[str, Any], value: Any) -> None:
    if isinstance(value, list):
        for item in value:
            _fill_defaults(schema.get("items", {}), item)
    if not isinstance(value, dict):
        return
    for name, part in schema.get("properties", {}).items():
        if name not in value and "default" in part:
            value[name] = copy.deepcopy(part["default"])
        if name in value:
            _fill_defaults(part, value[name])
    if isinstance(of_others := schema.get("additionalProperties"), dict):
        for item in value.values():
            _fill_defaults(of_others, item)
