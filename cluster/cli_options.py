"""The flags of ``octavo serve``, made from the fields of ServeConfig: one place says what can be set."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo

from .config_errors import flag

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
    given again, the rest options. A class's own fields come before those that it inherits.

    Values stay text: pydantic converts and judges them, so that a flag and a file meet the same rules and messages.
    """
    fields = sorted(config.model_fields.items(), key=lambda item: item[0] not in config.__annotations__)
    return [_parameter(name, field) for name, field in fields]


def given_values(ctx: click.Context) -> dict[str, Any]:
    """What the user typed, by field; everything else is left to the defaults of the configuration."""
    given = {name: value for name, value in ctx.params.items() if _is_given(ctx, name)}
    if given.get("model"):
        given["model"] = absolute_model(given["model"])
    return given


def absolute_model(model: str) -> str:
    """A model that is a path, absolute: the processes that read it run in other folders. A hub id as it is."""
    path = Path(model).expanduser()
    is_path = model.startswith((".", "~", "/")) or model.endswith(".gguf") or path.exists()
    return str(path.absolute()) if model and is_path else model


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _parameter(name: str, field: FieldInfo) -> click.Parameter:
    if name == "model":
        return click.Argument([name], required=False)
    kind = _plain_type(field.annotation)
    names = f"{flag(name)}/--no-{flag(name)[2:]}" if kind is bool else flag(name)
    several = typing.get_origin(kind) is tuple
    return click.Option([names], default=None, multiple=several, metavar=_metavar(kind), help=_help(field))


def _plain_type(annotation: Any) -> Any:
    """``int`` for ``int``, ``Annotated[int, …] | None`` and the like; a Literal as it is."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain_type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return next(_plain_type(part) for part in typing.get_args(annotation) if part is not type(None))
    return annotation


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
