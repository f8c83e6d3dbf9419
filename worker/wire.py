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
    wire = [message.KIND, WIRE_VERSION, *_encoder(type(message))(message)]
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
def _encoder(kind: type) -> Callable[[Any], list[Any]]:
    """A function that gives the fields of such a dataclass as msgpack takes them."""
    names, defaults = _field_names(kind), _last_defaults(kind)
    fields_of = operator.attrgetter(*names) if len(names) > 1 else lambda message: (getattr(message, names[0]),)
    hints = typing.get_type_hints(kind, include_extras=True)
    composed = [i for i, name in enumerate(names) if _decoder(hints[name]) not in (_same, _array)]

    def encode(message: Any) -> list[Any]:
        values = list(fields_of(message))
        for default in defaults:
            if values[-1] is not default:  # equal would not be enough: True equals 1
                break
            values.pop()
        for index in composed:
            if index >= len(values):
                break
            values[index] = _to_wire(values[index])
        return values

    return encode


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@functools.cache
def _last_defaults(kind: type) -> tuple[Any, ...]:
    """Of the fields from the last one back, as far as they have a constant one."""
    defaults = [field.default for field in reversed(dataclasses.fields(kind))]
    return tuple(itertools.takewhile(lambda default: default is not dataclasses.MISSING, defaults))


def _to_wire(value: Any) -> Any:
    if value is None or type(value) in (int, float, str, bytes, bool):
        return value
    if isinstance(value, tuple):
        if value and type(value[0]) is int:
            return value
        return [_to_wire(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    tag = [value.TAG] if hasattr(value, "TAG") else []
    return tag + _encoder(type(value))(value)


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
