"""The block pool: every block is free, cached or held, and who waits longest goes first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.worker.block_pool import BlockPool


def full_of_cached(num_blocks: int) -> BlockPool:
    """All blocks findable and unused, block 0 first in the queue."""
    pool = BlockPool(num_blocks)
    for block in [pool.allocate() for _ in range(num_blocks)]:
        pool.set_findable(block)
        pool.release(block)
    return pool


def test_all_blocks_are_there_from_the_start() -> None:
    pool = BlockPool(3)
    assert pool.num_free_blocks == 3
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    assert pool.num_free_blocks == 0


def test_the_block_freed_last_is_taken_first() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.release(second)
    pool.release(first)
    assert pool.allocate() == first


def test_free_blocks_are_taken_before_a_findable_one_is_evicted() -> None:
    pool, evicted = BlockPool(2), list[int]()
    pool.call_on_evict(evicted.append)
    cached = pool.allocate()
    pool.set_findable(cached)
    pool.release(cached)
    assert pool.allocate() != cached
    assert evicted == []
    assert pool.allocate() == cached
    assert evicted == [cached]


def test_the_least_recently_used_block_is_evicted_first() -> None:
    pool, evicted = full_of_cached(3), list[int]()
    pool.call_on_evict(evicted.append)
    pool.share(0)
    pool.release(0)  # used again: last in the queue now
    assert [pool.allocate() for _ in range(3)] == evicted == [1, 2, 0]


def test_a_table_loses_its_tail_before_its_head() -> None:
    pool, evicted = BlockPool(3), list[int]()
    pool.call_on_evict(evicted.append)
    table = [pool.allocate() for _ in range(3)]
    for block in table:
        pool.set_findable(block)
    pool.release_all(table)
    for _ in range(3):
        pool.allocate()
    assert evicted == table[::-1]


def test_a_shared_block_is_held_until_the_last_table_lets_go() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.share(block)
    pool.release(block)
    assert (pool.num_free_blocks, pool.reference_count(block)) == (0, 1)
    pool.release(block)
    assert (pool.num_free_blocks, pool.reference_count(block)) == (1, 0)


def test_a_cached_block_that_is_shared_cannot_be_evicted() -> None:
    pool = full_of_cached(2)
    pool.share(0)
    assert pool.num_free_blocks == 1
    assert pool.allocate() == 1


def test_an_evicted_block_is_not_findable_when_it_is_released_again() -> None:
    pool = full_of_cached(1)
    pool.release(pool.allocate())
    assert pool.num_cached_blocks == 0
    pool.check([])


def test_releasing_too_often_is_noticed() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(RuntimeError, match="block 0 was released more often than it was taken"):
        pool.release(block)


def test_check_names_blocks_whose_count_differs_from_the_tables() -> None:
    pool = BlockPool(4)
    table = [pool.allocate(), pool.allocate()]
    pool.check([table])
    with pytest.raises(RuntimeError, match=r"\[1\]"):
        pool.check([table[:1]])  # a leak
    with pytest.raises(RuntimeError, match=r"\[0\]"):
        pool.check([table, table[:1]])  # named without a reference


class PoolAgainstLists(RuleBasedStateMachine):
    """The pool beside a model in which everything is a list."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.pool.call_on_evict(lambda block: self.evicted.append(block))
        self.num_blocks = num_blocks
        self.evicted: list[int] = []
        self.queue: list[int] = []
        self.findable: set[int] = set()
        self.tables: list[list[int]] = []

    @rule(want=st.integers(1, 4))
    def take(self, want: int) -> None:
        table = []
        for _ in range(min(want, self.pool.num_free_blocks)):
            table.append(self.pool.allocate())
            assert self.evicted == self.queue[: len(self.evicted)]
            del self.queue[: len(self.evicted)]
            self.findable.difference_update(self.evicted)
            self.evicted.clear()
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), num_findable=st.integers(0, 4))
    def make_findable(self, which: int, num_findable: int) -> None:
        for block in self.tables[which % len(self.tables)][:num_findable]:
            self.pool.set_findable(block)
            self.findable.add(block)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99), num_shared=st.integers(0, 4))
    def share_held(self, which: int, num_shared: int) -> None:
        self._share(self.tables[which % len(self.tables)][:num_shared])

    @precondition(lambda self: self.queue)
    @rule(which=st.integers(0, 99))
    def share_cached(self, which: int) -> None:
        self._share([self.queue[which % len(self.queue)]])

    def _share(self, blocks: list[int]) -> None:
        for block in blocks:
            self.pool.share(block)
        self.queue = [block for block in self.queue if block not in blocks]
        self.tables.append(list(blocks))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 99))
    def give_back(self, which: int) -> None:
        table = self.tables.pop(which % len(self.tables))
        self.pool.release_all(table)
        held = {block for other in self.tables for block in other}
        self.queue += [block for block in reversed(table) if block not in held and block in self.findable]

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check(self.tables)
        counts = Counter(block for table in self.tables for block in table)
        assert self.pool.num_free_blocks == self.num_blocks - len(counts)
        assert self.pool.num_cached_blocks == len(self.queue)
        assert all(self.pool.reference_count(block) == count for block, count in counts.items())


TestPoolAgainstLists = PoolAgainstLists.TestCase
