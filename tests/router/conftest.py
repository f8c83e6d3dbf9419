"""A worker group as the router sees it: a prefix cache that evicts tails first, and the reports of its leader."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from octavo.router.config import RouterConfig
from octavo.router.router import Router
from octavo.worker.messages import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    GroupReport,
    KVEvents,
    RequestProgress,
    RouteDecision,
    RouteQueries,
    RouteQuery,
)
from octavo.worker.routing_hash import RoutingHasher, pack_hashes, unpack_hashes

BLOCK_SIZE = 4
HASHER = RoutingHasher(bytes(range(16)), BLOCK_SIZE)


class Leader:
    """Keeps a prefix-closed cache of at most ``capacity`` blocks and tells of it what a leader tells."""

    def __init__(self, group: str = "a", generation: int = 1, capacity: int = 1000, model: str = "m") -> None:
        self.group, self.generation, self.capacity, self.model = group, generation, capacity, model
        self.parents: dict[int, int | None] = {}
        self.last_number = -1
        self.messages: list[KVEvents] = []
        self.progress: list[RequestProgress] = []
        self.draining = False
        self.num_uncomputed = 0
        self.num_running = 0
        self.rate = 1000.0
        self.step_s = 0.01

    def tell(self, *events: BlocksStored | BlocksRemoved | BlocksCleared) -> None:
        self.last_number += 1
        self.messages.append(KVEvents(self.generation, self.last_number, events))

    def tell_snapshot(self) -> None:
        self.last_number = max(self.last_number, 0)  # as the first of all messages
        events = tuple(BlocksStored(parent, pack_hashes([value])) for value, parent in self.parents.items())
        self.messages.append(KVEvents(self.generation, self.last_number, events, is_snapshot=True))

    def compute(self, query: RouteQuery) -> int:
        """Prefill a request; the prompt tokens that were cached."""
        hashes = unpack_hashes(query.routing_hashes).tolist()
        depth = next((i for i, value in enumerate(hashes) if value not in self.parents), len(hashes))
        usable = min(depth, max(0, query.num_prompt_tokens - 1) // BLOCK_SIZE)
        new = hashes[depth:]
        self.evict(len(self.parents) + len(new) - self.capacity, keep=set(hashes[:depth]))
        for index, value in enumerate(new, start=depth):
            self.parents[value] = hashes[index - 1] if index else None
        if new:
            self.tell(BlocksStored(hashes[depth - 1] if depth else None, pack_hashes(new)))
        self.progress.append(RequestProgress(query.request_id, True, False, usable * BLOCK_SIZE))
        return usable * BLOCK_SIZE

    def evict(self, count: int, keep: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """Give up ``count`` blocks, no block before its children."""
        for _ in range(count):
            inner = set(self.parents.values()) | keep
            leaf = next(value for value in self.parents if value not in inner)
            del self.parents[leaf]
            self.tell(BlocksRemoved(pack_hashes([leaf])))

    def clear(self) -> None:
        self.parents.clear()
        self.tell(BlocksCleared())

    def report(self) -> GroupReport:
        """All that is new since the last one."""
        messages, progress = tuple(self.messages), tuple(self.progress)
        self.messages, self.progress = [], []
        return GroupReport(
            model=self.model,
            group=self.group,
            generation=self.generation,
            block_size=BLOCK_SIZE,
            num_blocks=self.capacity,
            num_free_blocks=self.capacity,
            max_num_seqs=16,
            num_running=self.num_running,
            num_waiting=0,
            num_uncomputed_prompt_tokens=self.num_uncomputed,
            prefill_tokens_per_s=self.rate,
            decode_step_s=self.step_s,
            draining=self.draining,
            progress=progress,
            events=messages,
        )

    def report_to(self, router: Router, now: float) -> None:
        """Report, and send the snapshot if it is asked for, as a leader does with its next report."""
        if router.report(self.report(), now):
            self.tell_snapshot()
            router.report(self.report(), now)


class Asker:
    """Asks a router one query at a time."""

    def __init__(self) -> None:
        self.count = 0

    def query(self, tokens: list[int], **fields: object) -> RouteQuery:
        self.count += 1
        hashes = pack_hashes(HASHER.hash_blocks(tokens))
        values = {"request_id": f"r{self.count}", "model": "m", "max_tokens": 16} | fields
        return RouteQuery(routing_hashes=hashes, num_prompt_tokens=len(tokens), **values)  # type: ignore[arg-type]

    def ask(self, router: Router, query: RouteQuery, now: float) -> RouteDecision:
        (decision,) = router.route(RouteQueries("g", (query,)), now).decisions
        return decision


@pytest.fixture(scope="session")
def new_leader() -> Callable[..., Leader]:
    return Leader


@pytest.fixture(scope="session")
def asker() -> Asker:
    return Asker()


@pytest.fixture(scope="session")
def new_router() -> Callable[..., Router]:
    def create(**settings: float) -> Router:
        return Router(RouterConfig(**{"max_queued_requests": None} | settings), random.Random(0))  # type: ignore[arg-type]

    return create
