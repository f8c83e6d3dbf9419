"""A snapshot that comes in parts: the group is exact when the last one is there, and only if none is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from octavo.router.knowledge import GroupKnowledge, KnowledgeState
from octavo.router.router import Router
from octavo.worker.messages import BlocksStored, GroupReport, KVEvents
from octavo.worker.routing_hash import pack_hashes, unpack_hashes

PARTS = tuple(
    KVEvents(1, 4, (BlocksStored(number or None, pack_hashes([number + 1])),), True, part=number, num_parts=3)
    for number in range(3)
)


class Bench:
    def __init__(self, router: Router, report: GroupReport) -> None:
        self.router = router
        self._report = report

    def tell(self, *messages: KVEvents, now: float = 0.0) -> bool:
        """Whether a snapshot is asked for."""
        return self.router.report(replace(self._report, events=messages), now)

    @property
    def state(self) -> KnowledgeState:
        return self._knowledge.state

    def holds(self, block: int) -> bool:
        first = unpack_hashes(pack_hashes([block]))
        return bool(self.router.index.match(first, 1 << self._knowledge.slot))

    @property
    def _knowledge(self) -> GroupKnowledge:
        (pool,) = self.router.pools.values()
        return pool.groups["a"].knowledge


@pytest.fixture
def bench(new_router: Any, new_leader: Any) -> Bench:
    bench = Bench(new_router(snapshot_retry_s=1.0, group_timeout_s=100.0), new_leader().report())
    assert bench.tell()
    return bench


def test_it_is_exact_with_the_last_part(bench: Bench) -> None:
    for part in PARTS[:2]:
        bench.tell(part)
        assert bench.state is KnowledgeState.BLIND
    assert not bench.tell(PARTS[2])
    assert bench.state is KnowledgeState.EXACT
    assert bench.router.index.num_entries == 3
    assert bench.router.counters.snapshots == 1


def test_a_repeated_part_is_harmless(bench: Bench) -> None:
    for part in (PARTS[0], PARTS[0], PARTS[1], PARTS[1], PARTS[2], PARTS[2]):
        bench.tell(part)
    assert bench.state is KnowledgeState.EXACT
    assert bench.router.index.num_entries == 3


def test_a_missing_part_is_missed(bench: Bench) -> None:
    bench.tell(PARTS[0])
    bench.tell(PARTS[2])
    assert bench.state is KnowledgeState.BLIND
    assert bench.tell(now=5.0)


def test_a_router_that_began_in_the_middle_of_a_snapshot_asks_for_another(bench: Bench) -> None:
    assert bench.tell(PARTS[1], now=5.0)
    assert bench.tell(PARTS[2], now=10.0)
    assert bench.state is KnowledgeState.BLIND
    for part in PARTS:
        bench.tell(part)
    assert bench.state is KnowledgeState.EXACT


def test_nobody_asks_for_another_snapshot_while_one_is_coming_in(bench: Bench) -> None:
    assert not bench.tell(PARTS[0], now=5.0)
    assert not bench.tell(PARTS[1], now=10.0)
    assert bench.tell(now=11.5)  # the rest does not come


def test_a_snapshot_replaces_what_was_known_at_its_first_part(bench: Bench) -> None:
    bench.tell(KVEvents(1, 3, (BlocksStored(None, pack_hashes([77, 78])),)))
    assert bench.holds(77)
    bench.tell(PARTS[0])
    assert not bench.holds(77)
    assert bench.holds(1)
