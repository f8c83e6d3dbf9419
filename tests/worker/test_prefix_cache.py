"""The prefix cache: an exact tree, all copies of a block, and events that tell the router the truth."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import accumulate, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.block_pool import BlockPool
from octavo.worker.messages import BlocksCleared, BlocksRemoved, BlocksStored
from octavo.worker.prefix_cache import CacheNode, ExtraKeys, PrefixCache
from octavo.worker.routing_hash import pack_hashes, unpack_hashes


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
        table = [self.take(node) for node in found]
        parent = found[-1] if found else None
        for prefix in list(accumulate(word))[len(found) :]:
            table.append(self.pool.allocate())
            parent = self.cache.store(parent, extra_keys, prefix[-1].encode(), table[-1], hash_of(prefix, extra_keys))
        return table

    def take(self, node: CacheNode) -> int:
        """A reference to the block of ``node``."""
        self.pool.share(node.block)
        return node.block

    def keep(self, word: str, extra_keys: ExtraKeys = (), *, reuse: bool = True) -> None:
        """Cached, and held by nobody."""
        self.pool.release_all(self.hold(word, extra_keys, reuse=reuse))

    def evict(self, count: int = 1) -> None:
        """As if something else had needed this many cached blocks."""
        others = [self.pool.allocate() for _ in range(self.pool.num_free_blocks - self.pool.num_cached_blocks + count)]
        self.pool.release_all(others)

    def held_hashes(self) -> set[int]:
        return {value for event in self.cache.snapshot() for value in unpack_hashes(event.hashes).tolist()}


def hash_of(word: str, extra_keys: ExtraKeys = ()) -> int:
    name = "/".join((*extra_keys, word)).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def test_what_changes_k_and_v_is_part_of_the_key() -> None:
    """BUG-065, as far as there are no adapters yet: base, A, B, base, A; then other weights under A's name."""
    cache = Cache()
    hits = []
    for extra_keys in ((), ("A", "1"), ("B", "1"), (), ("A", "1"), ("A", "2")):
        hits.append(cache.depth("abc", extra_keys))
        cache.keep("abc", extra_keys)
    assert hits == [0, 0, 0, 3, 3, 0]


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
    assert cache.take(cache.match("a")[0]) == a
    assert cache.take(cache.match("b")[0]) == b


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


def test_a_match_costs_nothing_until_it_is_taken() -> None:
    cache = Cache()
    cache.keep("ab")
    num_free_blocks, num_cached_blocks = cache.pool.num_free_blocks, cache.pool.num_cached_blocks
    cache.match("ab")
    assert (cache.pool.num_free_blocks, cache.pool.num_cached_blocks) == (num_free_blocks, num_cached_blocks)
    cache.hold("ab")
    assert cache.pool.num_free_blocks == num_free_blocks - 2


def test_of_several_copies_the_one_stored_first_is_taken() -> None:
    cache = Cache()
    first = cache.hold("ab")
    cache.hold("ab", reuse=False)
    assert cache.hold("ab") == first


def test_a_node_knows_the_block_before_its_own() -> None:
    cache = Cache()
    cache.keep("abc")
    a, b, c = cache.match("abc")
    assert (c.before, b.before, a.before) == (b, a, None)


# ---- forgetting everything ----


def test_nothing_is_found_after_a_clear_and_one_event_tells_it() -> None:
    cache = Cache()
    cache.keep("abc")
    table = cache.hold("ab")
    assert cache.cache.clear() == 3
    assert cache.depth("abc") == 0
    assert (cache.cache.num_blocks, cache.cache.snapshot()) == (0, ())
    assert cache.cache.drain_events() == (BlocksCleared(),)  # what came before it no longer matters
    cache.cache.check()
    cache.pool.check([table])
    cache.pool.release_all(table)
    assert (cache.pool.num_free_blocks, cache.pool.num_cached_blocks) == (16, 0)


def test_what_is_stored_after_a_clear_is_told_after_it() -> None:
    cache = Cache()
    cache.keep("ab")
    cache.cache.clear()
    cache.keep("a")
    assert cache.cache.drain_events() == (BlocksCleared(), BlocksStored(None, pack_hashes([hash_of("a")])))


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
    assert cache.cache.drain_events() == (BlocksRemoved(pack_hashes([hash_of("a")])),)


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


# ---- any operations ----

WORDS = ["".join(letters) for length in (1, 2, 3, 4) for letters in product("ab", repeat=length)]
SALTS: tuple[ExtraKeys, ...] = ((), (), ("salt",))


