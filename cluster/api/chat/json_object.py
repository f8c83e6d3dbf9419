"""One JSON object, checked while it arrives, character by character: what is handed on of it is never taken back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_DEPTH = 128

_BLANKS = " \t\r\n"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_HEX = frozenset("0123456789abcdefABCDEF")


class MalformedJson(Exception):
    """What has arrived is not the beginning of a JSON object."""


@dataclass(slots=True)
class Member:
    """Where a member's value stands in the object's text. ``end`` is None until it is complete."""

    start: int
    end: int | None = None


class JsonObject:
    """A pushdown automaton for JSON (RFC 8259), of which the outermost value is an object.

    It takes one thing that is not JSON, because models write it: control characters in strings. ``text`` has them as
    escapes.
    """

    def __init__(self) -> None:
        self.text = ""
        """What was read."""
        self.settled = 0
        """So many characters of it are right whatever follows: not a number, word or escape that is still open."""
        self.members: dict[str, Member] = {}
        """Of the outermost object; of equal names the first."""
        self.is_over = False
        self._at = 0
        self._paused = False
        self._closers: list[str] = []
        """The brackets that are to be closed."""
        self._state: Callable[[str], None] = self._begin
        self._start = 0
        """Of the key, number or word that is being read."""
        self._num_hex = 0
        self._is_key = False
        self._key = ""
        self._current: Member | None = None

    def push(self, text: str) -> str:
        """Read on, to where a member's value begins or ends, or the object does; gives what was not read.

        Raises MalformedJson at the first character that is wrong; that one and what follows is then ``unread``.
        """
        self.text += text
        self._paused = False
        while self._at < len(self.text) and not self._paused:
            self._state(self.text[self._at])
        rest = self.unread
        self.text = self.text[: self._at]
        return rest

    @property
    def unread(self) -> str:
        return self.text[self._at :]

    def _go(self, state: Callable[[str], None], *, by: int = 1, settled: bool = True) -> None:
        self._state = state
        self._at += by
        if settled:
            self.settled = self._at

    def _skip_blank(self, character: str) -> bool:
        if character not in _BLANKS:
            return False
        self._go(self._state)
        return True

    def _begin(self, character: str) -> None:
        if character != "{":
            raise MalformedJson
        self._descend(character)

    def _value(self, character: str) -> None:
        if self._skip_blank(character):
            return
        if len(self._closers) == 1:
            self._current = self.members.setdefault(self._key, Member(self._at))
            self._paused = True
        if character == '"':
            self._is_key = False
            self._go(self._string)
        elif character in "{[":
            self._descend(character)
        elif character in _SCALAR_CHARS:
            self._start = self._at
            self._go(self._scalar, settled=False)
        else:
            raise MalformedJson

    def _descend(self, bracket: str) -> None:
        if len(self._closers) == MAX_DEPTH:
            raise MalformedJson
        self._closers.append("}" if bracket == "{" else "]")
        self._go(self._first_key if bracket == "{" else self._first_item)

    def _first_key(self, character: str) -> None:
        if character == "}":
            self._ascend()
        else:
            self._next_key(character)

    def _next_key(self, character: str) -> None:
        if self._skip_blank(character):
            return
        if character != '"':
            raise MalformedJson
        self._is_key, self._start = True, self._at
        self._go(self._string)

    def _first_item(self, character: str) -> None:
        if character == "]":
            self._ascend()
        elif not self._skip_blank(character):
            self._value(character)

    def _colon(self, character: str) -> None:
        if self._skip_blank(character):
            return
        if character != ":":
            raise MalformedJson
        self._go(self._value)

    def _after_value(self, character: str) -> None:
        if self._skip_blank(character):
            return
        if character == ",":
            self._go(self._next_key if self._closers[-1] == "}" else self._value)
        elif character == self._closers[-1]:
            self._ascend()
        else:
            raise MalformedJson

    def _ascend(self) -> None:
        self._closers.pop()
        self._go(self._after_value)
        self.is_over = self._paused = not self._closers
        self._end_value()

    def _end_value(self) -> None:
        if len(self._closers) == 1 and self._current is not None and self._current.end is None:
            self._current.end = self._at
            self._paused = True

    def _string(self, character: str) -> None:
        if character == '"':
            self._go(self._colon if self._is_key else self._after_value)
            if self._is_key:
                self._key = json.loads(self.text[self._start : self._at]) if len(self._closers) == 1 else ""
            else:
                self._end_value()
        elif character == "\\":
            self._go(self._escape, settled=False)
        elif character < " ":
            escaped = json.dumps(character)[1:-1]
            self.text = f"{self.text[: self._at]}{escaped}{self.text[self._at + 1 :]}"
            self._go(self._state, by=len(escaped))
        else:
            plain = _PLAIN.match(self.text, self._at)
            self._go(self._state, by=plain.end() - self._at if plain else 1)

    def _escape(self, character: str) -> None:
        if character == "u":
            self._num_hex = 0
            self._go(self._hex, settled=False)
        elif character in '"\\/bfnrt':
            self._go(self._string)
        else:
            raise MalformedJson

    def _hex(self, character: str) -> None:
        if character not in _HEX:
            raise MalformedJson
        self._num_hex += 1
        is_last = self._num_hex == 4
        self._go(self._string if is_last else self._hex, settled=is_last)

    def _scalar(self, character: str) -> None:
        if character in _SCALAR_CHARS:
            self._go(self._scalar, settled=False)
            return
        if _SCALAR.fullmatch(self.text, self._start, self._at) is None:
            raise MalformedJson
        self._end_value()
        self._go(self._after_value, by=0)
