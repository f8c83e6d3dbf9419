"""One choice's output: token deltas in, text out, and how it ended."""

from __future__ import annotations

from ...worker.messages import FinishReason
from .detokenizer import Detokenizer, StopStrings
from .service import TokenDelta


class OutputText:
    """Detokenizes one branch, watches for stop strings and counts its tokens.

    ``num_tokens`` counts up to the token that ended the output, the end-of-sequence token or the one that completed a
    stop string included, whatever the engine generated beyond it. Stop strings are not looked for in the text of the
    first ``min_tokens`` tokens. The text of a stop token is not part of the output.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        *,
        min_tokens: int = 0,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, delta: TokenDelta) -> str:
        """The text that can be sent after ``delta``; ``finish_reason`` is set when it is the last."""
        if delta.num_cached_tokens is not None:
            self.num_cached_tokens = delta.num_cached_tokens
        text = self._push_tokens(delta)
        if self.finish_reason is None and delta.finish_reason is not None:
            text += self._finish(delta.finish_reason)
        return text

    def _push_tokens(self, delta: TokenDelta) -> str:
        text = ""
        last = len(delta.token_ids) - 1
        for position, token_id in enumerate(delta.token_ids):
            self.num_tokens += 1
            ended_by_token = position == last and delta.finish_reason is FinishReason.STOP
            if ended_by_token and token_id in self._stop_token_ids:
                break
            text += self._accept(self._detokenizer.push(token_id))
            if self.finish_reason is not None:
                break
        return text

    def _accept(self, text: str) -> str:
        if self.num_tokens <= self._min_tokens:
            return text
        text = self._stops.push(text)
        if self._stops.found is not None:
            self.finish_reason = FinishReason.STOP
        return text

    def _finish(self, reason: FinishReason) -> str:
        text = self._accept(self._detokenizer.flush())
        if self.finish_reason is None:
            self.finish_reason = reason
            text += self._stops.flush()
        return text
