"""Admission: whether the queue has room for another request, decided without asking the engine."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from .engine import Engine
from .messages import Request
from .speed import SpeedMeter


class Bound(enum.Enum):
    """What a queue can have too much of; the value is the setting's name."""

    REQUESTS = "max_queued_requests"
    TOKENS = "max_queued_tokens"


@dataclass(frozen=True, slots=True)
class Refusal:
    """The queue is full."""

    message: str
    """Names the flag, the limit and what waits."""
    retry_after_s: float
    """Estimate of when the prompts that wait now are computed."""


class Admission:
    """Queued are requests that were never admitted to a batch: those that the engine had when ``note`` was called last,
    and those let in since that it has not taken yet.

    Not safe for use by two threads at once: the owner holds a lock. A bound of None is none.
    """

    def __init__(self, max_queued_requests: int | None, max_queued_tokens: int | None) -> None:
        self.num_refused = dict.fromkeys(Bound, 0)
        self._max_requests = max_queued_requests
        self._max_tokens = max_queued_tokens
        self.num_requests_on_way = 0
        """Let in, and not taken yet."""
        self._num_slots_on_way = self._num_tokens_on_way = 0
        self._num_requests_in_engine = self._num_tokens_in_engine = 0
        self._num_free_slots = self._num_free_tokens = 0
        """What the engine's batch and its KV pool have room for."""
        self._num_uncomputed_tokens = 0
        """Of all prompts that the engine has."""
        self._speed = SpeedMeter()

    @property
    def num_queued_requests(self) -> int:
        return self._num_requests_in_engine + self.num_requests_on_way

    @property
    def num_queued_tokens(self) -> int:
        """Tokens of the prompts that wait."""
        return self._num_tokens_in_engine + self._num_tokens_on_way

    def let_in(self, request: Request) -> Refusal | None:
        """Count ``request`` as on its way, or say why not.

        One that need not wait is not refused, nor any with nothing queued, however long it is, nor one that has been
        let in elsewhere.
        """
        num_tokens = len(request.prompt_token_ids)
        must_wait = self.num_queued_requests > 0 and not self._has_room(num_tokens) and request.attempt == 1
        if must_wait and (refusal := self._judge(num_tokens)):
            return refusal
        self.num_requests_on_way += 1
        self._num_slots_on_way += _num_slots(request)
        self._num_tokens_on_way += num_tokens
        return None

    def note(self, engine: Engine, taken: Iterable[Request]) -> None:
        """The engine as it is now, having taken these requests since the last call."""
        for request in taken:
            self.num_requests_on_way -= 1
            self._num_slots_on_way -= _num_slots(request)
            self._num_tokens_on_way -= len(request.prompt_token_ids)
        scheduler = engine.scheduler
        self._num_requests_in_engine = scheduler.num_queued_requests
        self._num_tokens_in_engine = scheduler.num_queued_tokens
        self._num_free_slots = scheduler.num_free_slots
        self._num_free_tokens = scheduler.num_coming_blocks * scheduler.limits.block_size
        self._num_uncomputed_tokens = scheduler.num_uncomputed_prompt_tokens
        self._speed = engine.speed

    def _has_room(self, num_tokens: int) -> bool:
        """Whether all on their way, and this one, go into the batch at once."""
        return (
            self._num_requests_in_engine == 0
            and self._num_slots_on_way < self._num_free_slots
            and self._num_tokens_on_way + num_tokens <= self._num_free_tokens
        )

    def _judge(self, num_tokens: int) -> Refusal | None:
        num_requests, num_waiting = self.num_queued_requests, self.num_queued_tokens
        if self._max_requests is not None and num_requests >= self._max_requests:
            waiting = "1 request waits" if num_requests == 1 else f"{num_requests} requests wait"
            return self._refuse(Bound.REQUESTS, f"--max-queued-requests is {self._max_requests} and {waiting}")
        if self._max_tokens is not None and num_waiting + num_tokens > self._max_tokens:
            return self._refuse(
                Bound.TOKENS,
                f"--max-queued-tokens is {self._max_tokens}, prompts of {num_waiting} tokens wait "
                f"and this one has {num_tokens}",
            )
        return None

    def _refuse(self, bound: Bound, message: str) -> Refusal:
        self.num_refused[bound] += 1
        return Refusal(message, self._speed.retry_after_s(self._num_uncomputed_tokens + self._num_tokens_on_way))


def _num_slots(request: Request) -> int:
    """Places in the batch that it takes once its prompt is computed."""
    return request.sampling.beam_width or len(request.branches)
