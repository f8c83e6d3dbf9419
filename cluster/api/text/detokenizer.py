"""From token ids to text while they arrive: whole characters only, nothing ever taken back.

The classes are plain state machines that are fed by ``output.py``. Since the answer that is not streamed is the
concatenation of the same pieces, streamed and unstreamed text are equal by construction. Bytes at the end that are half
a character become one replacement character, as in the text of the whole sequence.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
"""What decoders write for bytes that are no character, or not yet."""
_CONTEXT_TOKENS = 8
"""Tokens of the prompt that decide how the first output token is written (a leading space, most of all)."""
_MAX_PENDING_TOKENS = 16
"""A character has at most four bytes, so a longer tail of undecodable tokens is no beginning of one."""


class Detokenizer(Protocol):
    """Text of one sequence, token by token."""

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes, perhaps none."""
        ...

    def flush(self) -> str:
        """What is still kept, replacement characters included: the sequence is over."""
        ...


class ByteDetokenizer:
    """For byte-level vocabularies: the text is the UTF-8 of all bytes, whatever the prompt was."""

    def __init__(self, bytes_of: Mapping[int, bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within_character = False

    def push(self, token_id: int) -> str:
        added = self._bytes_of[token_id]
        if not self._is_within_character:
            try:
                return added.decode()  # nearly always, and three times as fast
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(added)
        self._is_within_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """For vocabularies in which a token's text depends on its neighbours.

    Tokens are decoded in a window that begins at an earlier border between characters, so that the decoder sees enough
    on the left; text is what the window's text has more than was sent of it. Text that ends in a replacement character
    may be the beginning of a character and is kept until a token completes it or ``flush`` is called.

    ``decode`` turns token ids into text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._border = len(self._window)
        """Window tokens before it are sent completely."""
        self._sent = decode(self._window) if self._window else ""
        """How much of the window's text is sent: always a beginning of it."""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._window_text()
        if text.endswith(REPLACEMENT):
            return self._send_whole_characters(text)
        new = text[len(self._sent) :]
        if new or self._num_pending > _MAX_PENDING_TOKENS:
            self._advance(len(self._window))
        return new

    def flush(self) -> str:
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
