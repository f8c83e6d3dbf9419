"""``octavo config show`` and ``octavo config schema``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import yaml

from .config import ServeConfig
from .config_sources import Provenance

_SECRET = ("api_key",)
"""Known by digests only, and they are not shown either: a short key can be found by its digest."""


def shown(config: ServeConfig, provenance: Provenance, *, as_json: bool) -> str:
    """The merged configuration, and where each value came from."""
    values = config.model_dump(mode="json")
    if as_json:
        hidden = {name: f"{len(values[name])} hidden" for name in _SECRET}
        return json.dumps({"values": values | hidden, "sources": dict(_sources(values, provenance))}, indent=2)
    return "\n".join(line for name in _ordered(values) for line in _lines(name, values[name], provenance))


def _ordered(values: dict[str, Any]) -> list[str]:
    """Models first, then the fields in their order."""
    return sorted(values, key=lambda name: name != "models")


def _sources(values: dict[str, Any], provenance: Provenance) -> Iterator[tuple[str, str]]:
    for name in values:
        yield name, provenance.source((name,)).where
    for index, entry in enumerate(values["models"]):
        for name in entry:
            yield f"models.{index}.{name}", provenance.source(("models", index, name)).where


def _lines(name: str, value: Any, provenance: Provenance) -> Iterator[str]:
    """YAML that a file may hold, each value with its source as a comment."""
    source = provenance.source((name,)).where
    if name in _SECRET:
        yield f"# {name}: {len(value)} hidden  # {source}"
    elif name == "models" and value:
        yield "models:"
        for index, entry in enumerate(value):
            for number, (part, inner) in enumerate(entry.items()):
                where = provenance.source(("models", index, part)).where
                yield f"{'  - ' if number == 0 else '    '}{_yaml(part, inner)}  # {where}"
            if not entry:
                yield "  - {}"
    else:
        yield f"{_yaml(name, value)}  # {source}"


def _yaml(name: str, value: Any) -> str:
    """``name: value`` on one line, in JSON but for plain words: so ``no`` and ``1e3`` are texts to every reader."""
    plain = isinstance(value, str) and value.replace("_", "").isalpha() and yaml.safe_load(value) == value
    return f"{name}: {value if plain else json.dumps(value, ensure_ascii=False)}"


def as_json_option() -> click.Parameter:
    return click.Option(["--json"], is_flag=True, help="Values and sources as one JSON object.")
