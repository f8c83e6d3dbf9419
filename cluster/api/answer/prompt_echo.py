"""The prompt at the beginning of a completion that echoes it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ..text.processor import TextProcessor


class PromptEcho:
    """``said``: the prompt as it came; else its text is what its tokens say."""

    def __init__(
        self, token_ids: Sequence[int], text: TextProcessor, *, said: str | None, skip_special_tokens: bool
    ) -> None:
        self.token_ids = token_ids
        self.text = text.decode(token_ids, skip_special_tokens=skip_special_tokens) if said is None else said
        self._processor = text

    @cached_property
    def offsets(self) -> list[int]:
        """For each token of the prompt: the characters of ``text`` before the first one that it has a part in.

        Tokens that are no part of it, such as a begin-of-sequence token that was added, stand where the next one does.
        Where a tokenizer does not keep a text as it was, offsets are approximate.
        """
        whole, offsets = _written(self.token_ids, self._processor, skip_special_tokens=False)
        if whole.endswith(self.text):
            added = len(whole) - len(self.text)
            return [max(0, offset - added) for offset in offsets]
        _, offsets = _written(self.token_ids, self._processor, skip_special_tokens=True)
        return [min(offset, len(self.text)) for offset in offsets]


def _written(token_ids: Sequence[int], text: TextProcessor, *, skip_special_tokens: bool) -> tuple[str, list[int]]:
    """The text of a sequence, and where in it each token begins."""
    detokenizer = text.detokenizer((), skip_special_tokens=skip_special_tokens)
    pieces: list[str] = []
    offsets: list[int] = []
    num_chars = 0
    for token_id in token_ids:
        offsets.append(num_chars)
        pieces.append(detokenizer.push(token_id))
        num_chars += len(pieces[-1])
    pieces.append(detokenizer.flush())
    return "".join(pieces), offsets
