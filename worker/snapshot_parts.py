"""A snapshot of a group's prefix cache in parts that a router takes in without being held up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .messages import BlocksStored
from .report_reader import BLOCKS_PER_EVENT, MOST_BLOCKS
from .routing_hash import HASH_BYTES

SnapshotParts = list[tuple[BlocksStored, ...]]


def snapshot_parts(blocks: Iterable[BlocksStored]) -> SnapshotParts:
    """The same in the same order; one part at least."""
    parts: SnapshotParts = []
    part: list[BlocksStored] = []
    room = MOST_BLOCKS
    for event in _short(blocks):
        size = BLOCKS_PER_EVENT + len(event.hashes) // HASH_BYTES
        if part and size > room:
            parts.append(tuple(part))
            part, room = [], MOST_BLOCKS
        part.append(event)
        room -= size
    return [*parts, tuple(part)]


def _short(blocks: Iterable[BlocksStored]) -> Iterator[BlocksStored]:
    """A chain that is too long for a part goes on behind its last block."""
    most = MOST_BLOCKS // 2 * HASH_BYTES
    for event in blocks:
        if len(event.hashes) <= most:
            yield event
            continue
        parent = event.parent_hash
        for start in range(0, len(event.hashes), most):
            hashes = event.hashes[start : start + most]
            yield BlocksStored(parent, hashes)
            parent = int.from_bytes(hashes[-HASH_BYTES:], "little")
