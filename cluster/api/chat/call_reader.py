"""One tool call, read while it arrives: until it is certain to be one, nothing of it is given; then its arguments are,
as they come."""

from __future__ import annotations

import json
from collections.abc import Set
from typing import Protocol

from .json_object import JsonObject, MalformedJson, Member

_ARGUMENTS = ("arguments", "parameters")
_MEMBERS = frozenset({"name", "type", "id", *_ARGUMENTS})


class CallReader(Protocol):
    """``push`` gives what is not part of the call: once ``is_over`` or ``failed``, what comes behind it."""

    name: str | None
    """Set once the call can be given."""
    is_over: bool
    failed: bool

    def push(self, text: str) -> str: ...

    def take_arguments(self) -> str:
        """The JSON text that has become certain since the last time; of a call with a ``name``."""
        ...

    def finish(self) -> str:
        """The text is over, or the reader failed: what was read, if the call was never given; else nothing."""
        ...


class ObjectCall:
    """``{"name": "…", "arguments": {…}}``, in any order; ``parameters`` is the same, and so is JSON text of the object.

    Names that the request has no tool for make it no call. With ``is_marked`` the text around it has said that it is
    one: then there may be other members, and the arguments may be missing.
    """

    def __init__(self, names: Set[str], *, is_marked: bool) -> None:
        self.name: str | None = None
        self.is_over = False
        self.failed = False
        self._names = names
        self._is_marked = is_marked
        self._object = JsonObject()
        self._raw = ""
        self._decoded: str | None = None
        """The arguments, where they are not simply a part of the object's text."""
        self._num_taken = 0

    def push(self, text: str) -> str:
        rest = text
        try:
            while rest and not self._object.is_over:
                rest = self._object.push(rest)
                self._look()
        except MalformedJson:
            rest = self._object.unread or rest
            self._raw += text[: len(text) - len(rest)]
            return self._broken(rest)
        self._raw += text[: len(text) - len(rest)]
        self.is_over = self._object.is_over
        return rest

    def take_arguments(self) -> str:
        available = self._available()
        piece, self._num_taken = available[self._num_taken :], len(available)
        return piece

    def finish(self) -> str:
        return self._raw if self.name is None else ""

    def _look(self) -> None:
        """Give the call as soon as its name is known and its arguments have begun. Raises MalformedJson for no call."""
        members = self._object.members
        if self.name is not None:
            return
        if not self._is_marked and members.keys() - _MEMBERS:
            raise MalformedJson
        name = self._name_in(members.get("name"))
        if self._have_arguments(self._arguments()) and name is not None:
            self.name = name
        elif self._object.is_over:
            raise MalformedJson

    def _name_in(self, member: Member | None) -> str | None:
        if member is None or member.end is None:
            return None
        name = json.loads(self._object.text[member.start : member.end])
        if not isinstance(name, str) or name not in self._names:
            raise MalformedJson
        return name

    def _arguments(self) -> Member | None:
        return next((self._object.members[key] for key in _ARGUMENTS if key in self._object.members), None)

    def _have_arguments(self, member: Member | None) -> bool:
        if member is None:
            if self._object.is_over and self._is_marked:
                self._decoded = "{}"
            return self._decoded is not None
        if self._object.text[member.start] == "{":
            return True
        if member.end is not None:
            self._decoded = _decoded(self._object.text[member.start : member.end])
        return self._decoded is not None

    def _available(self) -> str:
        member = self._arguments()
        if self._decoded is not None or member is None:
            return self._decoded or ""
        return self._object.text[member.start : self._object.settled if member.end is None else member.end]

    def _broken(self, rest: str) -> str:
        """A call whose arguments are complete is one, whatever is missing behind them."""
        if self.name is None:
            self.failed = True
            return rest
        member = self._arguments()
        self.is_over = self._decoded is not None or (member is not None and member.end is not None)
        self.failed = not self.is_over
        return self._object.text[self._object.settled :]


class BareCall:
    """``{…}``: the arguments alone, behind a name that was said before."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name
        self.is_over = False
        self.failed = False
        self._object = JsonObject()
        self._num_taken = 0

    def push(self, text: str) -> str:
        rest = text
        try:
            while rest and not self._object.is_over:
                rest = self._object.push(rest)
        except MalformedJson:
            self.failed = True
            return self._object.text[self._object.settled :]
        self.is_over = self._object.is_over
        return rest

    def take_arguments(self) -> str:
        piece = self._object.text[self._num_taken : self._object.settled]
        self._num_taken = self._object.settled
        return piece

    def finish(self) -> str:
        return ""


def _decoded(text: str) -> str:
    """Arguments that came as JSON text in a string, or as null. Raises MalformedJson for anything else."""
    value = json.loads(text)
    if value is None or value == "":
        return "{}"
    if not isinstance(value, str):
        raise MalformedJson
    inner = BareCall("")
    if inner.push(value.strip()) or not inner.is_over:
        raise MalformedJson
    return inner.take_arguments()
