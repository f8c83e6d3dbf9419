"""Reasoning split off: what a model thinks between two marks before it answers.

| form | marks |
|---|---|
| think | ``<think>``, ``</think>`` |
| mistral | ``[THINK]``, ``[/THINK]`` |

Some templates write the first mark themselves, at the end of the prompt. Without it there, a text that does not begin
with it has no reasoning: once sent, content is not taken back. White space at both ends of the reasoning, and before
the answer, is dropped. A text that ends before the second mark is all reasoning.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..answer.message import MessageDelta, MessageParser, PlainMessage
from .marks import Marks, WithoutMarks

ReasoningForm = Literal["think", "mistral"]
"""The form in which a model thinks."""
ReasoningParser = Literal["auto", "none"] | ReasoningForm
"""What the operator says of it."""


@dataclass(frozen=True, slots=True)
class ThinkMarks:
    """What reasoning begins and ends with."""

    open: str
    close: str


THINK, MISTRAL = ThinkMarks("<think>", "</think>"), ThinkMarks("[THINK]", "[/THINK]")
THINK_MARKS: dict[ReasoningForm, ThinkMarks] = {"think": THINK, "mistral": MISTRAL}


class Thinking(enum.Enum):
    """Where reasoning stands when a prompt ends."""

    OPEN = "open"
    """The prompt ends within it."""
    POSSIBLE = "possible"
    """The output may begin with it."""
    OVER = "over"
    """The prompt has had it, or the model does not think."""


def thinking_after(prompt: str, marks: ThinkMarks = THINK) -> Thinking:
    if prompt.rstrip().endswith(marks.open):
        return Thinking.OPEN
    return Thinking.OVER if prompt.rstrip().endswith(marks.close) else Thinking.POSSIBLE


def thinking_within(message: str, marks: ThinkMarks = THINK) -> Thinking:
    """Of a message that is continued."""
    return Thinking.OPEN if message.rfind(marks.open) > message.rfind(marks.close) else Thinking.OVER


class ThinkParser:
    """Splits reasoning off; the answer goes to ``answer``. With ``show`` false the reasoning is dropped."""

    def __init__(self, answer: MessageParser, *, is_open: bool, show: bool = True, marks: ThinkMarks = THINK) -> None:
        self._answer = answer
        self._open, self._close = marks.open, Marks([marks.close])
        self._show = show
        self._held = ""
        self._blank = ""
        self._has_reasoning = False
        self.has_begun = is_open
        """There is reasoning, perhaps an empty one."""
        self._state: Callable[[], MessageDelta] = self._think if is_open else self._begin

    @property
    def is_over(self) -> bool:
        """No reasoning can follow any more."""
        return self._state not in (self._begin, self._think)

    @property
    def has_tool_calls(self) -> bool:
        return self._answer.has_tool_calls

    def push(self, text: str) -> MessageDelta:
        self._held += text
        return self._state()

    def finish(self, *, is_cut: bool) -> MessageDelta:
        if self._state == self._think:
            return self._reasoning(self._held)
        return self._answer.push(self._held) + self._answer.finish(is_cut=is_cut)

    def _begin(self) -> MessageDelta:
        start = self._held.lstrip()
        if start != self._open and self._open.startswith(start):
            return MessageDelta()
        if start.startswith(self._open):
            self._held, self._state = start.removeprefix(self._open), self._think
            self.has_begun = True
        else:
            self._state = self._pass_on
        return self._state()

    def _think(self) -> MessageDelta:
        before, mark, self._held = self._close.split(self._held)
        thought = self._reasoning(before)
        if mark is None:
            return thought
        self._state = self._before_answer
        return thought + self._state()

    def _reasoning(self, text: str) -> MessageDelta:
        """Its white space waits until more of it follows."""
        whole = self._blank + text
        kept = whole.rstrip()
        self._blank = whole[len(kept) :]
        if not self._has_reasoning:
            kept = kept.lstrip()
        self._has_reasoning = self._has_reasoning or bool(kept)
        return MessageDelta(reasoning=kept if self._show else "")

    def _before_answer(self) -> MessageDelta:
        self._held = self._held.lstrip()
        if not self._held:
            return MessageDelta()
        self._state = self._pass_on
        return self._state()

    def _pass_on(self) -> MessageDelta:
        text, self._held = self._held, ""
        return self._answer.push(text)


class ReasoningTokens:
    """Counts those of an output that are reasoning: up to the one that completes the second mark, or all without it.

    Tokens are told one by one, so that the count does not depend on how many arrive together.
    """

    def __init__(self, *, is_open: bool, hidden: Marks | None = None, marks: ThinkMarks = THINK) -> None:
        """``hidden``: marks that are no part of the text, see ``WithoutMarks``."""
        self._thinking = ThinkParser(PlainMessage(), is_open=is_open, marks=marks)
        self._parser: MessageParser = self._thinking if hidden is None else WithoutMarks(hidden, self._thinking)
        self._num_read = 0

    @property
    def num_tokens(self) -> int:
        return self._num_read if self._thinking.has_begun else 0

    def push(self, text: str) -> None:
        """The text that one token has added."""
        if not self._thinking.is_over:
            self._num_read += 1
            self._parser.push(text)
