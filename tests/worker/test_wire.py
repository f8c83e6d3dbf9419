"""The wire: every message comes back as it was, later versions are understood, and anything else is a WireError."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import types
import typing
from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from octavo.worker import messages
from octavo.worker.messages import FinishReason, KVEvents, Registry, Request, RouteQueries, SamplingParams, TokenFrame
from octavo.worker.wire import WireError, pack, unpack

KINDS = [kind for kind in vars(messages).values() if inspect.isclass(kind) and hasattr(kind, "KIND")]


def values_of(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type, with the ranges that travel: integers of 64 bits, any text, any number."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Annotated:  # packed hashes
        return st.binary(max_size=24).map(lambda data: data[: len(data) // 8 * 8])
    if typing.get_origin(annotation) is tuple:
        return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return st.one_of([values_of(argument) for argument in arguments])
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation, include_extras=True)
        fields = [field.name for field in dataclasses.fields(annotation)]
        return st.builds(typing.cast(type, annotation), **{name: values_of(hints[name]) for name in fields})
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    return {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(st.characters()),
        bytes: st.binary(max_size=20),
        bool: st.booleans(),
        type(None): st.none(),
    }[annotation]


every_message = st.one_of([values_of(kind) for kind in KINDS])


def test_every_kind_has_a_name_of_its_own() -> None:
    assert len(KINDS) >= 6
    assert len({kind.KIND for kind in KINDS}) == len(KINDS)


@given(every_message)
def test_a_message_comes_back_as_it_was(message: Any) -> None:
    again = unpack(pack(message), type(message))
    assert again == message  # a list would not equal the tuple that it was


@given(every_message)
def test_another_kind_is_refused_by_name(message: Any) -> None:
    other = next(kind for kind in KINDS if kind is not type(message))
    with pytest.raises(WireError, match=f"expected a message '{other.KIND}', got '{message.KIND}'"):
        unpack(pack(message), other)


# ---- versions ----


@dataclass(frozen=True)
class PartThen:
    number: int


@dataclass(frozen=True)
class PartNow:
    number: int
    note: str = "none"


@dataclass(frozen=True)
class MessageThen:
    KIND: ClassVar[str] = "growing"

    name: str
    parts: tuple[PartThen, ...]


@dataclass(frozen=True)
class MessageNow:
    KIND: ClassVar[str] = "growing"

    name: str
    parts: tuple[PartNow, ...]
    reason: FinishReason | None = None
    numbers: tuple[int, ...] = (1, 2)


def test_a_newer_reader_fills_in_what_was_not_there() -> None:
    old = MessageThen("a", (PartThen(1), PartThen(2)))
    assert unpack(pack(old), MessageNow) == MessageNow("a", (PartNow(1), PartNow(2)))


def test_an_older_reader_ignores_what_it_does_not_know() -> None:
    new = MessageNow("a", (PartNow(1, "x"),), FinishReason.STOP, (3,))
    assert unpack(pack(new), MessageThen) == MessageThen("a", (PartThen(1),))


def test_defaults_at_the_end_are_not_sent() -> None:
    assert msgpack.unpackb(pack(MessageNow("a", (PartNow(1),)))) == ["growing", 1, "a", [[1]]]
    assert msgpack.unpackb(pack(MessageNow("a", (), None, (3,)))) == ["growing", 1, "a", [], None, [3]]


def test_a_later_version_number_is_read_all_the_same() -> None:
    assert unpack(msgpack.packb(["growing", 7, "a", []]), MessageThen) == MessageThen("a", ())


def test_a_field_without_a_default_must_be_there() -> None:
    with pytest.raises(WireError, match="growing"):
        unpack(msgpack.packb(["growing", 1, "a"]), MessageThen)


# ---- garbage ----

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary() | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=5),
)


def read(data: bytes, kind: type) -> None:
    """Either it is a message, or it is a WireError: nothing else comes out."""
    with contextlib.suppress(WireError):
        assert isinstance(unpack(data, kind), kind)


@given(st.binary(max_size=200), st.sampled_from(KINDS))
@example(b"", Request)
@example(b"\xc1", Request)
@example(b"\xdd\xff\xff\xff\xff", Request)
@example(b"\x91" * 5_000, Request)
def test_garbage_bytes_are_a_wire_error(data: bytes, kind: type) -> None:
    with pytest.raises(WireError):
        unpack(data, kind)


@given(st.lists(anything, max_size=8), st.sampled_from(KINDS))
def test_the_right_kind_with_the_wrong_content_is_a_wire_error(fields: list[Any], kind: Any) -> None:
    read(msgpack.packb([kind.KIND, 1, *fields]), kind)


@given(every_message, st.data())
def test_a_damaged_message_is_a_wire_error(message: Any, data: st.DataObject) -> None:
    packed = bytearray(pack(message))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    read(bytes(packed), type(message))
    with pytest.raises(WireError):
        unpack(pack(message)[: data.draw(st.integers(0, len(packed) - 1))], type(message))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (TokenFrame, [1, 2, [["r", 0, 0, [5], "no such reason"]]]),
        (TokenFrame, [1, 2, "updates"]),
        (TokenFrame, [1, 2, ["update"]]),
        (KVEvents, [1, 2, [["no such event", []]]]),
        (KVEvents, [1, 2, [[]]]),
        (KVEvents, [1, 2, [3]]),
        (Registry, [{"a": 1}]),
    ],
)
def test_a_part_that_does_not_fit_is_a_wire_error(kind: Any, fields: list[Any]) -> None:
    with pytest.raises(WireError):
        unpack(msgpack.packb([kind.KIND, 1, *fields]), kind)


@pytest.mark.parametrize("hashes", [bytes(15), (1, 2), "hashes", None])
def test_hashes_that_are_not_whole_ones_are_a_wire_error(hashes: Any) -> None:
    with pytest.raises(WireError, match="routing hashes"):
        unpack(msgpack.packb([RouteQueries.KIND, 1, "g", [["r", "m", hashes, 3, 4]]]), RouteQueries)


def test_a_map_is_no_message() -> None:
    with pytest.raises(WireError, match="expected an array"):
        unpack(msgpack.packb({"registry": 1, "version": 1, "entries": ()}), Registry)


def test_half_a_surrogate_pair_travels() -> None:
    request = Request("r", "g", "m", (1,), b"", SamplingParams(max_tokens=1, seed=2**64 - 1), cache_salt="\ud800")
    assert unpack(pack(request), Request) == request
