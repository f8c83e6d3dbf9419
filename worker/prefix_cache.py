"""PrefixCache: exact tree of cached content, from tokens to the physical blocks that hold their K and V.

A node is one full block of tokens below its parent: the path from the root spells the whole prefix, so a match is
exact and no hash is trusted. ``extra_keys`` (the cache salt, later adapter and image) choose the root. A node keeps
every physical copy of its content; it is "removed" for the outside when the last copy goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .block_pool import BlockPool
from .messages import BlocksCleared, BlocksRemoved, BlocksStored
from .routing_hash import pack_hashes

ExtraKeys: TypeAlias = tuple[str, ...]
CacheEvent: TypeAlias = BlocksStored | BlocksRemoved | BlocksCleared


@dataclass(slots=True, eq=False)
class CacheNode:
    """``copies`` is empty while only descendants are cached; the node then waits for its content to come back."""

    parent: CacheNode | None
    key: bytes
    routing_hash: int | None
    children: dict[bytes, CacheNode] = field(default_factory=dict)
    copies: dict[int, None] = field(default_factory=dict)

    @property
    def block(self) -> int:
        """The copy that was stored first. There is one."""
        return next(iter(self.copies))

    @property
    def before(self) -> CacheNode | None:
        """Node of the block before this one; None for the first block."""
        return self.parent if self.parent is not None and self.parent.parent is not None else None


class PrefixCache:
    """Finds and remembers full blocks. Tells of changes by events for the router."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._roots: dict[ExtraKeys, CacheNode] = {}
        self._root_keys: dict[CacheNode, ExtraKeys] = {}
        self._node_of: dict[int, CacheNode] = {}
        self._events: list[tuple[int | None, list[int]] | list[int] | BlocksCleared] = []
        pool.call_on_evict(self._forget)

    @property
    def num_blocks(self) -> int:
        """Physical blocks whose content can be found, held ones included."""
        return len(self._node_of)

    def match(self, extra_keys: ExtraKeys, keys: Iterator[bytes]) -> list[CacheNode]:
        """The longest chain of nodes with a copy that the blocks' token bytes ``keys`` spell."""
        node = self._roots.get(extra_keys)
        chain: list[CacheNode] = []
        while node is not None:
            node = node.children.get(next(keys, b""))
            if node is None or not node.copies:
                break
            chain.append(node)
        return chain

    def store(
        self, parent: CacheNode | None, extra_keys: ExtraKeys, key: bytes, block: int, routing_hash: int
    ) -> CacheNode:
        """``block``, which is held, has (or will have, when its step has run) the content ``key`` after ``parent``.

        ``parent`` is None for the first block of a sequence.
        """
        above = parent or self._root(extra_keys)
        node = above.children.get(key)
        if node is None:
            node = above.children[key] = CacheNode(above, key, routing_hash)
        if not node.copies:
            self._note_stored(above.routing_hash, routing_hash)
        node.copies[block] = None
        self._node_of[block] = node
        self._pool.set_findable(block)
        return node

    def clear(self) -> int:
        """Forget everything; the number of blocks that could be found. Who holds a block keeps it, unfindable."""
        num_blocks = len(self._node_of)
        self._roots, self._root_keys, self._node_of = {}, {}, {}
        self._pool.forget_all()
        self._events = [BlocksCleared()]  # whatever happened before it no longer matters
        return num_blocks

    def _root(self, extra_keys: ExtraKeys) -> CacheNode:
        root = self._roots.get(extra_keys)
        if root is None:
            root = self._roots[extra_keys] = CacheNode(None, b"", None)
            self._root_keys[root] = extra_keys
        return root

    def _forget(self, block: int) -> None:
        node = self._node_of.pop(block)
        del node.copies[block]
        if not node.copies and node.routing_hash is not None:
            self._note_removed(node.routing_hash)
        self._prune(node)

    def _prune(self, node: CacheNode) -> None:
        while not node.copies and not node.children:
            if node.parent is None:
                del self._roots[self._root_keys.pop(node)]
                return
            del node.parent.children[node.key]
            node = node.parent

    def _note_stored(self, parent_hash: int | None, routing_hash: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, tuple) and last[1][-1] == parent_hash:
            last[1].append(routing_hash)
        else:
            self._events.append((parent_hash, [routing_hash]))

    def _note_removed(self, routing_hash: int) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, list):
            last.append(routing_hash)
        else:
            self._events.append([routing_hash])

    def drain_events(self) -> tuple[CacheEvent, ...]:
        """What has changed since the last call, in order."""
        events, self._events = self._events, []
        return tuple(map(_event, events))

    def snapshot(self) -> tuple[BlocksStored, ...]:
        """Everything findable now, parents before children. Includes what ``drain_events`` has not yet told."""
        return tuple(self._chains(list(self._roots.values())))

    def _chains(self, pending: list[CacheNode]) -> Iterator[BlocksStored]:
        """Walks the tree from ``pending``; each chain without a fork or a gap is one event."""
        while pending:
            node = pending.pop()
            parent_hash = node.parent.routing_hash if node.parent else None
            hashes: list[int] = []
            while node.copies and node.routing_hash is not None:
                hashes.append(node.routing_hash)
                if len(node.children) != 1:
                    break
                (node,) = node.children.values()
            if hashes:
                yield BlocksStored(parent_hash, pack_hashes(hashes))
            pending.extend([node] if hashes and not node.copies else node.children.values())

    def check(self, contents: Sequence[tuple[int, bytes]] = ()) -> None:
        """Prove that blocks and nodes name each other, and that no node is cached below one that is not.

        ``contents`` are (block, token bytes) known to be true. Raises RuntimeError on the first that is broken.
        """
        for block, node in self._node_of.items():
            if block not in node.copies:
                raise RuntimeError(f"block {block} is not a copy of the node that it names")
            if node.parent is None or (node.parent.parent is not None and not node.parent.copies):
                raise RuntimeError(f"block {block} is cached, but not the block before it")
        if sum(len(node.copies) for node in set(self._node_of.values())) != len(self._node_of):
            raise RuntimeError("a node has a copy that does not name it")
        for block, key in contents:
            known = self._node_of.get(block)
            if known is not None and known.key != key:
                raise RuntimeError(f"block {block} is findable under tokens that it does not hold")


def _event(event: tuple[int | None, list[int]] | list[int] | BlocksCleared) -> CacheEvent:
    if isinstance(event, BlocksCleared):
        return event
    if isinstance(event, tuple):
        return BlocksStored(event[0], pack_hashes(event[1]))
    return BlocksRemoved(pack_hashes(event))
