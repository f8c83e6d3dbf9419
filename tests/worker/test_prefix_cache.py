"""The prefix cache: an exact tree, all copies of a block, and events that tell the router the truth."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.block_pool import BlockPool
from octavo.worker.messages import BlocksRemoved, BlocksStored
from octavo.worker.prefix_cache import CacheNode, ExtraKeys, PrefixCache


class Cache:
    """A pool and its cache, spoken to in words: "abc" is a prefix of the blocks a, b, c."""

    def __init__(self, num_blocks: int = 16) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool)

    def match(self, word: str, extra_keys: ExtraKeys = ()) -> list[CacheNode]:
        return self.cache.match(extra_keys, (letter.encode() for letter in word))

    def depth(self, word: str, extra_keys: ExtraKeys = ()) -> int:
        return len(self.match(word, extra_keys))

    def hold(self, word: str, extra_keys: ExtraKeys = (), *, reuse: bool = True) -> list[int]:
        """A block table for ``word`` whose blocks are all findable; ``reuse``: take what is there."""
        found = self.match(word, extra_keys) if reuse else []
        table = [self.cache.take(node) for node in found]
        parent = found[-1] if found else None
        for prefix in list(accumulate(word))[len(found) :]:
            table.append(self.pool.allocate())
            parent = self.cache.store(parent, extra_keys, prefix[-1].encode(), table[-1], hash_of(prefix, extra_keys))
        return table

    def keep(self, word: str, extra_keys: ExtraKeys = (), *, reuse: bool = True) -> None:
        """Cached, and held by nobody."""
        self.pool.release_all(self.hold(word, extra_keys, reuse=reuse))

    def evict(self, count: int = 1) -> None:
        """As if something else had needed this many cached blocks."""
        others = [self.pool.allocate() for _ in range(self.pool.num_free_blocks - self.pool.num_cached_blocks + count)]
        self.pool.release_all(others)

    def held_hashes(self) -> set[int]:
        return {value for event in self.cache.snapshot() for value in event.hashes}


def hash_of(word: str, extra_keys: ExtraKeys = ()) -> int:
    return int.from_bytes("/".join((*extra_keys, word)).encode(), "big")


def hashes_of(*words: str) -> set[int]:
    return {hash_of(word) for word in words}


# ---- what is found ----


def test_the_longest_cached_prefix_is_found() -> None:
    cache = Cache()
    cache.keep("abc")
    assert cache.depth("abcd") == 3
    assert cache.depth("abx") == 2
    assert cache.depth("ab") == 2
    assert cache.depth("") == 0
    assert cache.depth("bc") == 0  # the same tokens behind other tokens have other K and V


def test_what_is_found_is_told_apart_by_tokens_and_not_by_hash() -> None:
    cache = Cache()
    a, b = cache.pool.allocate(), cache.pool.allocate()
    cache.cache.store(None, (), b"a", a, 1)
    cache.cache.store(None, (), b"b", b, 1)  # a collision
    assert cache.cache.take(cache.match("a")[0]) == a
    assert cache.cache.take(cache.match("b")[0]) == b


def test_salts_share_nothing() -> None:
    cache = Cache()
    cache.keep("abc", ("salt",))
    assert cache.depth("abc") == 0
    assert cache.depth("abc", ("other",)) == 0
    assert cache.depth("abc", ("salt",)) == 3


def test_a_found_block_is_pinned_by_taking_it() -> None:
    cache = Cache(3)
    cache.keep("abc")
    table = cache.hold("ab")
    cache.evict(1)
    assert cache.depth("abc") == 2
    assert cache.pool.num_free_blocks == 1
    cache.pool.release_all(table)


def test_is_unused_tells_whether_taking_costs_a_free_block() -> None:
    cache = Cache()
    table = cache.hold("a")
    (node,) = cache.match("a")
    assert not cache.cache.is_unused(node)
    cache.pool.release_all(table)
    assert cache.cache.is_unused(node)


# ---- copies and eviction ----


def test_content_is_gone_with_its_last_copy_and_not_before() -> None:
    cache = Cache(2)
    cache.keep("a")
    cache.keep("a", reuse=False)
    assert cache.cache.num_blocks == 2
    cache.cache.drain_events()
    cache.evict(1)
    assert cache.depth("a") == 1
    assert cache.cache.drain_events() == ()
    cache.evict(1)
    assert cache.depth("a") == 0
    assert cache.cache.drain_events() == (BlocksRemoved((hash_of("a"),)),)


def test_a_prefix_is_evicted_from_its_end() -> None:
    cache = Cache(4)
    cache.keep("abcd")
    for depth in (3, 2, 1, 0):
        cache.evict(1)
        assert cache.depth("abcd") == depth


def test_an_evicted_branch_leaves_no_trace() -> None:
    cache = Cache(3)
    cache.keep("abc", ("salt",))
    cache.evict(3)
    assert cache.cache.num_blocks == 0
    assert not cache.cache._roots
    assert cache.cache.snapshot() == ()


WORDS = st.text("ab", min_size=1, max_size=5)


@given(st.lists(st.tuples(WORDS, st.booleans(), st.integers(0, 3)), max_size=40))
def test_what_is_cached_has_no_hole_and_events_tell_it(operations: list[tuple[str, bool, int]]) -> None:
    cache, told, held = Cache(10), set[int](), list[list[int]]()
    for word, reuse, num_released in operations:
        for _ in range(min(num_released, len(held))):
            cache.pool.release_all(held.pop(0))
        if len(word) <= cache.pool.num_free_blocks:
            held.append(cache.hold(word, reuse=reuse))
        cache.cache.check()
        for event in cache.cache.drain_events():
            if isinstance(event, BlocksStored):
                assert event.parent_hash is None or event.parent_hash in told
                assert not told & set(event.hashes)
                told |= set(event.hashes)
            else:
                assert told >= set(event.hashes)
                told -= set(event.hashes)
        assert told == cache.held_hashes()
    cache.pool.check(held)


# ---- events and snapshots ----


def test_consecutive_blocks_are_one_event() -> None:
    cache = Cache()
    cache.keep("abc")
    cache.keep("abd")
    assert cache.cache.drain_events() == (
        BlocksStored(None, (hash_of("a"), hash_of("ab"), hash_of("abc"))),
        BlocksStored(hash_of("ab"), (hash_of("abd"),)),
    )
    assert cache.cache.drain_events() == ()


def test_events_keep_their_order() -> None:
    cache = Cache(2)
    cache.keep("ab")
    cache.cache.drain_events()
    cache.keep("cd")
    assert cache.cache.drain_events() == (
        BlocksRemoved((hash_of("ab"),)),
        BlocksStored(None, (hash_of("c"),)),
        BlocksRemoved((hash_of("a"),)),
        BlocksStored(hash_of("c"), (hash_of("cd"),)),
    )


def test_a_second_copy_is_no_news() -> None:
    cache = Cache()
    cache.keep("ab")
    cache.cache.drain_events()
    cache.keep("ab", reuse=False)
    assert cache.cache.drain_events() == ()


def test_a_snapshot_is_the_whole_tree_parents_first() -> None:
    cache = Cache()
    cache.keep("abc")
    cache.keep("abd")
    cache.keep("x", ("salt",))
    events = cache.cache.snapshot()
    assert {event.parent_hash for event in events} == {None, hash_of("ab")}
    assert cache.held_hashes() == hashes_of("a", "ab", "abc", "abd") | {hash_of("x", ("salt",))}
    seen: set[int | None] = {None}
    for event in events:
        assert event.parent_hash in seen
        seen |= set(event.hashes)


def test_a_snapshot_says_nothing_of_what_has_gone_and_of_what_is_behind_it_only_itself() -> None:
    """Cannot happen by releasing tables tail first; a snapshot of it must still be true."""
    cache = Cache(3)
    table = cache.hold("abc")
    for block in (table[1], table[0], table[2]):
        cache.pool.release(block)
    cache.evict(1)
    assert cache.depth("abc") == 1
    assert cache.cache.snapshot() == (
        BlocksStored(None, (hash_of("a"),)),
        BlocksStored(hash_of("ab"), (hash_of("abc"),)),
    )
    with pytest.raises(RuntimeError, match="is cached, but not the block before it"):
        cache.cache.check()


def test_check_compares_with_contents_that_are_known() -> None:
    cache = Cache()
    table = cache.hold("ab")
    cache.cache.check([(table[0], b"a"), (table[1], b"b")])
    with pytest.raises(RuntimeError, match=f"block {table[1]} is findable under tokens that it does not hold"):
        cache.cache.check([(table[1], b"x")])
