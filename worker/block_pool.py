"""BlockPool: the physical blocks of KV memory, who holds them and which may be taken.

A block is in exactly one of four states::

    free      nobody holds it, nothing findable is in it              stack, last freed first (its memory is warm),
                                                                      then those never used, by their ids
    cached    nobody holds it, the prefix cache can still find it     queue, least recently used first
    held      reference count ≥ 1: that many block tables name it
    fenced    nobody holds it, but a step under way may touch it:     queue, by the step that must be over
              free or cached once that step is over

Every operation of a step is O(1). The pool knows nothing of tokens: the prefix cache says which blocks are findable and
is told when one is taken for something new.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class BlockStates(NamedTuple):
    """What tells the state of every block; indexed by block id."""

    reference_counts: Sequence[int]
    findable: bytes
    fenced: Sequence[int]
    """Ids of those that are."""


class BlockPool:
    """``num_blocks`` blocks with ids 0 … num_blocks − 1, all existing from the start."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._reference_counts = [0] * num_blocks
        self._free: list[int] = []
        self._num_unused = num_blocks
        """The last of all ids: blocks that were never handed out, and are free too."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fenced: OrderedDict[int, int] = OrderedDict()
        self._fence: int | None = None
        self._findable = bytearray(num_blocks)
        self._on_evict: Callable[[int], None] = lambda block: None

    def call_on_evict(self, on_evict: Callable[[int], None]) -> None:
        """``on_evict(block)`` is called before a findable block is handed out for new content."""
        self._on_evict = on_evict

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: free or cached."""
        return self._num_unused + len(self._free) + len(self._cached)

    @property
    def num_fenced_blocks(self) -> int:
        """Blocks that can be allocated when the steps under way are over."""
        return len(self._fenced)

    @property
    def num_held_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks - len(self._fenced)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be allocated and that the prefix cache can still find."""
        return len(self._cached)

    def states(self) -> BlockStates:
        """A copy; the one operation here that is not O(1): milliseconds for a million blocks."""
        return BlockStates(self._reference_counts[:], bytes(self._findable), list(self._fenced))

    def reference_count(self, block: int) -> int:
        return self._reference_counts[block]

    def is_writable(self, block: int, *, num_readers: int = 0) -> bool:
        """One table names it, beside ``num_readers`` that will have read it by then, and nobody can find it."""
        return self._reference_counts[block] == 1 + num_readers and not self._findable[block]

    def allocate(self) -> int:
        """A block with reference count 1 and no findable content. The caller has checked ``num_free_blocks``."""
        if self._free:
            block = self._free.pop()
        elif self._num_unused:
            block = self.num_blocks - self._num_unused
            self._num_unused -= 1
        else:
            block = self._evict()
        self._reference_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table names ``block``, which is held, or findable and in no table."""
        if self._reference_counts[block] == 0 and self._fenced.pop(block, None) is None:
            del self._cached[block]
        self._reference_counts[block] += 1

    def release(self, block: int) -> None:
        """One table less names ``block``. The last one returns it; findable content stays findable until reused."""
        count = self._reference_counts[block] - 1
        if count < 0:
            raise RuntimeError(f"block {block} was released more often than it was taken")
        self._reference_counts[block] = count
        if count == 0:
            if self._fence is None:
                self._give_back(block)
            else:
                self._fenced[block] = self._fence

    def release_all(self, table: Sequence[int]) -> None:
        """Release a block table, tail first: a prefix loses its end before its beginning."""
        for block in reversed(table):
            self.release(block)

    def set_fence(self, step: int) -> None:
        """Step ``step`` is under way: what is released from now on is fenced until it is over. Steps only grow."""
        self._fence = step

    def lift_fence(self, step: int) -> None:
        """Steps up to ``step`` are over."""
        if self._fence is not None and self._fence <= step:
            self._fence = None
        while self._fenced and next(iter(self._fenced.values())) <= step:
            self._give_back(self._fenced.popitem(last=False)[0])

    def set_findable(self, block: int) -> None:
        """The prefix cache can find the content of ``block``, which is held."""
        self._findable[block] = 1

    def forget_all(self) -> None:
        """The prefix cache finds nothing any more."""
        self._findable = bytearray(self.num_blocks)
        self._free.extend(self._cached)
        self._cached.clear()

    def _give_back(self, block: int) -> None:
        if self._findable[block]:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self._findable[block] = 0
        self._on_evict(block)
        return block

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove the invariants against all block tables there are. Raises RuntimeError on the first that is broken."""
        named = Counter(block for table in tables for block in table)
        counts = {block: count for block, count in enumerate(self._reference_counts) if count}
        if counts != dict(named):
            wrong = {block for block in counts.keys() | named.keys() if counts.get(block, 0) != named.get(block, 0)}
            raise RuntimeError(f"reference counts differ from the tables that name the blocks: {sorted(wrong)[:8]}")
        free = [*self._free, *range(self.num_blocks - self._num_unused, self.num_blocks)]
        states = Counter([*free, *self._cached, *self._fenced, *counts])
        if len(states) != self.num_blocks or any(count != 1 for count in states.values()):
            raise RuntimeError(
                f"free {len(free)} + cached {len(self._cached)} + fenced {len(self._fenced)} "
                f"+ held {len(counts)} blocks are not the pool's {self.num_blocks}"
            )
        if any(self._findable[block] for block in free) or not all(self._findable[b] for b in self._cached):
            raise RuntimeError("a block's state contradicts whether its content can be found")
        fences = list(self._fenced.values())
        if fences != sorted(fences) or (fences and (self._fence is None or fences[-1] > self._fence)):
            raise RuntimeError("blocks are fenced for a step that is not under way")
