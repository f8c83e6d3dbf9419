"""Running: the requests that admission let go, each until it ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .fair_share import Level
from .model_queue import ModelQueue
from .tenants import Account

_MAX_ENDED = 16_384
"""Requests whose end is remembered, since another router's word of their beginning may come after it."""


@dataclass(slots=True, eq=False)
class RunningRequest:
    queue: ModelQueue
    account: Account
    level: Level | None
    """Where its output is counted as service; None if it began while nobody waited there."""
    began_s: float | None
    """None for those of other routers."""
    generation: int | None = None
    """Of its group; None until one is chosen."""


class Running:
    """By request, and by the generation of their groups."""

    def __init__(self) -> None:
        self._requests: dict[str, RunningRequest] = {}
        self._of_generation: dict[int, dict[str, None]] = {}
        self._ended: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def begin(self, request_id: str, request: RunningRequest) -> None:
        self._requests[request_id] = request
        self._ended.pop(request_id, None)

    def place(self, request_id: str, generation: int) -> None:
        """Its group, again after each attempt. Harmless for a request that does not run."""
        request = self._requests.get(request_id)
        if request is not None:
            self._forget_generation(request_id, request)
            request.generation = generation
            self._of_generation.setdefault(generation, {})[request_id] = None

    def remove(self, request_id: str) -> RunningRequest | None:
        """None for a request that does not run."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._forget_generation(request_id, request)
        return request

    def of_generation(self, generation: int) -> list[str]:
        return list(self._of_generation.get(generation, ()))

    def of_account(self, account: Account) -> int:
        """How many."""
        return sum(request.account is account for request in self._requests.values())

    def note_ended(self, request_id: str) -> None:
        """Its group says so."""
        self._ended[request_id] = None
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def has_ended(self, request_id: str) -> bool:
        """Whether it is known to have ended, lately."""
        return request_id in self._ended

    def check(self) -> None:
        """Raise AssertionError if the books do not balance."""
        placed = {name: generation for generation, names in self._of_generation.items() for name in names}
        known = {name: each.generation for name, each in self._requests.items() if each.generation is not None}
        if placed != known:
            raise AssertionError("admission's books do not balance: which group runs what")

    def _forget_generation(self, request_id: str, request: RunningRequest) -> None:
        if request.generation is not None:
            names = self._of_generation[request.generation]
            del names[request_id]
            if not names:
                del self._of_generation[request.generation]
