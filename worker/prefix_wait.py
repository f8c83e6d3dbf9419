"""PrefixWait: sequences that wait for another one which is computing their common prefix, so that it is computed once.

A running sequence that has full blocks of its prompt still to compute is found under its *frontier*: the cached node
that it has come to, and the tokens of its next block. A waiting sequence whose cached prefix ends at that node and
goes on with the same block would compute the same: it follows instead, until the running one has stored all blocks
that the two have in common, or stops.
"""

from __future__ import annotations

from .prefix_cache import CacheNode
from .sequence import Sequence
from .waiting_queue import WaitingQueue


class PrefixWait:
    """Followers are in no queue; ``advance`` and ``stop`` put them back into the one that is passed."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._leaders: dict[object, Sequence] = {}
        self._num_followers = 0

    def __len__(self) -> int:
        """Sequences that follow another one."""
        return self._num_followers

    def leader_of(self, sequence: Sequence, tail: CacheNode | None, num_blocks: int) -> Sequence | None:
        """Who is about to compute the next block of a sequence of which ``num_blocks`` are cached, up to ``tail``."""
        if not self._leaders or num_blocks >= sequence.num_findable_blocks(self._block_size):
            return None
        return self._leaders.get(self._key(sequence, tail, num_blocks))

    def join(self, sequence: Sequence, leader: Sequence) -> None:
        most = min(sequence.num_findable_blocks(self._block_size), leader.num_full_blocks(self._block_size))
        leader.followers.append((sequence.num_common_blocks(leader, self._block_size, most), sequence))
        sequence.follows = leader
        self._num_followers += 1

    def leave(self, sequence: Sequence) -> None:
        """A follower has ended."""
        leader = sequence.follows
        if leader is not None:
            leader.followers = [entry for entry in leader.followers if entry[1] is not sequence]
            sequence.follows = None
            self._num_followers -= 1

    def advance(self, leader: Sequence, queue: WaitingQueue) -> None:
        """``leader`` was admitted, or has stored blocks: it is found at another place, and some followers may go on."""
        self._unregister(leader)
        if leader.is_cacheable and leader.num_stored_blocks < leader.num_full_blocks(self._block_size):
            leader.frontier = self._key(leader, leader.cache_tail, leader.num_stored_blocks)
            self._leaders.setdefault(leader.frontier, leader)
        if leader.followers:
            self._let_go(leader, queue, leader.num_stored_blocks)

    def stop(self, leader: Sequence, queue: WaitingQueue) -> None:
        """``leader`` computes nothing more that others could find."""
        self._unregister(leader)
        if leader.followers:
            self._let_go(leader, queue, None)

    def _key(self, sequence: Sequence, tail: CacheNode | None, num_blocks: int) -> object:
        return tail or sequence.extra_keys, sequence.block_key(num_blocks, self._block_size)

    def _unregister(self, leader: Sequence) -> None:
        if leader.frontier is not None:
            if self._leaders.get(leader.frontier) is leader:
                del self._leaders[leader.frontier]
            leader.frontier = None

    def _let_go(self, leader: Sequence, queue: WaitingQueue, num_blocks: int | None) -> None:
        """Those that have no more than ``num_blocks`` in common with ``leader``; all, if that is None."""
        for num_common, sequence in leader.followers.copy():
            if num_blocks is None or num_common <= num_blocks:
                self.leave(sequence)
                num_found = min(num_common, leader.num_stored_blocks) * self._block_size
                sequence.num_expected_cached_tokens = max(sequence.num_expected_cached_tokens, num_found)
                queue.add(sequence)

    def check(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Prove that everybody who follows has a running leader who knows it. Raises RuntimeError."""
        known = {id(sequence) for leader in running for _, sequence in leader.followers}
        following = [sequence for sequence in waiting if sequence.follows is not None]
        if len(following) != self._num_followers or {id(sequence) for sequence in following} != known:
            raise RuntimeError("a sequence follows one that does not run or does not know of it")
        if any(leader.frontier is None for leader in running if leader.followers):
            raise RuntimeError("a sequence is followed that computes no prompt")
