"""What the text of a chat's answer is made of: content, reasoning, tool calls, and who takes them apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one tool call; the first has ``id`` and ``name``, and ``arguments`` add up to one JSON text."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What some text adds to a message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def __add__(self, later: MessageDelta) -> MessageDelta:
        return MessageDelta(
            self.content + later.content, self.reasoning + later.reasoning, self.tool_calls + later.tool_calls
        )


class MessageParser(Protocol):
    """Takes one choice's text apart while it arrives. What it gave is never taken back."""

    @property
    def has_tool_calls(self) -> bool:
        """A tool call has been given: a text that ends by itself then has the finish reason tool_calls."""
        ...

    def push(self, text: str) -> MessageDelta: ...

    def finish(self, *, is_cut: bool) -> MessageDelta:
        """What was held back: the text is over. ``is_cut``: by a limit, so that more would have come; else it ended by
        itself, or where a stop string said."""
        ...


class PlainMessage:
    """All text is content."""

    has_tool_calls = False

    def push(self, text: str) -> MessageDelta:
        return MessageDelta(content=text)

    def finish(self, *, is_cut: bool) -> MessageDelta:
        return MessageDelta()
