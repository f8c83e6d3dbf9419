"""The flags of ``octavo serve``, made from the fields of ServeConfig: one place says what can be set."""

from __future__ import annotations

import inspect
import typing
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from .config_errors import flag
from .config_fields import plain_type

NO_FLAG = frozenset({"models"})
"""Fields that only a file can say."""

_METAVARS: dict[Any, str] = {
    int: "INTEGER",
    float: "NUMBER",
    ByteSize: "SIZE",
    Path: "PATH",
    str: "TEXT",
    dict: "JSON",
    tuple: "TEXT",
}


def config_parameters(config: type[BaseModel]) -> list[click.Parameter]:
    """One parameter for each field: ``model`` is the argument, a bool a pair of flags, a tuple an option that may be
    given again, the rest options. A class's own fields come before those that it inherits. In front of them is
    ``--config``, the file that says what flags do not.

    Values stay text: pydantic converts and judges them, so that a flag and a file meet the same rules and messages.
    """
    fields = [item for item in config.model_fields.items() if item[0] not in NO_FLAG]
    fields.sort(key=lambda item: _generation(config, item[0]))
    return [_config_file(), *(_parameter(name, field) for name, field in fields)]


def _config_file() -> click.Parameter:
    help_ = "YAML file with the same settings, underscores for dashes; octavo config schema has them all."
    return click.Option(["--config"], default=None, metavar="FILE", help=help_)


def _generation(config: type[BaseModel], name: str) -> int:
    """How far up the classes the field is declared."""
    return next(index for index, parent in enumerate(config.__mro__) if name in inspect.get_annotations(parent))


def given_values(ctx: click.Context, config: type[BaseModel]) -> dict[str, Any]:
    """What the user typed of ``config``, by field. The command may have other parameters of its own."""
    return {name: value for name, value in ctx.params.items() if name in config.model_fields and _is_given(ctx, name)}


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _parameter(name: str, field: FieldInfo) -> click.Parameter:
    if name == "model":
        return click.Argument([name], required=False)
    kind = plain_type(field.annotation)
    names = f"{flag(name)}/--no-{flag(name)[2:]}" if kind is bool else flag(name)
    several = typing.get_origin(kind) is tuple
    return click.Option([names], default=None, multiple=several, metavar=_metavar(kind), help=_help(field))


def _metavar(kind: Any) -> str | None:
    if typing.get_origin(kind) is typing.Literal:
        return f"[{'|'.join(map(str, typing.get_args(kind)))}]"
    return _METAVARS.get(typing.get_origin(kind) or kind)


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    if field.default in (None, ()) or field.default_factory is not None:
        return text
    return f"{text}  [default: {_shown(field.default)}]"


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, ByteSize):
        return default.human_readable().replace(".0", "")
    if isinstance(default, tuple):
        return ", ".join(default)
    return f"{default:g}" if isinstance(default, float) else str(default)
