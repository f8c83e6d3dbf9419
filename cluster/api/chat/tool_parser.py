"""What the parsers of tool calls have in common: when a call is given, and what becomes of the text around it."""

from __future__ import annotations

import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from ..answer.message import MessageDelta, ToolCallDelta
from .call_reader import CallReader, ObjectCall
from .marks import Marks

_LETTERS = string.ascii_letters + string.digits
_NUM_LETTERS = 24
_NUM_MISTRAL_LETTERS = 9
"""What Mistral's templates demand when the call comes back to them."""


def call_id() -> str:
    return "call_" + _random(_NUM_LETTERS)


def mistral_call_id() -> str:
    return _random(_NUM_MISTRAL_LETTERS)


def _random(num_letters: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(num_letters))


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """What a parser has to know of the request."""

    names: frozenset[str]
    max_calls: int | None = None
    """Calls beyond it are dropped: with parallel_tool_calls false, 1."""
    are_forced: bool = False
    """A grammar sees to it that the text is calls and nothing else: what is none is a part of one, never content."""


@dataclass(slots=True)
class _Pending:
    """What one ``push`` gives."""

    content: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)


class ToolParser(ABC):
    """A state machine over the text that has not been understood yet. A state is a method that takes some of
    ``self._text`` and says whether it could; it names the next state. Where it cannot, more text must come."""

    TAG: ClassVar[str]
    """Announces a call."""
    new_id: Callable[[], str] = staticmethod(call_id)

    def __init__(self, tools: OfferedTools) -> None:
        self._tools = tools
        self._text = ""
        self._state: Callable[[], bool] = self._begin
        self._reader: CallReader | None = None
        self._prefix = ""
        """What came before the object that is being read, to be given as content with it if it is no call."""
        self._blank = ""
        """White space that is given once it is not followed by a call."""
        self._num_calls = 0
        self._is_given = False
        self._has_content = False
        self._pending = _Pending()

    @property
    def has_tool_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> MessageDelta:
        self._text += text
        while self._state():
            pass
        return self._take()

    def finish(self, *, is_cut: bool) -> MessageDelta:
        """See ``tool_parsers.py`` for what becomes of a call that could not be given."""
        held = self._prefix + self._text
        if self._reader is not None:
            self._give_arguments(self._reader)
            held = "" if self._is_given else self._prefix + self._reader.finish()
        if not (is_cut and self._expects_call()):
            self._give_content(held)
            self._pending.content.append("" if self._num_calls else self._blank)
        self._text = self._prefix = self._blank = ""
        self._reader = None
        return self._take()

    def _expects_call(self) -> bool:
        """Whether text that is held back is a part of a call. Behind a call, also what may only be about to become the
        mark of the next."""
        return self._num_calls > 0 or self.TAG in self._prefix

    @abstractmethod
    def _begin(self) -> bool:
        """The state at the beginning of the text."""

    @abstractmethod
    def _after_call(self) -> bool:
        """The state behind a call."""

    def _plain(self) -> bool:
        """The state in which all text is content for good."""
        self._give_content(self._text)
        self._text = ""
        return False

    def _read_call(self) -> bool:
        reader = self._reader
        if reader is None or not self._text:
            return False
        rest = reader.push(self._text)
        self._text = ""
        self._give_arguments(reader)
        if not (reader.is_over or reader.failed):
            return False
        self._reader = None
        if reader.failed and not self._is_given:
            self._give_content(self._prefix + reader.finish())
        self._text, self._prefix = rest, ""
        self._state = self._after_failure if reader.failed else self._after_call
        return True

    def _after_failure(self) -> bool:
        self._state = self._begin
        return True

    def _start_call(self, reader: CallReader) -> bool:
        self._reader, self._is_given = reader, False
        self._state = self._read_call
        return True

    def _object_call(self, *, is_marked: bool) -> bool:
        return self._start_call(ObjectCall(self._tools.names, is_marked=is_marked))

    def _no_call(self, state: Callable[[], bool]) -> bool:
        """What looked like the beginning of a call is content; ``self._text`` goes on from there."""
        self._give_content(self._prefix)
        self._prefix = ""
        self._state = state
        return True

    def _find_mark(self, marks: Marks, found: Callable[[], bool]) -> bool:
        """Give the text before the next mark, and go on with ``found`` behind it; False: there is none so far."""
        before, mark, self._text = marks.split(self._text)
        self._give_content(before)
        if mark is None:
            return False
        self._prefix, self._state = mark, found
        return True

    def _skip_blank(self) -> None:
        """Move white space at the beginning of the text to the prefix."""
        rest = self._text.lstrip()
        self._prefix += self._text[: len(self._text) - len(rest)]
        self._text = rest

    def _give_content(self, text: str) -> None:
        if self._tools.are_forced:
            return
        kept = (self._blank + text).rstrip()
        whole = self._blank + text
        self._blank = whole[len(kept) :]
        if kept and self._num_calls and not self._has_content:
            kept = kept.lstrip()
        if kept:
            self._has_content = True
            self._pending.content.append(kept)

    def _give_arguments(self, reader: CallReader) -> None:
        if reader.name is None:
            return
        is_first, self._is_given = not self._is_given, True
        if is_first:
            self._blank = ""
            self._num_calls += 1
        arguments = reader.take_arguments()
        index = self._num_calls - 1
        if self._tools.max_calls is not None and index >= self._tools.max_calls:
            return
        if is_first:
            self._pending.calls.append(ToolCallDelta(index, arguments, self.new_id(), reader.name))
        elif arguments:
            self._pending.calls.append(ToolCallDelta(index, arguments))

    def _take(self) -> MessageDelta:
        pending, self._pending = self._pending, _Pending()
        return MessageDelta("".join(pending.content), tool_calls=tuple(pending.calls))
