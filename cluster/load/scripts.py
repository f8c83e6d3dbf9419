"""What a load consists of: scripts, each of one or several turns of somebody who talks to the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. It goes out ``pause_s`` after the answer to the turn before it, with that answer's real text."""

    text: str
    num_output_tokens: int
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Script:
    """``system`` is what scripts may have in common: the beginning of every prompt; empty where there is none."""

    system: str
    turns: tuple[Turn, ...]
    arrival_s: float | None = None
    """Recorded, since the start of the trace."""


@dataclass(slots=True)
class Talk:
    """A script while it is played: its prompt grows with each turn and each answer."""

    script: Script
    _parts: list[tuple[str, str]] = field(default_factory=list)
    """(role, text)"""

    def __post_init__(self) -> None:
        if self.script.system:
            self._parts.append(("system", self.script.system))

    def ask(self, turn: Turn) -> None:
        self._parts.append(("user", turn.text))

    def note_answer(self, text: str) -> None:
        self._parts.append(("assistant", text))

    def messages(self) -> list[Message]:
        """For ``/v1/chat/completions``."""
        return [{"role": role, "content": text} for role, text in self._parts]

    def prompt(self) -> str:
        """For ``/v1/completions``: one text. An answer brings its own space, if it begins with a word."""
        pieces: list[str] = []
        for role, text in self._parts:
            pieces.append(f" {text}" if pieces and role != "assistant" else text)
        return "".join(pieces)

    def fields(self, *, is_chat: bool) -> dict[str, Any]:
        return {"messages": self.messages()} if is_chat else {"prompt": self.prompt()}