class CacheAgainstModel:
    """The cache beside a model that keeps the tokens of every block: a list of what was written to each."""

    def __init__(self, num_blocks: int, reached: Counter[str]) -> None:
        self.spoken = Cache(num_blocks)
        self.pool, self.cache = self.spoken.pool, self.spoken.cache
        self.num_blocks = num_blocks
        self.reached = reached
        self.words: dict[int, tuple[ExtraKeys, str]] = {}
        """Block → the whole prefix that it ends, for all that can be found; in the order in which they were stored."""
        self.tables: list[tuple[ExtraKeys, str, list[int]]] = []
        """Those that go on storing: (salt, word, blocks)."""
        self.others: list[list[int]] = []
        self.told: set[int] = set()
        self.num_planned = self.num_over = 0

    def apply(self, operation: str, word: str, which: int) -> None:
        getattr(self, operation)(word, SALTS[which % len(SALTS)], which)
        self.reached[operation] += 1
        self._agree(word, SALTS[which % len(SALTS)])

    # ---- operations ----

    def look(self, word: str, salt: ExtraKeys, which: int) -> None:
        """Looking changes nothing."""

    def hold(self, word: str, salt: ExtraKeys, which: int) -> None:
        self._hold(word, salt, reuse=True)

    def compute_again(self, word: str, salt: ExtraKeys, which: int) -> None:
        self._hold(word, salt, reuse=False)

    def go_on(self, word: str, salt: ExtraKeys, which: int) -> None:
        """A sequence that holds blocks fills another one."""
        if self.tables and self.pool.num_free_blocks:
            salt, before, table = self.tables[which % len(self.tables)]
            parent = self._node(salt, before)
            self._store(salt, before + word[0], self._allocate(), table, parent)
            self.tables[which % len(self.tables)] = salt, before + word[0], table

    def give_back(self, word: str, salt: ExtraKeys, which: int) -> None:
        if self.tables:
            self.pool.release_all(self.tables.pop(which % len(self.tables))[2])

    def use_for_something_else(self, word: str, salt: ExtraKeys, which: int) -> None:
        self.others.append([self._allocate() for _ in range(min(which % 8, self.pool.num_free_blocks))])
        while len(self.others) > which % 2:
            self.pool.release_all(self.others.pop(0))

    def plan(self, word: str, salt: ExtraKeys, which: int) -> None:
        if self.num_planned - self.num_over < 2:
            self.num_planned += 1
            self.pool.set_fence(self.num_planned)

    def complete(self, word: str, salt: ExtraKeys, which: int) -> None:
        if self.num_over < self.num_planned:
            self.num_over += 1
            self.pool.lift_fence(self.num_over)

    def clear(self, word: str, salt: ExtraKeys, which: int) -> None:
        if which % 8 == 0:
            assert self.cache.clear() == len(self.words)
            self.words.clear()
            self.others += [table for _, _, table in self.tables]  # they go on, and store nothing more
            self.tables.clear()

    # ---- the model ----

    def _hold(self, word: str, salt: ExtraKeys, *, reuse: bool) -> None:
        if len(word) > self.pool.num_free_blocks:
            return
        found = self.spoken.match(word, salt) if reuse else []
        table = [self.spoken.take(node) for node in found]
        for length in range(len(found) + 1, len(word) + 1):
            parent = self._node(salt, word[: length - 1])
            self._store(salt, word[:length], self._allocate(), table, parent)
        self.tables.append((salt, word, table))
        self.reached["found"] += len(found)

    def _node(self, salt: ExtraKeys, word: str) -> CacheNode | None:
        return self.spoken.match(word, salt)[-1] if word else None

    def _allocate(self) -> int:
        """Free if it can be: then nothing is forgotten. An evicted one must be nobody's."""
        must_evict = self.pool.num_free_blocks == self.pool.num_cached_blocks
        block = self.pool.allocate()
        assert (block in self.words) == must_evict
        if must_evict:
            assert not any(block in table for table in self._held())
            salt, word = self.words.pop(block)
            is_last = (salt, word) not in self.words.values()
            self.reached["a copy evicted" if not is_last else "content evicted"] += 1
        return block

    def _store(self, salt: ExtraKeys, word: str, block: int, table: list[int], parent: CacheNode | None) -> None:
        self.cache.store(parent, salt, word[-1].encode(), block, hash_of(word, salt))
        self.words[block] = salt, word
        table.append(block)

    def _held(self) -> list[list[int]]:
        return [*(table for _, _, table in self.tables), *self.others]

    def _agree(self, word: str, salt: ExtraKeys) -> None:
        self.pool.check(self._held())
        self.cache.check([(block, word[-1].encode()) for block, (_, word) in self.words.items()])
        assert self.cache.num_blocks == len(self.words)
        expected = []
        for prefix in accumulate(word):
            copies = [block for block, content in self.words.items() if content == (salt, prefix)]
            if not copies:
                break
            expected.append(copies[0])
        assert [node.block for node in self.spoken.match(word, salt)] == expected
        self._listen()

    def _listen(self) -> None:
        for event in self.cache.drain_events():
            if isinstance(event, BlocksCleared):
                self.told.clear()
            elif isinstance(event, BlocksStored):
                assert event.parent_hash is None or event.parent_hash in self.told
                assert not self.told & set(unpack_hashes(event.hashes).tolist())
                self.told |= set(unpack_hashes(event.hashes).tolist())
            else:
                assert self.told >= set(unpack_hashes(event.hashes).tolist())
                self.told -= set(unpack_hashes(event.hashes).tolist())
        assert self.told == {hash_of(word, salt) for salt, word in self.words.values()} == self.spoken.held_hashes()


