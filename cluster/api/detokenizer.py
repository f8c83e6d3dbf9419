"""From token ids to text while they arrive: whole characters only, nothing ever taken back, stop strings cut out.

Both classes are plain state machines that are fed by ``output.py``. Since the answer that is not streamed is the
concatenation of the same pieces, streamed and unstreamed text are equal by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, or not yet."""
_CONTEXT_TOKENS = 8
"""Tokens of the prompt that decide how the first output token is written (a leading space, most of all)."""
_MAX_PENDING_TOKENS = 16
"""A character has at most four bytes, so a longer tail of undecodable tokens is no beginning of one."""


class Detokenizer:
    """Text of one sequence, token by token.

    Tokens are decoded in a window that begins at an earlier border between characters, so that the decoder sees enough
    on the left; text is what the window's text has more than was sent of it. Text that ends in a replacement character
    may be the beginning of a character and is kept until a token completes it or ``flush`` is called.

    ``decode`` turns token ids into text without special tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._border = len(self._window)
        """Window tokens before it are sent completely."""
        self._sent = decode(self._window) if self._window else ""
        """How much of the window's text is sent: always a beginning of it."""

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes, perhaps none."""
        self._window.append(token_id)
        text = self._window_text()
        if text.endswith(REPLACEMENT):
            return self._send_whole_characters(text)
        new = text[len(self._sent) :]
        if new or self._num_pending > _MAX_PENDING_TOKENS:
            self._advance(len(self._window))
        return new

    def flush(self) -> str:
        """What is still kept, replacement characters included: the sequence is over."""
        text = self._window_text()
        new = text[len(self._sent) :]
        self._advance(len(self._window))
        return new

    @property
    def _num_pending(self) -> int:
        return len(self._window) - self._border

    def _window_text(self) -> str:
        text = self._decode(self._window)
        if text.startswith(self._sent):
            return text
        # The new token made the decoder change its mind about text already sent, as byte tokens of sentencepiece
        # vocabularies do when their bytes turn out to be no UTF-8. What is sent stays; the pending tokens start afresh.
        self._advance(self._border, cut=True)
        return self._decode(self._window)

    def _send_whole_characters(self, text: str) -> str:
        whole = text.rstrip(REPLACEMENT)
        new = whole[len(self._sent) :]
        if new:
            self._sent = whole
        if self._num_pending > _MAX_PENDING_TOKENS:
            new += self._give_up(text)
        return new

    def _give_up(self, text: str) -> str:
        """Send undecodable bytes for what they are, up to a border that the tokens after it do not change."""
        for split in range(len(self._window) - 1, len(self._window) - 5, -1):
            head = self._decode(self._window[:split])
            if head.startswith(self._sent) and head + self._decode(self._window[split:]) == text:
                new = head[len(self._sent) :]
                self._advance(split, cut=True)
                return new
        return ""

    def _advance(self, border: int, *, cut: bool = False) -> None:
        """Move the border; the window then begins at the old border, or with ``cut`` at the new one."""
        start = border if cut else self._border
        del self._window[:start]
        self._border = border - start
        self._sent = self._decode(self._window[: self._border]) if self._border else ""


class StopStrings:
    """Finds the stop string that is completed first in a text that arrives in pieces, and keeps it from being sent.

    One Knuth-Morris-Pratt automaton for each stop string (Knuth, Morris, Pratt 1977): its state is the length of the
    longest suffix of the text that is a beginning of the stop string. The largest state is what has to be held back;
    no other text waits. Of several stop strings completed by the same character the longest counts.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._held = ""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """The text that can be sent now. After ``found`` is set nothing more is."""
        if not self._stops:
            return text
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            self.found = self._step(character)
            if self.found is not None:
                self._held = ""
                return buffer[: position - len(self.found)]
        border = len(buffer) - max(self._states)
        self._held = buffer[border:]
        return buffer[:border]

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Move every automaton by one character; the longest stop string that it completes, if any."""
        found: str | None = None
        for index, stop in enumerate(self._stops):
            state = self._states[index]
            while state and stop[state] != character:
                state = self._failures[index][state - 1]
            state += stop[state] == character
            self._states[index] = state
            if state == len(stop) and len(stop) > len(found or ""):
                found = stop
        return found


def _failure_table(stop: str) -> list[int]:
    """For each beginning of ``stop`` the length of its longest proper suffix that is again a beginning."""
    table = [0] * len(stop)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[position] != stop[length]:
            length = table[length - 1]
        length += stop[position] == stop[length]
        table[position] = length
    return table
