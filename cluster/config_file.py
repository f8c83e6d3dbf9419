"""Reads octavo.yaml: plain values, and the line that each of them stands in.

YAML 1.2's core schema: ``no``, ``on``, ``12:30`` and ``2026-01-01`` are texts. What is refused has one line that says
where: a name that is there twice, a tag, a tab for indentation, a file that ends too early.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml

from ..worker.errors import ConfigurationError

Location = tuple[str | int, ...]
"""The way to a value: names of settings and numbers of list entries, from the outside in."""

MOST_BYTES = 2**20
MOST_VALUES = 20_000
"""Aliases, which repeat a part of the file, can make a small file large."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    path: str
    """As the user named it."""
    values: dict[str, Any]
    lines: Mapping[Location, int]
    """Where each name or list entry stands, from 1."""


_WORDS: Mapping[str, tuple[str, str]] = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}
"""The pattern of each kind of word, and the characters that it begins with."""


def _loader() -> Any:
    """Only composes; its rules for what a word is are those of YAML 1.2."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # has no types
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    for name, (pattern, first) in _WORDS.items():
        beginnings = [*first, ""] if name == "null" else list(first)
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^(?:{pattern})$"), beginnings)
    return Loader


def read_config_file(path: str) -> ConfigFile:
    """Raises ConfigurationError that names the file and the line."""
    text = _decoded(path, _contents(path))
    try:
        root = yaml.compose(text, _loader())
    except yaml.MarkedYAMLError as error:
        raise ConfigurationError(_syntax(path, text, error)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigurationError(f"{path}:{line}: character {chr(error.character)!r} is not allowed in YAML") from None
    except RecursionError:
        raise ConfigurationError(f"{path}: is nested too deeply") from None
    if root is None:
        raise ConfigurationError(f"{path}: is empty; a file that sets nothing is {{}}")
    if not isinstance(root, yaml.MappingNode):
        raise ConfigurationError(f"{path}:{_line(root)}: must hold settings, one `name: value` a line")
    values, lines = _Values(path).of(root)
    return ConfigFile(path, values, lines)


def _contents(path: str) -> bytes:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(f"--config: {path or repr(path)} cannot be read: {reason}") from None
    if len(content) > MOST_BYTES:
        raise ConfigurationError(f"--config: {path} has more than {MOST_BYTES} bytes")
    return content


def _decoded(path: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}:{line}: is not UTF-8, which a configuration file must be (byte 0x{content[error.start]:02x})"
        ) from None


def _syntax(path: str, text: str, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    line = 1 if mark is None else min(mark.line, text.rstrip().count("\n")) + 1
    problem = error.problem or "is no YAML"
    if "'\\t'" in problem:
        problem = "a tab, where YAML takes blanks only"
    elif mark is not None and mark.index >= len(text.rstrip()):
        problem = f"the file ends too early: {problem}"
    if error.context and error.context_mark and error.context_mark.line + 1 != line:
        problem = f"{problem} ({error.context}, from line {error.context_mark.line + 1})"
    return f"{path}:{line}: {problem}"


class _Values:
    """Turns nodes into values, once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_values = 0
        self._lines: dict[Location, int] = {}

    def of(self, root: yaml.MappingNode) -> tuple[dict[str, Any], dict[Location, int]]:
        return self._mapping(root, ()), self._lines

    def _value(self, node: yaml.Node, at: Location) -> Any:
        self._num_values += 1
        if self._num_values > MOST_VALUES or len(at) > 100:  # also where an alias names what it is in
            raise self._error(node, f"more than {MOST_VALUES} values, or lists within lists without an end")
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, at)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self._entry(entry, (*at, index)) for index, entry in enumerate(node.value)]
        convert = _CONVERSIONS.get(node.tag)
        if convert is None or not isinstance(node, yaml.ScalarNode):
            raise self._error(node, f"the tag {node.tag} is not allowed")
        try:
            return convert(node.value)
        except ValueError:
            raise self._error(node, f"{node.value[:40]} is not a value of its tag, or too long") from None

    def _entry(self, node: yaml.Node, at: Location) -> Any:
        self._lines[at] = _line(node)
        return self._value(node, at)

    def _mapping(self, node: yaml.MappingNode, at: Location) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, "the name of a setting must be a word")
            place = (*at, key.value)
            if key.value in values:
                raise self._error(key, f"{key.value} is there twice, first in line {self._lines[place]}")
            self._lines[place] = _line(key)
            values[key.value] = self._value(value, place)
        return values

    def _error(self, node: yaml.Node, problem: str) -> ConfigurationError:
        return ConfigurationError(f"{self._path}:{_line(node)}: {problem}")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _int(text: str) -> int:
    return int(text, 0) if text.startswith(("0x", "0o")) else int(text)


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_CONVERSIONS: Mapping[str, Callable[[str], Any]] = {
    "tag:yaml.org,2002:null": lambda _: None,
    "tag:yaml.org,2002:bool": _bool,
    "tag:yaml.org,2002:int": _int,
    "tag:yaml.org,2002:float": _float,
    "tag:yaml.org,2002:str": str,
}
