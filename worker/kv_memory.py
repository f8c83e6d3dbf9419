"""KvMemory: the block tables of sequences: what each holds, shares with others, copies before writing, lets be found.

Sharing has three sources. ``find_prefix`` gives blocks that hold a waiting sequence's first tokens already: from the
prefix cache, or from running branches of the same request. ``fork`` gives a new branch all blocks of another, the
partly filled last one too; whoever writes to that first gets a copy of it (copy-on-write).
"""

from __future__ import annotations

from dataclasses import dataclass

from .block_pool import BlockPool
from .plan_builder import PlanBuilder
from .prefix_cache import CacheNode, PrefixCache
from .routing_hash import RoutingHasher
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks that hold a sequence's first tokens."""

    blocks: list[int]
    tail: CacheNode | None = None
    """Node of the last one, if they are the prefix cache's."""


class KvMemory:
    """Owns the pool and the prefix cache of one worker group. ``block_size`` in tokens."""

    def __init__(self, num_blocks: int, block_size: int, hasher: RoutingHasher, *, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool)
        self.block_size = block_size
        self._hasher = hasher
        self._enable_prefix_caching = enable_prefix_caching
        self._filled_now: set[int] = set()
        """Blocks that the step being planned fills: they can be shared in it, but not copied before it."""
        self._siblings: dict[str, list[Sequence]] = {}
        """Sequences that hold blocks, of requests that have several, by request id."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def may_use_cache(self, sequence: Sequence) -> bool:
        return self._enable_prefix_caching and sequence.request.use_prefix_cache

    def begin_plan(self) -> None:
        """A new step is planned; the one before it counts as carried out."""
        self._filled_now.clear()

    # ---- what a sequence begins with ----

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """What a waiting sequence need not compute."""
        num_blocks = sequence.num_findable_blocks(self.block_size)
        if not self.may_use_cache(sequence):
            return self._find_sibling(sequence, num_blocks)
        nodes = self.cache.match(sequence.extra_keys, sequence.block_keys(self.block_size, num_blocks))
        if nodes and len(nodes) * self.block_size == sequence.num_tokens and nodes[-1].block in self._filled_now:
            nodes.pop()
        return Prefix([node.block for node in nodes], nodes[-1] if nodes else None)

    def _find_sibling(self, sequence: Sequence, num_blocks: int) -> Prefix:
        """Branches of one request share what they have in common even if nothing may be cached."""
        best: list[int] = []
        for sibling in self._siblings.get(sequence.request.request_id, ()):
            num_known = min(sibling.num_computed_tokens, len(sibling.token_ids), sequence.num_tokens - 1)
            most = min(num_blocks, num_known // self.block_size)
            common = sequence.num_common_blocks(sibling, self.block_size, most)
            best = sibling.block_table[:common] if common > len(best) else best
        return Prefix(best)

    def num_computed_by(self, prefix: Prefix, sequence: Sequence) -> int:
        """Tokens that ``prefix`` saves. One at least is computed, since its logits are needed."""
        return min(len(prefix.blocks) * self.block_size, sequence.num_tokens - 1)

    def num_blocks_to_take(self, sequence: Sequence, prefix: Prefix) -> int:
        """Free blocks that it uses up if it begins with ``prefix`` and all tokens known now are computed."""
        is_whole = self.num_computed_by(prefix, sequence) < len(prefix.blocks) * self.block_size
        num_revived = sum(self.pool.reference_count(block) == 0 for block in prefix.blocks)
        return self.blocks_for(sequence.num_tokens) - len(prefix.blocks) + num_revived + is_whole

    def take(self, sequence: Sequence, prefix: Prefix) -> None:
        """Let ``sequence`` begin with ``prefix``; nothing can evict it any more."""
        for block in prefix.blocks:
            self.pool.share(block)
        sequence.num_expected_cached_tokens = 0
        sequence.block_table = prefix.blocks
        sequence.num_computed_tokens = self.num_computed_by(prefix, sequence)
        sequence.may_share_tail = sequence.num_computed_tokens < len(prefix.blocks) * self.block_size
        sequence.is_cacheable = self.may_use_cache(sequence)
        sequence.cache_tail, sequence.num_stored_blocks = prefix.tail, len(prefix.blocks)
        self._note_sibling(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child``, which holds nothing, share all that ``parent`` has computed."""
        child.block_table = parent.block_table[:]
        for block in child.block_table:
            self.pool.share(block)
        child.num_computed_tokens = parent.num_computed_tokens
        child.is_cacheable = parent.is_cacheable
        child.cache_tail, child.num_stored_blocks = parent.cache_tail, parent.num_stored_blocks
        parent.may_share_tail = child.may_share_tail = True
        self._note_sibling(child)

    def release(self, sequence: Sequence) -> None:
        """Give back what ``sequence`` holds."""
        self.pool.release_all(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed_tokens = sequence.num_stored_blocks = sequence.num_sent_blocks = 0
        sequence.is_cacheable = sequence.may_share_tail = False
        sequence.cache_tail = None
        if sequence.has_siblings:
            siblings = self._siblings[sequence.request.request_id]
            siblings.remove(sequence)
            if not siblings:
                del self._siblings[sequence.request.request_id]

    def is_last(self, sequence: Sequence) -> bool:
        """Whether no other branch of its request holds blocks."""
        return self._siblings.get(sequence.request.request_id) == [sequence]

    def _note_sibling(self, sequence: Sequence) -> None:
        if sequence.has_siblings:
            self._siblings.setdefault(sequence.request.request_id, []).append(sequence)

    # ---- growth ----

    def num_missing_blocks(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> int:
        """Blocks to allocate before its next ``num_tokens`` can be written, that for a copy of its tail included."""
        missing = self.blocks_for(sequence.num_computed_tokens + num_tokens) - len(sequence.block_table)
        return missing + self._must_copy_tail(sequence, builder)

    def allocate(self, sequence: Sequence, num_tokens: int, builder: PlanBuilder) -> bool:
        """Blocks for the next ``num_tokens`` of ``sequence``; False, and nothing changed, when there are not enough."""
        table = sequence.block_table
        if not sequence.may_share_tail and sequence.num_computed_tokens + num_tokens <= len(table) * self.block_size:
            return True
        missing = self.num_missing_blocks(sequence, num_tokens, builder)
        if missing > self.pool.num_free_blocks:
            return False
        if self._must_copy_tail(sequence, builder):
            self._copy_tail(sequence, builder)
            missing -= 1
        sequence.may_share_tail = False
        table += [self.pool.allocate() for _ in range(missing)]
        return True

    def _must_copy_tail(self, sequence: Sequence, builder: PlanBuilder) -> bool:
        """Whether another table names the block that its next token is written to, or it can be found.

        References that copies of this step keep do not count: copies are made before anything is written.
        """
        if not sequence.may_share_tail:
            return False
        index = sequence.num_computed_tokens // self.block_size
        if index == len(sequence.block_table):
            return False
        tail = sequence.block_table[index]
        return not self.pool.is_writable(tail, num_readers=builder.num_copies_of(tail))

    def _copy_tail(self, sequence: Sequence, builder: PlanBuilder) -> None:
        """A block of its own in place of the one that its next token would be written to."""
        index = sequence.num_computed_tokens // self.block_size
        source, copy = sequence.block_table[index], self.pool.allocate()
        sequence.block_table[index] = copy
        sequence.num_sent_blocks = min(sequence.num_sent_blocks, index)
        if sequence.num_stored_blocks > index:  # found whole, its last token is computed again: the copy is stored too
            sequence.num_stored_blocks = index
            sequence.cache_tail = sequence.cache_tail.before if sequence.cache_tail else None
        builder.copy(sequence, source, copy)

    # ---- what others can find ----

    def store_full_blocks(self, sequence: Sequence) -> bool:
        """Make the blocks findable that are full by the end of the step being planned; whether there were any.

        Sequences planned later, even in this step, may share them: within a step every layer writes all K and V before
        any query reads them. A block whose last token is not known yet is stored in a later step.
        """
        size = self.block_size
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // size
        if num_full <= sequence.num_stored_blocks or not sequence.is_cacheable:
            return False
        for index in range(sequence.num_stored_blocks, num_full):
            sequence.cache_tail = self.cache.store(
                sequence.cache_tail,
                sequence.extra_keys,
                sequence.block_key(index, size),
                sequence.block_table[index],
                sequence.routing_hash(index, self._hasher),
            )
            self._filled_now.add(sequence.block_table[index])
        sequence.num_stored_blocks = num_full
        return True

    def check(self, holders: list[Sequence]) -> None:
        """Prove the invariants; ``holders`` are all sequences that hold blocks. Raises RuntimeError."""
        self.pool.check([sequence.block_table for sequence in holders])
        contents = [content for sequence in holders for content in self._contents(sequence)]
        self.cache.check(contents)
        for sequence in holders:
            self._check_table(sequence)
        siblings = {id(sequence) for known in self._siblings.values() for sequence in known}
        if siblings != {id(sequence) for sequence in holders if sequence.has_siblings}:
            raise RuntimeError("siblings are known that hold nothing, or the other way round")

    def _contents(self, sequence: Sequence) -> list[tuple[int, bytes]]:
        num_full = min(sequence.num_computed_tokens, len(sequence.token_ids)) // self.block_size
        return list(zip(sequence.block_table, sequence.block_keys(self.block_size, num_full), strict=False))

    def _check_table(self, sequence: Sequence) -> None:
        name = f"{sequence.request.request_id}, branch {sequence.branch},"
        if self.blocks_for(sequence.num_computed_tokens) != len(sequence.block_table):
            raise RuntimeError(
                f"{name} has {sequence.num_computed_tokens} computed tokens, which its table does not fit"
            )
        if not sequence.may_share_tail and self._tail_is_shared(sequence):
            raise RuntimeError(f"{name} could write into a block that another one holds or finds")

    def _tail_is_shared(self, sequence: Sequence) -> bool:
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        return offset > 0 and not self.pool.is_writable(sequence.block_table[index])
