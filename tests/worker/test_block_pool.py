"""The block pool: every block is free, cached, held or fenced, and what was unused for longest goes first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from page_runs import expand

from octavo.worker.block_pool import BlockPool
from octavo.worker.pool_state import STATES, PoolCopy, pool_state

LEAST_OPERATIONS = 420
"""In a row on one pool."""


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


# ---- the fence ----


def test_what_is_released_while_a_step_is_under_way_is_not_handed_out_before_it_is_over() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.set_fence(1)
    pool.release(block)
    assert (pool.num_free_blocks, pool.num_fenced_blocks, pool.num_held_blocks) == (1, 1, 0)
    pool.allocate()
    assert pool.num_free_blocks == 0
    pool.lift_fence(1)
    assert (pool.num_free_blocks, pool.num_fenced_blocks) == (1, 0)
    assert pool.allocate() == block


def test_a_block_is_free_when_the_last_step_is_over_that_was_under_way_when_it_was_released() -> None:
    pool = BlockPool(2)
    early, late = pool.allocate(), pool.allocate()
    pool.set_fence(1)
    pool.release(early)
    pool.set_fence(2)
    pool.release(late)
    pool.lift_fence(1)
    assert (pool.num_free_blocks, pool.num_fenced_blocks) == (1, 1)
    assert pool.allocate() == early
    pool.release(early)  # step 2 is still under way
    assert pool.num_free_blocks == 0
    pool.lift_fence(2)
    assert pool.num_free_blocks == 2


def test_with_no_step_under_way_what_is_released_is_free_at_once() -> None:
    pool = BlockPool(1)
    pool.set_fence(1)
    pool.lift_fence(1)
    pool.release(pool.allocate())
    assert (pool.num_free_blocks, pool.num_fenced_blocks) == (1, 0)


def test_a_fenced_block_can_be_found_and_taken_again() -> None:
    """Its content is what it was; only writing something else has to wait."""
    pool = full_of_cached(1)
    pool.share(0)
    pool.set_fence(1)
    pool.release(0)
    assert (pool.num_cached_blocks, pool.num_fenced_blocks) == (0, 1)
    pool.share(0)
    assert (pool.num_fenced_blocks, pool.reference_count(0)) == (0, 1)
    pool.lift_fence(1)
    pool.check([[0]])
    pool.release(0)
    assert pool.num_cached_blocks == 1


def test_a_fence_keeps_tail_before_head() -> None:
    pool, evicted = BlockPool(3), list[int]()
    pool.call_on_evict(evicted.append)
    table = [pool.allocate() for _ in range(3)]
    for block in table:
        pool.set_findable(block)
    pool.set_fence(1)
    pool.release_all(table)
    pool.lift_fence(1)
    for _ in range(3):
        pool.allocate()
    assert evicted == table[::-1]


# ---- who may write, and forgetting ----


def test_a_block_may_be_written_by_its_only_holder_if_nobody_can_find_it() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    assert pool.is_writable(block)
    pool.share(block)
    assert not pool.is_writable(block)
    assert pool.is_writable(block, num_readers=1)  # the other one has read it by then
    pool.release(block)
    pool.set_findable(block)
    assert not pool.is_writable(block)


def test_forgetting_all_frees_what_is_cached_and_leaves_what_is_held_to_its_holders() -> None:
    pool, evicted = full_of_cached(3), list[int]()
    pool.call_on_evict(evicted.append)
    pool.share(1)
    pool.forget_all()
    assert (pool.num_free_blocks, pool.num_cached_blocks, pool.num_held_blocks) == (2, 0, 1)
    assert pool.is_writable(1)
    pool.check([[1]])
    pool.release(1)
    assert {pool.allocate() for _ in range(3)} == {0, 1, 2}
    assert evicted == []


def test_a_fenced_block_that_was_forgotten_is_free_when_its_step_is_over() -> None:
    pool = full_of_cached(1)
    pool.share(0)
    pool.set_fence(1)
    pool.release(0)
    pool.forget_all()
    pool.lift_fence(1)
    assert (pool.num_free_blocks, pool.num_cached_blocks) == (1, 0)


# ---- any operations ----


class PoolAgainstModel:
    """The pool beside a model in which every state is a list and every block has its content written on it."""

    def __init__(self, num_blocks: int, reached: Counter[str]) -> None:
        self.pool = BlockPool(num_blocks)
        self.pool.call_on_evict(self._evicted)
        self.reached = reached
        self.free = list(reversed(range(num_blocks)))
        self.cached: list[int] = []
        self.fenced: list[tuple[int, int]] = []
        """(block, step that must be over)."""
        self.tables: list[list[int]] = []
        self.content: dict[int, int] = {}
        """Block → number of the allocation that it was last written after."""
        self.found: dict[int, int] = {}
        """What can be found: content → block."""
        self.touched = [0] * num_blocks
        """The last step that may read or write the block."""
        self.num_planned = self.num_over = self.num_allocated = 0

    def apply(self, operation: str, which: int, count: int) -> None:
        getattr(self, operation)(which, count)
        self.reached[operation] += 1
        self._agree()

    # ---- operations ----

    def look(self, which: int, count: int) -> None:
        for table in self.tables:
            for block in table[:count]:
                is_alone = self._count(block) == 1 and block not in self.found.values()
                assert self.pool.is_writable(block) == is_alone

    def take(self, which: int, count: int) -> None:
        if self.pool.num_free_blocks:
            self.tables.append([self._allocate() for _ in range(min(count + 1, self.pool.num_free_blocks))])

    def grow(self, which: int, count: int) -> None:
        if self.tables and self.pool.num_free_blocks:
            self.tables[which % len(self.tables)].append(self._allocate())

    def make_findable(self, which: int, count: int) -> None:
        if self.tables:
            for block in self.tables[which % len(self.tables)][:count]:
                self.pool.set_findable(block)
                self.found[self.content[block]] = block

    def fork(self, which: int, count: int) -> None:
        if self.tables:
            self.tables.append([self._share(block) for block in self.tables[which % len(self.tables)][:count]])

    def find(self, which: int, count: int) -> None:
        if self.found:
            contents = sorted(self.found)[which % len(self.found) :][: count + 1]
            self.tables.append([self._share(self.found[content]) for content in contents])

    def give_back(self, which: int, count: int) -> None:
        if self.tables:
            table = self.tables.pop(which % len(self.tables))
            self.pool.release_all(table)
            for index in reversed(range(len(table))):
                if not self._count(table[index]) and table[index] not in table[:index]:
                    self._unused(table[index])

    def plan(self, which: int, count: int) -> None:
        if self.num_planned - self.num_over < 2:
            self.num_planned += 1
            self.pool.set_fence(self.num_planned)
            for block in {block for table in self.tables for block in table}:
                self.touched[block] = self.num_planned

    def complete(self, which: int, count: int) -> None:
        if self.num_over < self.num_planned:
            self.num_over += 1
            self.pool.lift_fence(self.num_over)
            while self.fenced and self.fenced[0][1] <= self.num_over:
                self._give_back(self.fenced.pop(0)[0])

    def forget(self, which: int, count: int) -> None:
        if which % 4 == 0:
            self.pool.forget_all()
            self.found.clear()
            self.free += self.cached
            self.cached.clear()

    # ---- the model ----

    def _allocate(self) -> int:
        expected = self.free[-1] if self.free else self.cached[0]
        block = self.pool.allocate()  # the model hears of an eviction meanwhile
        assert block == expected
        if self.free:
            self.free.pop()
        assert block not in self.found.values(), "handed out while it can be found"
        assert self.touched[block] <= self.num_over, "handed out while a step under way may touch it"
        self.num_allocated += 1
        self.content[block] = self.num_allocated
        return block

    def _evicted(self, block: int) -> None:
        assert self.cached.pop(0) == block
        del self.found[self.content[block]]
        self.reached["evicted"] += 1

    def _share(self, block: int) -> int:
        self.pool.share(block)
        if block in self.cached:
            self.cached.remove(block)
            self.reached["revived"] += 1
        self.reached["taken from behind the fence"] += any(fenced == block for fenced, _ in self.fenced)
        self.fenced = [entry for entry in self.fenced if entry[0] != block]
        return block

    def _unused(self, block: int) -> None:
        if self.num_planned > self.num_over:
            self.fenced.append((block, self.num_planned))
            self.reached["fenced"] += 1
        else:
            self._give_back(block)

    def _give_back(self, block: int) -> None:
        (self.cached if block in self.found.values() else self.free).append(block)

    def _count(self, block: int) -> int:
        return sum(table.count(block) for table in self.tables)

    def _agree(self) -> None:
        self.pool.check(self.tables)
        counts = Counter(block for table in self.tables for block in table)
        assert self.pool.num_free_blocks == len(self.free) + len(self.cached)
        assert self.pool.num_cached_blocks == len(self.cached)
        assert self.pool.num_fenced_blocks == len(self.fenced)
        assert self.pool.num_held_blocks == len(counts)
        assert all(self.pool.reference_count(block) == count for block, count in counts.items())
        self._picture_agrees(counts)

    def _picture_agrees(self, counts: Counter[int]) -> None:
        states = {block: "w" if count == 1 else "s" for block, count in counts.items()}
        states |= dict.fromkeys(self.free, "f") | dict.fromkeys(self.cached, "c")
        states |= {block: "x" for block, _ in self.fenced}
        state = pool_state(PoolCopy(self.pool.states(), 16, 0, 0, 8, ()))
        assert expand(state.pages) == "".join(states[block] for block in range(self.pool.num_blocks))
        assert state.num_blocks_by_state == {letter: [*states.values()].count(letter) for letter in STATES}


OPERATIONS = (
    *("look", "take", "take", "grow", "make_findable", "make_findable", "fork", "find"),
    *("give_back", "give_back", "give_back", "plan", "complete", "forget"),
)


def test_the_pool_agrees_with_a_model_of_lists() -> None:
    reached: Counter[str] = Counter()

    @given(st.integers(1, 9), st.binary(min_size=3 * LEAST_OPERATIONS, max_size=4 * LEAST_OPERATIONS))
    def operate(num_blocks: int, numbers: bytes) -> None:
        """Three bytes are an operation: a number for each of its arguments would cost more than to carry it out."""
        model = PoolAgainstModel(num_blocks, reached)
        for operation, which, count in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=False):
            model.apply(OPERATIONS[operation % len(OPERATIONS)], which, count % 5)

    operate()
    assert sum(reached[operation] for operation in set(OPERATIONS)) >= 40_000, reached
    events = ("evicted", "revived", "fenced", "taken from behind the fence", "forget")
    assert all(reached[event] >= 100 for event in events), reached
