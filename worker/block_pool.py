"""BlockPool: the physical blocks of KV memory, who holds them and which may be taken.

A block is in exactly one of three states::

    free      nobody holds it, nothing findable is in it            stack, last freed first (its memory is warm)
    cached    nobody holds it, the prefix cache can still find it   queue, least recently used first
    held      reference count ≥ 1: that many block tables name it

Every operation is O(1). The pool knows nothing of tokens: the prefix cache says which blocks are findable and is told
when one is taken for something new.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """``num_blocks`` blocks with ids 0 … num_blocks − 1, all existing from the start."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._reference_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._findable = bytearray(num_blocks)
        self._on_evict: Callable[[int], None] = lambda block: None

    def call_on_evict(self, on_evict: Callable[[int], None]) -> None:
        """``on_evict(block)`` is called before a findable block is handed out for new content."""
        self._on_evict = on_evict

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated: free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds and the prefix cache can still find."""
        return len(self._cached)

    def reference_count(self, block: int) -> int:
        return self._reference_counts[block]

    def allocate(self) -> int:
        """A block with reference count 1 and no findable content. The caller has checked ``num_free_blocks``."""
        block = self._free.pop() if self._free else self._evict()
        self._reference_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more table names ``block``, which is held or cached."""
        if self._reference_counts[block] == 0:
            del self._cached[block]
        self._reference_counts[block] += 1

    def release(self, block: int) -> None:
        """One table less names ``block``. The last one returns it; findable content stays findable until reused."""
        count = self._reference_counts[block] - 1
        if count < 0:
            raise RuntimeError(f"block {block} was released more often than it was taken")
        self._reference_counts[block] = count
        if count == 0:
            if self._findable[block]:
                self._cached[block] = None
            else:
                self._free.append(block)

    def release_all(self, table: Sequence[int]) -> None:
        """Release a block table, tail first: a prefix loses its end before its beginning."""
        for block in reversed(table):
            self.release(block)

    def set_findable(self, block: int) -> None:
        """The prefix cache can find the content of ``block``, which is held."""
        self._findable[block] = 1

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
        states = Counter(self._free) + Counter(list(self._cached)) + Counter(counts.keys())
        if len(states) != self.num_blocks or any(count != 1 for count in states.values()):
            raise RuntimeError(
                f"free {len(self._free)} + cached {len(self._cached)} + held {len(counts)} blocks "
                f"are not the pool's {self.num_blocks}"
            )
        if any(self._findable[block] for block in self._free) or not all(self._findable[b] for b in self._cached):
            raise RuntimeError("a block's state contradicts whether its content can be found")
