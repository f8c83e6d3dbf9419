"""msgpack encoding of frozen dataclasses, by position.

A message travels as ``[kind, version, field, field, …]``. A later version only appends fields that have defaults: an
older reader ignores what it does not know, a newer reader fills in what is not there. Anything else is a new kind, and
so is another default: fields at the end that have theirs are not sent. Nearly all of what is told of a token is such.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import operator
import types
import typing
from collections.abc import Callable
from typing import Any

import msgpack

WIRE_VERSION = 1

_UNICODE_ERRORS = "surrogatepass"
"""JSON can spell half of a surrogate pair; a salt or an id with one in it must travel like any other."""

T = typing.TypeVar("T")


class WireError(ValueError):
    """The bytes are not a message of the kind that was expected."""


def pack(message: Any) -> bytes:
    """Encode a dataclass instance whose class has a ``KIND`` (a short string)."""
    kind: Any = type(message)
    wire = [kind.KIND, WIRE_VERSION, *_dataclass_encoder(kind)(message)]
    return typing.cast(bytes, msgpack.packb(wire, unicode_errors=_UNICODE_ERRORS))


def unpack(data: bytes, kind: type[T]) -> T:
    """Decode one message of class ``kind``. Raises WireError when the bytes are something else."""
    return unpack_any(data, (kind,))


def unpack_any(data: bytes, kinds: tuple[type[T], ...]) -> T:
    """Decode one message of one of these classes. Raises WireError when the bytes are something else."""
    expected: Any = kinds
    names = "".join(f", {kind.KIND!r}" for kind in expected)[2:]
    try:
        head, _version, *fields = _array(msgpack.unpackb(data, use_list=False, unicode_errors=_UNICODE_ERRORS))
        for kind in expected:
            if head == kind.KIND:
                return typing.cast(T, _decoder(kind)(tuple(fields)))
    except (ValueError, TypeError, LookupError) as error:
        raise WireError(f"not a message {names}: {error}") from error
    raise WireError(f"expected a message {names}, got {head!r}")


@functools.cache
def _dataclass_encoder(kind: Any) -> Callable[[Any], list[Any]]:
    """A function that gives the fields of such a dataclass as msgpack takes them, its tag before them if it has one."""
    names, defaults = _field_names(kind), _last_defaults(kind)
    hints = typing.get_type_hints(kind, include_extras=True)
    encoders = [_encoder(hints[name]) for name in names]
    composed = [(index, encoder) for index, encoder in enumerate(encoders) if encoder is not _same]
    fields_of, tag = _fields_of(names), [kind.TAG] if hasattr(kind, "TAG") else []

    def encode(message: Any) -> list[Any]:
        values = list(fields_of(message))
        for default in defaults:
            if values[-1] is not default:  # equal would not be enough: True equals 1
                break
            values.pop()
        for index, encoder in composed:
            if index >= len(values):
                break
            values[index] = encoder(values[index])
        return tag + values if tag else values

    return encode


def _fields_of(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda message: tuple(getattr(message, name) for name in names)


@functools.cache
def _encoder(annotation: Any) -> Callable[[Any], Any]:
    """A function that gives a value of the annotated type as msgpack takes it."""
    origin = typing.get_origin(annotation)
    if origin is tuple:
        item = _encoder(typing.get_args(annotation)[0])
        return _same if item is _same else lambda items: [item(value) for value in items]
    if origin in (types.UnionType, typing.Union):
        return _union_encoder(typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return operator.attrgetter("value")
    if dataclasses.is_dataclass(annotation):
        return _dataclass_encoder(typing.cast(type, annotation))
    return _same


def _union_encoder(members: tuple[Any, ...]) -> Callable[[Any], Any]:
    encoders = {member: _encoder(member) for member in members if member is not type(None)}
    if len(encoders) > 1:
        return lambda value: encoders[type(value)](value)
    (inner,) = encoders.values()
    return inner if inner is _same else lambda value: None if value is None else inner(value)


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _last_defaults(kind: type) -> tuple[Any, ...]:
    """Of the fields from the last one back, as far as they have a constant one."""
    defaults = [field.default for field in reversed(dataclasses.fields(kind))]
    return tuple(itertools.takewhile(lambda default: default is not dataclasses.MISSING, defaults))


@functools.cache
def _decoder(annotation: Any) -> Callable[[Any], Any]:
    """A function that turns what msgpack gives back into a value of the annotated type.

    ``Annotated[type, check]``: the value goes through ``check``, which raises ValueError when it is none.
    """
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        inner, check = _decoder(annotation.__origin__), annotation.__metadata__[0]
        return lambda value: check(inner(value))
    if origin is tuple:
        item = _decoder(typing.get_args(annotation)[0])
        return _array if item is _same else lambda items: tuple([item(value) for value in _array(items)])
    if origin in (types.UnionType, typing.Union):
        return _union_decoder(typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return annotation
    if dataclasses.is_dataclass(annotation):
        return _dataclass_decoder(typing.cast(type, annotation))
    return _same


def _same(value: Any) -> Any:
    """A scalar: whatever msgpack found. Both ends are ours, so its type is not looked at."""
    return value


def _array(value: Any) -> tuple[Any, ...]:
    if not isinstance(value, tuple):
        raise TypeError(f"expected an array, got {type(value).__name__}")
    return value


def _dataclass_decoder(kind: type) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    decoders = [_decoder(hints[name]) for name in _field_names(kind)]
    composed = [(index, decoder) for index, decoder in enumerate(decoders) if decoder is not _same]

    def decode(fields: Any) -> Any:
        values = list(_array(fields)[: len(decoders)])
        for index, decoder in composed:
            if index >= len(values):
                break
            values[index] = decoder(values[index])
        return kind(*values)

    return decode


def _union_decoder(members: tuple[Any, ...]) -> Callable[[Any], Any]:
    """``X | None``, or a union of dataclasses that carry a ``TAG``, which then comes first on the wire."""
    kinds = [member for member in members if member is not type(None)]
    if len(kinds) == 1:
        inner = _decoder(kinds[0])
        return inner if inner is _same else lambda value: None if value is None else inner(value)
    by_tag = {kind.TAG: _decoder(kind) for kind in kinds}
    return lambda value: by_tag[value[0]](value[1:])
