"""Case BUG-093: a router's memory has a bound, whatever is asked and whoever comes and goes."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import psutil

from octavo.router.router import Router
from octavo.worker.messages import BlocksRemoved, BlocksStored, RequestProgress, RouteQueries, RouteQuery
from octavo.worker.routing_hash import pack_hashes

LIMIT_BYTES = 1 << 20
BLOCKS_OF_PROMPT = 32
PROMPTS_AT_A_GROUP = 1_000
PROMPTS_BETWEEN_REPORTS = 50
SLACK_BYTES = 6 << 20
"""What a process may grow by for other reasons; an index of all prompts would be more than twice that."""


class Groups:
    """Worker groups that compute nothing, keep the last prompts they got, and say so to the router."""

    def __init__(self, router: Router, new_leader: Any) -> None:
        self.router, self._new_leader = router, new_leader
        self._leaders: dict[int, Any] = {}
        self._kept: dict[int, deque[bytes]] = {}
        self._rng = np.random.default_rng(0)
        self._count = 0
        self.now = 0.0

    def join(self) -> int:
        """Another group; its generation."""
        self._count += 1
        self._leaders[self._count] = self._new_leader(f"group-{self._count}", self._count, capacity=1_000_000)
        self._kept[self._count] = deque()
        self.report()
        return self._count

    def leave(self, generation: int) -> None:
        """It is silent from now on, and the others are not."""
        del self._leaders[generation]
        for _ in range(7):
            self.now += 1.0
            self.report()

    def report(self) -> None:
        for leader in self._leaders.values():
            leader.report_to(self.router, self.now)

    def serve(self, count: int) -> bytes:
        """So many prompts of 2 kB that have nothing in common; the last one's hashes."""
        for number in range(count):
            hashes = pack_hashes(self._rng.integers(0, 2**64, BLOCKS_OF_PROMPT, dtype=np.uint64))
            self._take(hashes, f"{self.now}-{number}")
            if number % PROMPTS_BETWEEN_REPORTS == 0:
                self.now += 0.1
                self.report()
        self.report()
        return hashes

    def _take(self, hashes: bytes, request_id: str) -> None:
        generation = self.route(hashes, request_id).generation
        leader, kept = self._leaders[generation], self._kept[generation]
        kept.append(hashes)
        leader.tell(BlocksStored(None, hashes))
        if len(kept) > PROMPTS_AT_A_GROUP:
            leader.tell(BlocksRemoved(kept.popleft()))
        leader.progress.append(RequestProgress(request_id, True, True, 0))

    def route(self, hashes: bytes, request_id: str) -> Any:
        query = RouteQuery(
            request_id=request_id, model="m", max_tokens=1, routing_hashes=hashes, num_prompt_tokens=4 * 33
        )
        (decision,) = self.router.route(RouteQueries("g", (query,)), self.now).decisions
        return decision


def gauge(router: Router, name: str) -> float:
    (line,) = [line for line in router.metrics_text().splitlines() if line.startswith(f"octavo_router_{name}")]
    return float(line.rsplit(" ", 1)[1])


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def test_prompts_that_never_come_again_take_no_memory(new_router: Any, new_leader: Any) -> None:
    """Of all groups together, at most the limit; recent prompts are still found where they are."""
    router = new_router(max_index_bytes=LIMIT_BYTES)
    groups = Groups(router, new_leader)
    for _ in range(4):
        groups.join()
    groups.serve(5_000)
    before = rss()
    last = groups.serve(12_000)
    assert rss() - before < SLACK_BYTES
    assert gauge(router, "index_bytes") <= LIMIT_BYTES
    assert gauge(router, "index_stride") > 1
    assert gauge(router, "predicted_blocks") <= PROMPTS_BETWEEN_REPORTS * BLOCKS_OF_PROMPT
    assert groups.route(last, "again").expected_cached_tokens > 0
    router.check()


def test_nothing_is_left_of_groups_that_have_gone(new_router: Any, new_leader: Any) -> None:
    """Fifty come and go, one after the other, beside one that stays."""
    router = new_router(max_index_bytes=LIMIT_BYTES)
    groups = Groups(router, new_leader)
    groups.join()
    groups.serve(60)
    entries, memory = [], []
    for _ in range(50):
        generation = groups.join()
        groups.serve(60)
        groups.leave(generation)
        entries.append(gauge(router, "index_entries"))
        memory.append(rss())
    assert memory[-1] - memory[10] < SLACK_BYTES
    assert gauge(router, "index_bytes") <= LIMIT_BYTES
    assert len(router.registry(groups.now).entries) == 1
    assert max(entries) < 25 * 60 * BLOCKS_OF_PROMPT, "half of what those that have gone had"
    router.check()
