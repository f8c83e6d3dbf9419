"""Where each setting comes from: a flag, else a variable, else the file, else the default.

``load_config`` is what every command that takes the configuration calls. ``Provenance`` knows who said what, so that an
error names the line, the variable or the flag that has to be changed.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from ..worker.errors import ConfigurationError
from .cli_options import given_values
from .config import ServeConfig
from .config_errors import dotted, field_of, flag, flag_place
from .config_file import ConfigFile, Location, read_config_file
from .config_paths import located
from .environment import PREFIX, setting_variables
from .model_settings import ModelSettings

_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*|^MODEL\b")
_ENTRY = re.compile(r"models\.(\d+): ")


@dataclass(frozen=True, slots=True)
class Source:
    """Who said a value."""

    kind: Literal["flag", "variable", "file", "args", "default"]
    where: str
    """``--port``, ``OCTAVO_PORT``, ``octavo.yaml:3``, ``args``, ``default``."""


_DEFAULT = Source("default", "default")


class Provenance:
    """The source of each value that was given; of all others it is the default."""

    def __init__(self, sources: Mapping[Location, Source]) -> None:
        self._sources = sources

    def source(self, location: Sequence[int | str]) -> Source:
        """Of the value, else of what it is part of."""
        for length in range(len(location), 0, -1):
            if (found := self._sources.get(tuple(location[:length]))) is not None:
                return found
        return _DEFAULT

    def place(self, location: Sequence[int | str]) -> str:
        """How an error about the value begins."""
        source, name = self.source(location), dotted(location)
        match source.kind:
            case "file" | "args":
                return f"{source.where}: {name}"
            case "variable":
                return ": ".join([source.where, *([dotted(location[1:])] if location[1:] else [])])
            case _:
                return flag_place(location)

    def named(self, message: str) -> str:
        """``message``, which speaks of flags, with the names that the user gave the values by."""
        entry = _ENTRY.match(message)
        if entry is None:
            return _FLAG.sub(lambda found: self._name(found, ()), message)
        at: Location = ("models", int(entry[1]))
        rest = _FLAG.sub(lambda found: self._name(found, at), message[entry.end() :])
        return f"{self.place(at)}: {rest}"

    def _name(self, found: re.Match[str], entry: Location) -> str:
        """Of one flag: at the head of an error with its place in front, else with the place in brackets."""
        field = field_of(found[0])
        is_of_entry = bool(entry) and field in ModelSettings.model_fields
        source = self.source((*entry, field)) if (*entry, field) in self._sources else self.source((field,))
        match source.kind:
            case "file" | "args" if found.start() == 0 and not entry:
                return self.place((field,))
            case "file":
                return f"{field} ({source.where})"
            case "variable":
                return source.where
            case "args":
                return field
            case _:
                return field if is_of_entry and source.kind == "default" else found[0]

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """A ConfigurationError from within names the places of values."""
        try:
            yield
        except ConfigurationError as error:
            raise ConfigurationError(self.named(str(error))) from error


def load_config(ctx: click.Context) -> tuple[ServeConfig, Provenance]:
    """What the command's flags, the environment and ``--config`` say together. The command's parameters are those of
    ``config_parameters``. Raises ConfigurationError for what is wrong in any of them."""
    path = ctx.params.get("config")
    file = None if path is None else read_config_file(path)
    return merge(given_values(ctx, ServeConfig), setting_values(), file)


def merge(
    flags: Mapping[str, Any], variables: Mapping[str, str], file: ConfigFile | None
) -> tuple[ServeConfig, Provenance]:
    """The configuration of all three, by field. Raises ConfigurationError."""
    values: dict[str, Any] = {}
    sources: dict[Location, Source] = {}
    if file is not None:
        values |= located(file.values, Path(file.path).expanduser().absolute().parent)
        sources |= {location: Source("file", f"{file.path}:{line}") for location, line in file.lines.items()}
    for given, kind in ((variables, "variable"), (flags, "flag")):
        values |= given
        sources = {location: source for location, source in sources.items() if location[0] not in given}
        sources |= {(name,): _said(name, kind) for name in given}
    return _parse(values, Provenance(sources))


def merge_args(args: Mapping[str, Any]) -> tuple[ServeConfig, Provenance]:
    """The configuration of a Serve config file's ``args``, which count as the file does. Raises ConfigurationError."""
    variables = setting_values()
    sources: dict[Location, Source] = {(name,): Source("args", "args") for name in args}
    sources |= {(name,): _said(name, "variable") for name in variables}
    return _parse({**args, **variables}, Provenance(sources))


def setting_values() -> dict[str, str]:
    """What the environment says, by field. Raises ConfigurationError on an unknown ``OCTAVO_…``."""
    texts = setting_variables()
    known = [variable(name) for name in ServeConfig.model_fields if name != "models"]
    if unknown := sorted(texts.keys() - known):
        raise ConfigurationError("; ".join(f"{name}: no such variable{_hint(name, known)}" for name in unknown))
    return {name.removeprefix(PREFIX).lower(): text for name, text in texts.items()}


def variable(field: str) -> str:
    """The environment variable of a field: ``OCTAVO_PORT`` of ``port``."""
    return PREFIX + field.upper()


def _said(name: str, kind: str) -> Source:
    return Source("variable", variable(name)) if kind == "variable" else Source("flag", flag(name))


def _hint(name: str, known: Sequence[str]) -> str:
    fields = [each.removeprefix(PREFIX) for each in known]
    if matches := difflib.get_close_matches(name.removeprefix(PREFIX).upper(), fields, n=1):
        return f", did you mean {PREFIX}{matches[0]}?"
    return f"; there is one for each setting of octavo serve, such as {variable('max_model_len')}"


def _parse(values: dict[str, Any], provenance: Provenance) -> tuple[ServeConfig, Provenance]:
    _check_overrides(values, provenance)
    with provenance.in_errors():
        return ServeConfig.parse(located(values, Path.cwd()), provenance.place), provenance


def _check_overrides(values: Mapping[str, Any], provenance: Provenance) -> None:
    """A flag or variable is the default of all models; where one of them has its own value, it would say nothing."""
    entries = values.get("models")
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        for name in entry if isinstance(entry, dict) else ():
            said = provenance.source((name,))
            if name in ModelSettings.model_fields and said.kind in ("flag", "variable"):
                raise ConfigurationError(
                    f"{said.where} says nothing for models.{index}, which has its own {name}"
                    f" ({provenance.source(('models', index, name)).where}); leave one of them out"
                )
