"""Finding marks, such as ``<think>`` or a special token's text, in a text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..answer.message import MessageDelta, MessageParser


class Marks:
    """Looks for the first of some marks; of those that begin at the same place, the longest."""

    def __init__(self, marks: Iterable[str]) -> None:
        longest_first = sorted(marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._beginnings = {mark[:length] for mark in longest_first for length in range(1, len(mark))}
        self._max_held = max(map(len, longest_first), default=1) - 1

    def split(self, text: str) -> tuple[str, str | None, str]:
        """(text before the mark, the mark, what is behind it); without one, (text, None, what may become one)."""
        found = self._pattern.search(text)
        if found is not None and text[found.start() :] not in self._beginnings:
            return text[: found.start()], found.group(), text[found.end() :]
        held = self._num_held(text)
        return text[: len(text) - held], None, text[len(text) - held :]

    def _num_held(self, text: str) -> int:
        lengths = range(min(self._max_held, len(text)), 0, -1)
        return next((length for length in lengths if text[-length:] in self._beginnings), 0)


class WithoutMarks:
    """Leaves marks out, and hands the rest on: for a model whose special tokens have to be shown to ``parser``, which
    is only asked for some of them."""

    def __init__(self, marks: Marks, parser: MessageParser) -> None:
        self._marks = marks
        self._parser = parser
        self._held = ""

    @property
    def has_tool_calls(self) -> bool:
        return self._parser.has_tool_calls

    def push(self, text: str) -> MessageDelta:
        shown, self._held = [], self._held + text
        mark: str | None = ""
        while mark is not None:
            before, mark, self._held = self._marks.split(self._held)
            shown.append(before)
        return self._parser.push("".join(shown))

    def finish(self, *, is_cut: bool) -> MessageDelta:
        return self._parser.push(self._held) + self._parser.finish(is_cut=is_cut)
