"""What a streamed answer says, read as it comes: server-sent events of ``/v1/completions`` or of chats."""

from __future__ import annotations

from typing import Any

import orjson

_DATA, _DONE = b"data:", b"[DONE]"


class BrokenAnswer(Exception):
    """The stream holds an error, or what is no event of such an answer."""


class AnswerStream:
    """``feed`` it what arrives, with the time."""

    def __init__(self) -> None:
        self.token_times_s: list[float] = []
        self.usage: dict[str, Any] = {}
        self.is_over = False
        """A choice has said why it ended, or the stream that it does."""
        self._rest = b""
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """Of the first choice."""
        return "".join(self._texts)

    def feed(self, data: bytes, now_s: float) -> None:
        """Raises BrokenAnswer."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._note(line[len(_DATA) :].strip(), now_s)

    def _note(self, event: bytes, now_s: float) -> None:
        if event == _DONE:
            self.is_over = True
            return
        try:
            self._note_chunk(orjson.loads(event), now_s)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BrokenAnswer(f"no chunk of an answer: {event[:200]!r}") from error

    def _note_chunk(self, chunk: dict[str, Any], now_s: float) -> None:
        if "error" in chunk:
            raise BrokenAnswer(_message(chunk["error"]))
        self.usage = chunk.get("usage") or self.usage
        has_text = False
        for choice in chunk["choices"]:
            text, has_more = _content(choice)
            has_text = has_text or has_more
            self.is_over = self.is_over or bool(choice.get("finish_reason"))
            if text and not choice.get("index"):
                self._texts.append(text)
        if has_text or (self.is_over and not self.token_times_s):
            self.token_times_s.append(now_s)


def _content(choice: dict[str, Any]) -> tuple[str, bool]:
    """Text of the answer proper, and whether there is anything that was generated."""
    if (text := choice.get("text")) is not None:
        return text, bool(text)
    delta = choice.get("delta") or {}
    content = delta.get("content") or ""
    thought = delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
    return content, bool(content or thought)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