OPERATIONS = (
    *("look", "hold", "hold", "compute_again", "go_on", "go_on", "use_for_something_else"),
    *("give_back", "give_back", "give_back", "give_back", "plan", "complete", "clear"),
)
LEAST_OPERATIONS = 420
"""In a row on one cache."""


def test_the_cache_agrees_with_a_model_that_keeps_the_tokens_of_every_block() -> None:
    reached: Counter[str] = Counter()

    @given(st.integers(1, 16), st.binary(min_size=3 * LEAST_OPERATIONS, max_size=4 * LEAST_OPERATIONS))
    def operate(num_blocks: int, numbers: bytes) -> None:
        """Three bytes are an operation: a number for each of its arguments would cost more than to carry it out."""
        model = CacheAgainstModel(num_blocks, reached)
        for operation, word, which in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=False):
            model.apply(OPERATIONS[operation % len(OPERATIONS)], WORDS[word % len(WORDS)], which)

    operate()
    assert sum(reached[operation] for operation in set(OPERATIONS)) >= 40_000, reached
    assert all(reached[event] >= 100 for event in ("found", "content evicted", "a copy evicted", "clear")), reached


# ---- events and snapshots ----


def test_consecutive_blocks_are_one_event() -> None:
    cache = Cache()
    cache.keep("abc")
    cache.keep("abd")
    assert cache.cache.drain_events() == (
        BlocksStored(None, pack_hashes([hash_of("a"), hash_of("ab"), hash_of("abc")])),
        BlocksStored(hash_of("ab"), pack_hashes([hash_of("abd")])),
    )
    assert cache.cache.drain_events() == ()


def test_events_keep_their_order() -> None:
    cache = Cache(2)
    cache.keep("ab")
    cache.cache.drain_events()
    cache.keep("cd")
    assert cache.cache.drain_events() == (
        BlocksRemoved(pack_hashes([hash_of("ab")])),
        BlocksStored(None, pack_hashes([hash_of("c")])),
        BlocksRemoved(pack_hashes([hash_of("a")])),
        BlocksStored(hash_of("c"), pack_hashes([hash_of("cd")])),
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
        seen |= set(unpack_hashes(event.hashes).tolist())


def test_a_snapshot_says_nothing_of_what_has_gone_and_of_what_is_behind_it_only_itself() -> None:
    """Cannot happen by releasing tables tail first; a snapshot of it must still be true."""
    cache = Cache(3)
    table = cache.hold("abc")
    for block in (table[1], table[0], table[2]):
        cache.pool.release(block)
    cache.evict(1)
    assert cache.depth("abc") == 1
    assert cache.cache.snapshot() == (
        BlocksStored(None, pack_hashes([hash_of("a")])),
        BlocksStored(hash_of("ab"), pack_hashes([hash_of("abc")])),
    )
    with pytest.raises(RuntimeError, match="is cached, but not the block before it"):
        cache.cache.check()


def test_check_compares_with_contents_that_are_known() -> None:
    cache = Cache()
    table = cache.hold("ab")
    cache.cache.check([(table[0], b"a"), (table[1], b"b")])
    with pytest.raises(RuntimeError, match=f"block {table[1]} is findable under tokens that it does not hold"):
        cache.cache.check([(table[1], b"x")])
