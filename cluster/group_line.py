"""GroupLine: a gateway's requests at one worker group. How the group is reached is a subclass's concern."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from ..worker.messages import Request, SequenceUpdate
from .token_stream import GroupLost, TokenStream

logger = logging.getLogger(__name__)


class GroupLine(ABC):
    """Belongs to the event loop that its streams are read in."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._streams: dict[str, TokenStream] = {}
        self._weights: dict[str, int] = {}

    @abstractmethod
    async def submit(self, request: Request) -> TokenStream:
        """Hand over a request."""

    @abstractmethod
    def _send_abort(self, request_id: str, branch: int | None) -> None:
        """Let the group end a request, or one branch of it. Never blocks."""

    def forget(self, request_id: str) -> None:
        """The request has ended, or nobody wants its tokens."""
        self._streams.pop(request_id, None)
        self._weights.pop(request_id, None)

    def abort(self, request_id: str) -> None:
        """Forget the request and let the group end it. Never blocks."""
        if request_id in self._streams:
            self._send_abort(request_id, None)
        self.forget(request_id)

    def abort_branch(self, request_id: str, branch: int) -> None:
        """Let the group end one branch of a request that has others. Never blocks."""
        if request_id in self._streams:
            self._send_abort(request_id, branch)

    @property
    def outstanding_tokens(self) -> int:
        """Prompt and output tokens that this gateway has asked of the group and not seen finished."""
        return sum(self._weights.values())

    @property
    def is_idle(self) -> bool:
        """No request is under way here."""
        return not self._streams

    def _open(self, request: Request) -> TokenStream:
        """The request is under way."""
        stream = TokenStream({branch.index: len(branch.output_token_ids) for branch in request.branches})
        self._streams[request.request_id] = stream
        self._weights[request.request_id] = _weight(request)
        return stream

    def _deliver(self, update: SequenceUpdate) -> None:
        stream = self._streams.get(update.request_id)
        if stream is not None and not stream.put(update):
            logger.error("tokens of %s before position %d are missing", update.request_id, update.position)
            self.abort(update.request_id)
            stream.lose(GroupLost(is_dead=False))

    def _lose_streams(self, *, is_dead: bool) -> None:
        """Nothing comes any more."""
        for stream in self._streams.values():
            stream.lose(GroupLost(is_dead=is_dead))
        self._streams.clear()
        self._weights.clear()


def num_sequences(request: Request) -> int:
    """Sequences that the request runs: the beams of its search, or its branches."""
    return request.sampling.beam_width or len(request.branches)


def _weight(request: Request) -> int:
    """Tokens that the request may cost: its prompt once, and the output of every sequence."""
    return len(request.prompt_token_ids) + request.sampling.max_tokens * num_sequences(request)
