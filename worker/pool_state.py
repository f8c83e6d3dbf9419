"""PoolState: a block pool as a picture of it needs it: every block's state, and where running sequences have theirs.

What tells the states is copied between two steps, which takes milliseconds for a million blocks; the picture is made of
the copy elsewhere. Its size is bounded: a large pool's blocks are put together in pages, a long table is cut.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .block_pool import BlockStates

if TYPE_CHECKING:
    from .engine import Engine
    from .sequence import Sequence

MOST_PAGES = 2048
"""So many can still be told apart on a screen."""
MOST_SEQUENCES = 8
MOST_TABLE_BLOCKS = 256
"""Of a sequence: where its first ones are."""

STATES = "swcxf"
"""Shared: several tables name the block. Written: one does. Cached, fenced (x), free: see ``BlockPool``."""

_SHARED, _WRITTEN, _CACHED, _FENCED, _FREE = range(len(STATES))
_CHUNK_BLOCKS = 16_384
"""Are made an array at a time: the interpreter's lock is held for half a millisecond."""

_Codes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class SequencePages:
    """A running sequence and its blocks."""

    request_id: str
    branch: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """Of the prompt, found cached when it was first admitted."""
    num_computed_tokens: int
    num_tokens: int
    """Prompt and output."""
    num_blocks: int
    table: tuple[tuple[int, int], ...]
    """Its first blocks as runs: the first block's id, and how many follow one another from there."""


@dataclass(frozen=True, slots=True)
class PoolState:
    """``pages`` has their states in the order of block ids, by their letters in ``STATES``: ``12f3c`` are twelve free
    ones and three cached. A page of several blocks is what most of them are."""

    num_blocks: int
    block_size: int
    blocks_per_page: int
    pages: str
    num_blocks_by_state: dict[str, int]
    num_running: int
    num_waiting: int
    max_num_seqs: int
    sequences: tuple[SequencePages, ...]
    """Some of those that run, the longest ago admitted first."""


@dataclass(frozen=True, slots=True)
class PoolCopy:
    """What was copied between two steps."""

    states: BlockStates
    block_size: int
    num_running: int
    num_waiting: int
    max_num_seqs: int
    sequences: tuple[SequencePages, ...]


def copy_pool(engine: Engine) -> PoolCopy:
    """In the engine's thread."""
    scheduler = engine.scheduler
    limits = scheduler.limits
    first = [sequence for sequence, _ in zip(scheduler.running, range(MOST_SEQUENCES), strict=False)]
    return PoolCopy(
        scheduler.pool.states(),
        limits.block_size,
        scheduler.num_running,
        scheduler.num_waiting,
        limits.max_num_seqs,
        tuple(map(_sequence_pages, first)),
    )


def pool_state(copy: PoolCopy, most_pages: int = MOST_PAGES) -> PoolState:
    """In any thread."""
    codes = _codes(copy.states)
    num_blocks = len(codes)
    blocks_per_page = -(-num_blocks // most_pages)
    counts = np.bincount(codes, minlength=len(STATES)).tolist()
    return PoolState(
        num_blocks,
        copy.block_size,
        blocks_per_page,
        _runs(_majority(codes, blocks_per_page)),
        dict(zip(STATES, counts, strict=True)),
        copy.num_running,
        copy.num_waiting,
        copy.max_num_seqs,
        copy.sequences,
    )


def _sequence_pages(sequence: Sequence) -> SequencePages:
    return SequencePages(
        sequence.request.request_id,
        sequence.branch,
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens or 0,
        sequence.num_computed_tokens,
        sequence.num_tokens,
        len(sequence.block_table),
        tuple(_id_runs(sequence.block_table[:MOST_TABLE_BLOCKS])),
    )


def _id_runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for block in blocks:
        first, length = runs[-1] if runs else (block, 0)
        if block == first + length:
            runs[-1:] = [(first, length + 1)]
        else:
            runs.append((block, 1))
    return runs


def _codes(states: BlockStates) -> _Codes:
    """One for each block: an index into ``STATES``."""
    starts = range(0, len(states.reference_counts), _CHUNK_BLOCKS)
    chunks = [np.array(states.reference_counts[start : start + _CHUNK_BLOCKS], np.int32) for start in starts]
    counts = np.concatenate(chunks)
    codes = np.where(np.frombuffer(states.findable, np.uint8) == 1, _CACHED, _FREE).astype(np.uint8)
    codes[list(states.fenced)] = _FENCED
    codes[counts == 1] = _WRITTEN
    codes[counts > 1] = _SHARED
    return codes


def _majority(codes: _Codes, blocks_per_page: int) -> _Codes:
    """Of each page's blocks; of equally many the state that comes first."""
    if blocks_per_page == 1:
        return codes
    padding = np.full(-len(codes) % blocks_per_page, len(STATES), np.uint8)
    pages = np.concatenate([codes, padding]).reshape(-1, blocks_per_page)
    counts = np.stack([(pages == code).sum(axis=1) for code in range(len(STATES))])
    majority: _Codes = counts.argmax(axis=0).astype(np.uint8)
    return majority


def _runs(codes: _Codes) -> str:
    starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
    lengths = np.diff(starts, append=len(codes))
    return "".join(f"{length}{STATES[codes[start]]}" for start, length in zip(starts, lengths, strict=True))
