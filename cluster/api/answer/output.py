"""One choice's output: token deltas in, text out, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....worker.messages import FinishReason, TokenLogprobs
from ..chat.reasoning import ReasoningTokens
from ..service import TokenDelta
from ..text.detokenizer import Detokenizer
from .stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class OutputToken:
    """A token of the output as the answer tells of it."""

    token_id: int
    offset: int
    """Characters of the output before the first one that the token has a part in."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """What ends an output, and what is left of it."""

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()
    include: bool = False
    """The stop string stays at the end of the text; so does a stop token's text, but for the model's own ends."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's own ends."""
    min_tokens: int = 0
    """Stop strings are not looked for in the text of so many first tokens."""


class OutputText:
    """Detokenizes one branch, watches for stop strings and counts its tokens.

    ``num_tokens`` counts up to the token that ended the output, the end-of-sequence token or the one that completed a
    stop string included, whatever the engine generated beyond it. With ``keeps_tokens`` each token that is counted is
    given once by ``take_tokens``.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        ends: Ends,
        *,
        keeps_tokens: bool = False,
        reasoning: ReasoningTokens | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._reasoning = reasoning
        self._ends = ends
        self._stops = StopStrings(ends.strings, include=ends.include)
        self._tokens: list[OutputToken] | None = [] if keeps_tokens else None
        """Not given yet."""
        self._num_chars = 0
        """Of the detokenized text."""
        self._num_sent_chars = 0
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        """With ``FinishReason.STOP``: the stop string, or the stop token's id if it is not one of the model's ends."""
        self._is_watched = bool(ends.strings) or keeps_tokens or reasoning is not None
        """Its text is looked at, or told token by token."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None where there can be none."""
        return None if self._reasoning is None else self._reasoning.num_tokens

    def push(self, delta: TokenDelta) -> str:
        """The text that can be sent after ``delta``; ``finish_reason`` is set when it is the last."""
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.finish_reason is None and not self._is_watched:  # nearly always
            self.num_tokens += len(delta.token_ids)
            return "".join(map(self._detokenizer.push, delta.token_ids))
        text = self._push_tokens(delta)
        if self.finish_reason is None and delta.finish_reason is not None:
            text += self._finish(delta.finish_reason)
        self._num_sent_chars += len(text)
        return text

    def take_tokens(self) -> tuple[OutputToken, ...]:
        """The tokens whose text has begun to be sent since the last call; after the end, all that are left.

        So a token waits as long as its text does, for a stop string or the rest of a character. Offsets are within the
        text: tokens of a stop string that was cut off stand at its end.
        """
        if not self._tokens:
            return ()
        if self.finish_reason is not None:
            num, end = len(self._tokens), self._num_sent_chars
            taken = tuple(token if token.offset <= end else replace(token, offset=end) for token in self._tokens)
        else:
            waiting = (num for num, token in enumerate(self._tokens) if token.offset >= self._num_sent_chars)
            num = next(waiting, len(self._tokens))
            taken = tuple(self._tokens[:num])
        del self._tokens[:num]
        return taken

    def _push_tokens(self, delta: TokenDelta) -> str:
        text = ""
        stop_position = len(delta.token_ids) - 1 if delta.finish_reason is FinishReason.STOP else None
        for position, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            if self._tokens is not None:
                logprobs = delta.logprobs[position] if delta.logprobs else None
                self._tokens.append(OutputToken(token_id, self._num_chars, logprobs))
            if position == stop_position and self._is_hidden_stop(token_id):
                break
            piece = self._detokenizer.push(token_id)
            if self._reasoning is not None:
                self._reasoning.push(piece)
            text += self._accept(piece)
            if self.finish_reason is not None:
                break
        return text

    def _is_hidden_stop(self, token_id: int) -> bool:
        """Whether the token that ended the output is a stop token, and its text no part of the output."""
        if token_id in self._ends.eos_token_ids:
            return True
        if token_id not in self._ends.token_ids:
            return False
        self.stop_reason = token_id
        return not self._ends.include

    def _accept(self, text: str) -> str:
        self._num_chars += len(text)
        if not self._ends.strings or self.num_tokens <= self._ends.min_tokens:
            return text
        text = self._stops.push(text)
        if self._stops.found is not None:
            self.finish_reason = FinishReason.STOP
            self.stop_reason = self._stops.found
        return text

    def _finish(self, reason: FinishReason) -> str:
        text = self._accept(self._detokenizer.flush())
        if self.finish_reason is None:
            self.finish_reason = reason
            text += self._stops.flush()
        return text
