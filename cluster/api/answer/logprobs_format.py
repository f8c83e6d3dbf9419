"""Log-probabilities in the forms of OpenAI's two endpoints and of vLLM's ``prompt_logprobs``.

There is an entry for each output token that ``usage`` counts, also for the stop token and for those of a stop string
that was cut off: clients that judge an output need all of its tokens. A token without probability has -9999.0,
OpenAI's number for it; alternatives without are left out. Natural logarithms of the model's own distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....worker.messages import TokenLogprobs
from ..text.token_bytes import TokenBytes
from .output import OutputToken

FLOOR = -9999.0
Name = Callable[[int], str]


def namer(tokens: TokenBytes, *, as_ids: bool) -> Name:
    """How tokens are named: by their text, or as ``token_id:17``."""
    return _id_name if as_ids else tokens.text


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def chat_entries(tokens: Sequence[OutputToken], num: int, name: Name, bytes_of: TokenBytes) -> list[dict[str, Any]]:
    """``logprobs.content`` of a chat's choice, each with ``num`` alternatives, likeliest first."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token_id), "logprob": logprob, "bytes": list(bytes_of.all[token_id])}

    return [
        entry(token.token_id, _finite(judged.logprob))
        | {"top_logprobs": [entry(*alternative) for alternative in _alternatives(judged, num)]}
        for token, judged in _judged(tokens)
    ]


@dataclass(slots=True)
class CompletionLogprobs:
    """``logprobs`` of a completion's choice, growing.

    ``top_logprobs`` has the ``num`` likeliest tokens and, as at OpenAI, the token itself where it is not one of them.
    Where two have the same name, bytes that are no text by themselves most of all, the less likely one is called by its
    id.
    """

    num: int
    name: Name
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add_prompt(self, token_ids: Sequence[int], judged: Sequence[TokenLogprobs], offsets: Sequence[int]) -> None:
        """All of a prompt; nothing is known of its first token."""
        self.tokens.append(self.name(token_ids[0]))
        self.token_logprobs.append(None)
        self.top_logprobs.append(None)
        self.text_offset.append(offsets[0])
        for token_id, offset, each in zip(token_ids[1:], offsets[1:], judged, strict=True):
            self._add(token_id, offset, each)

    def add(self, tokens: Sequence[OutputToken], *, first_offset: int) -> None:
        """Output tokens; the output begins at ``first_offset`` of the choice's text."""
        for token, judged in _judged(tokens):
            self._add(token.token_id, first_offset + token.offset, judged)

    def body(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }

    def _add(self, token_id: int, offset: int, judged: TokenLogprobs) -> None:
        own = self.name(token_id)
        top: dict[str, float] = {}
        for other_id, logprob in _alternatives(judged, self.num):
            other = own if other_id == token_id else self.name(other_id)
            is_taken = other in top or (other == own and other_id != token_id)
            top[_id_name(other_id) if is_taken else other] = logprob
        top.setdefault(own, _finite(judged.logprob))
        self.tokens.append(own)
        self.token_logprobs.append(_finite(judged.logprob))
        self.top_logprobs.append(top)
        self.text_offset.append(offset)


def prompt_logprobs_body(
    token_ids: Sequence[int], judged: Sequence[TokenLogprobs], num: int, name: Name
) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: null for the first token; for each other one the token itself and the ``num``
    likeliest ones, by id."""
    entries: list[dict[str, Any] | None] = [None]
    for token_id, each in zip(token_ids[1:], judged, strict=True):
        ranked = [(token_id, each.rank, _finite(each.logprob))]
        ranked += [(other, rank, logprob) for rank, (other, logprob) in enumerate(_alternatives(each, num), start=1)]
        entry: dict[str, Any] = {}
        for other, rank, logprob in ranked:
            entry.setdefault(str(other), {"logprob": logprob, "rank": rank, "decoded_token": name(other)})
        entries.append(entry)
    return entries


def _alternatives(judged: TokenLogprobs, num: int) -> Iterator[tuple[int, float]]:
    pairs = zip(judged.top_token_ids[:num], judged.top_logprobs[:num], strict=True)
    return ((token_id, logprob) for token_id, logprob in pairs if math.isfinite(logprob))


def _judged(tokens: Sequence[OutputToken]) -> Iterator[tuple[OutputToken, TokenLogprobs]]:
    for token in tokens:
        if token.logprobs is None:
            raise RuntimeError(f"the engine gave no log-probability for token {token.token_id}")
        yield token, token.logprobs


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR
