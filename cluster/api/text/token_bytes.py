"""What each token of a vocabulary stands for, in bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import decoders

_BLANK = "▁"
"""How sentencepiece vocabularies write a blank."""
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class _Table(dict[int, bytes]):
    """Token id → bytes, each found when it is first asked for."""

    def __init__(self, find: Callable[[int], bytes]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._find(token_id)
        return found


class TokenBytes:
    """Made from a ``tokenizers`` object. An id that the tokenizer does not know (a row of the model without a token)
    stands for nothing.

    ``is_byte_level``: the text of a sequence is the UTF-8 of its tokens' bytes one after the other, as in the
    vocabularies of GPT-2 and most that came after it. In others a token's text may depend on those before it (a first
    blank is dropped, for instance), and these are the bytes that it has in the middle of a text.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._special = frozenset(token_id for token_id, token in self._added.items() if token.special)
        steps = json.dumps(json.loads(backend.decoder.__getstate__()) if backend.decoder else None, ensure_ascii=False)
        self._has_byte_pieces = '"ByteFallback"' in steps
        self._marks_blanks = _BLANK in steps
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.all = _Table(self._find)
        """Those of special tokens are their names."""
        self.without_special = _Table(lambda token_id: b"" if token_id in self._special else self.all[token_id])
        """Special tokens stand for nothing."""

    def text(self, token_id: int) -> str:
        """With replacement characters for bytes that are no text by themselves."""
        return self.all[token_id].decode(errors="replace")

    def _find(self, token_id: int) -> bytes:
        piece: str | None = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self.is_byte_level:
            return _from_alphabet(piece)
        if token_id in self._added:
            return piece.encode()
        if self._has_byte_pieces and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(byte[1])
        if self._marks_blanks:
            return piece.replace(_BLANK, " ").encode()
        return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with: a byte that is a visible character of Latin-1 is
    that one, the others are those from U+0100 on (Radford et al. 2019, GPT-2)."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _from_alphabet(piece: str) -> bytes:
    """As ``tokenizers`` does it: a piece with any other character, an added token, is its own text."""
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:
        return piece.encode()
