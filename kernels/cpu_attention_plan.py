"""How a call's attention is cut into tasks, which threads take one after another, and what was cut put together.

A task is some tokens of one sequence for one KV head. A sequence of many new tokens is cut into blocks of tokens, each
against all keys it sees. One of few is cut into segments of its keys (flash-decoding, Dao et al. 2023), at positions
that depend on nothing else, and merged in order. Sequences whose segment is the same blocks, a prefix that they share,
are done together, tile by tile, so that K and V are read from memory once for all of them. What comes out does not
depend on the batch or on the number of threads.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from .cpu_attention_tiles import LINE, buffer_floats, round_up
from .cpu_numba import Kernel, compile_kernel, fingerprint, helper, pointer
from .cpu_program import BatchSizes
from .cpu_vectors import LANES, ROWS

SHORT_QUERY = 8
"""Most new tokens of a sequence whose K and V are read where they lie."""

SEGMENT = 512
"""Keys of a task of such a sequence: with 64 float32 each, 256 KiB, which take some ten µs."""

PACKED_ROWS = 384
"""Rows of a task of many tokens: packing a tile costs some ten rows' work, and with 64 float32 each they and their sums
take 200 KiB of a second-level cache."""

ENTRY = 10
"""int32 of the plan for some tokens of a sequence against some keys: an entry."""
SEQ, FIRST_TOKEN, TOKENS, FIRST_KEY, END_KEY = range(5)
PIECE, PIECES = 5, 6
"""Which of the sequence's segments, and how many it has."""
NEXT, MEMBERS = 7, 8
"""The next entry of the same task, or -1; of the first of a task the number of them, else 0."""
FIRST_OF_TASK = 9
"""In the entry numbered as a task: which entry is the first of that task."""

TASKS_PER_THREAD = 8
"""So many at least, where entries are joined, so that threads end at about the same time."""

MOST_TOGETHER = 16
"""Entries of a task: sequences that share a segment."""


def tokens_of_block(group: int) -> int:
    return max(SHORT_QUERY, PACKED_ROWS // group)


class Sizes(NamedTuple):
    """Of a call's scratch memory, in words of 4 bytes, whole cache lines each."""

    num_rows: int
    """The most of a task."""
    plan: int
    buffers: int
    """Of one thread."""
    partial: int
    """What one task on a segment leaves."""
    num_partials: int


def scratch_sizes(sizes: BatchSizes, num_entries: int, num_kv_heads: int, group: int, head_dim: int) -> Sizes:
    """Pages of it that are not written take no memory."""
    num_partial_rows = round_up(min(sizes.max_query_len, SHORT_QUERY) * group, ROWS)
    num_rows = min(sizes.max_query_len, tokens_of_block(group)) * group
    if sizes.num_seqs > 1 and sizes.max_seq_len > SEGMENT:
        num_rows = max(num_rows, MOST_TOGETHER * num_partial_rows)
    return Sizes(
        num_rows,
        round_up(num_entries * ENTRY, LINE),
        buffer_floats(num_rows, group, head_dim),
        round_up(num_partial_rows * (head_dim + 1 + LANES), LINE),
        num_entries * num_kv_heads,
    )


class Scratch(NamedTuple):
    """Addresses and sizes of a call's scratch memory; see ``Sizes``. The last of ``Planned``."""

    num_rows: Any
    plan_at: Any
    buffers_at: Any
    buffers: Any
    partials_at: Any
    partial: Any


def _build_make_plan() -> Kernel:
    sources = fingerprint(__file__)

    def make_plan(tables_at, table_width, block_size, lens_at, starts_at, num_seqs, window, plan_at, block, shares):
        """Returns the numbers of entries and tasks, and the most pieces of a sequence. The longest tasks come first.

        There will be ``shares`` tasks or more if there are as many entries.
        """
        _ = sources  # for the cache's key
        lens = carray(pointer(lens_at), (num_seqs,), np.int32)
        starts = carray(pointer(starts_at), (num_seqs + 1,), np.int32)
        num, most = np.int64(0), np.int64(1)
        tables = Tables(tables_at, table_width, block_size)
        for seq in range(num_seqs):
            tokens = np.int64(starts[seq + 1] - starts[seq])
            if tokens > SHORT_QUERY:
                before = np.int64(lens[seq]) - tokens
                for index in range((tokens - 1) // block + 1):
                    first = (tokens - 1) // block * block - index * block
                    size = min(block, tokens - first)
                    first_key = max(0, before + first + 1 - window)
                    end_key = before + first + size
                    _enter(plan_at, num, seq, first, size, first_key, end_key, np.int64(0), np.int64(1))
                    num += 1
        num_long = num
        for seq in range(num_seqs):
            tokens = np.int64(starts[seq + 1] - starts[seq])
            if 0 < tokens <= SHORT_QUERY:
                end = np.int64(lens[seq])
                first_key = max(0, end - tokens + 1 - window)
                skipped = first_key // SEGMENT
                pieces = (end - 1) // SEGMENT + 1 - skipped
                most = max(most, pieces)
                for piece in range(pieces):
                    segment_end = min(end, (skipped + piece + 1) * SEGMENT)
                    _enter(plan_at, num, seq, np.int64(0), tokens, first_key, segment_end, piece, pieces)
                    first_key = segment_end
                    num += 1
        return num, _make_tasks(plan_at, num_long, num, min(MOST_TOGETHER, num // shares), tables), most

    return compile_kernel(make_plan, parallel=False)


def _build_count_entries() -> Kernel:
    sources = fingerprint(__file__)

    def count_entries(lens_at, starts_at, num_seqs, window, block):
        """The number of entries that ``make_plan`` will make."""
        _ = sources  # for the cache's key
        lens = carray(pointer(lens_at), (num_seqs,), np.int32)
        starts = carray(pointer(starts_at), (num_seqs + 1,), np.int32)
        num = np.int64(0)
        for seq in range(num_seqs):
            tokens, end = np.int64(starts[seq + 1] - starts[seq]), np.int64(lens[seq])
            if tokens > SHORT_QUERY:
                num += (tokens - 1) // block + 1
            elif tokens > 0:
                num += (end - 1) // SEGMENT + 1 - max(0, end - tokens + 1 - window) // SEGMENT
        return num

    return compile_kernel(count_entries, parallel=False)


_COUNT_ENTRIES, _MAKE_PLAN = _build_count_entries(), _build_make_plan()


class Tables(NamedTuple):
    """Block tables: the address, blocks of a row, tokens of a block."""

    at: Any
    width: Any
    block_size: Any


class Planned(NamedTuple):
    """Words of a call for attention to read after the number of rows: addresses and sizes."""

    tables_at: Any
    lens_at: Any
    starts_at: Any
    num_seqs: Any
    max_blocks: Any
    num_entries: Any
    num_tasks: Any
    """Of each KV head."""
    pieces: Any
    """The most of a sequence: with one, nothing is merged."""
    num_rows: Any
    plan_at: Any
    buffers_at: Any
    buffers: Any
    partials_at: Any
    partial: Any


@dataclass(frozen=True)
class AttentionPlanner:
    """Plans a call, for all layers whose attention is of one shape; see ``cpu_program.Planner``."""

    tables_at: int
    lens_at: int
    starts_at: int
    block_size: int
    num_kv_heads: int
    group: int
    """Query heads of a KV head."""
    head_dim: int
    window: int

    def plan(self, sizes: BatchSizes, threads: int) -> tuple[Planned, Tensor]:
        block = tokens_of_block(self.group)
        lens = self.lens_at, self.starts_at, sizes.num_seqs, self.window
        num_entries: Any = _COUNT_ENTRIES(*lens, block)
        of = scratch_sizes(sizes, num_entries, self.num_kv_heads, self.group, self.head_dim)
        memory = torch.empty(of.plan + threads * of.buffers + of.num_partials * of.partial)
        plan_at = memory.data_ptr()
        buffers_at = plan_at + 4 * of.plan
        partials_at = buffers_at + 4 * threads * of.buffers
        tables = self.tables_at, sizes.table_width, self.block_size
        shares = -(-TASKS_PER_THREAD * threads // self.num_kv_heads)
        entries: Any = _MAKE_PLAN(*tables, *lens, plan_at, block, shares)
        batch = self.tables_at, self.lens_at, self.starts_at, sizes.num_seqs, sizes.table_width
        scratch = of.num_rows, plan_at, buffers_at, of.buffers, partials_at, of.partial
        return Planned._make((*batch, *entries, *scratch)), memory


@helper
def _make_tasks(plan_at, num_long, num_entries, limit, tables):
    """Returns their number. Pieces of several sequences that are the same blocks become one task, up to ``limit``.

    Who shares a segment shares all before it: a sequence is compared with those from the one on that it joined last,
    and with none after a segment that it shares with nobody.
    """
    num_tasks, own_begin, begin = np.int64(0), num_long, num_long
    for index in range(num_entries):
        own, joined = entry_at(plan_at, index), np.int64(-1)
        if index >= num_long:
            if own[PIECE] == 0:
                own_begin, begin = np.int64(index), num_long
            if _is_whole_segment(own, tables):
                joined, begin = _task_to_join(plan_at, begin, own_begin, own, limit, tables)
        if joined < 0:
            own[MEMBERS] = 1
            entry_at(plan_at, num_tasks)[FIRST_OF_TASK] = index
            num_tasks += 1
        else:
            entry_at(plan_at, joined)[MEMBERS] += 1
            while entry_at(plan_at, joined)[NEXT] >= 0:
                joined = np.int64(entry_at(plan_at, joined)[NEXT])
            entry_at(plan_at, joined)[NEXT] = index
    return num_tasks


@helper
def _is_whole_segment(entry, tables):
    size = entry[END_KEY] - entry[FIRST_KEY]
    return (
        entry[PIECES] > 1 and entry[FIRST_KEY] % SEGMENT == 0 and size == SEGMENT and SEGMENT % tables.block_size == 0
    )


@helper
def _task_to_join(plan_at, begin, own_begin, own, limit, tables):
    """The first entry of a task that an entry may join, and of its sequence; -1 and the entry's own sequence: none.

    Looks at the sequences whose first entries are from ``begin`` to before ``own_begin``.
    """
    while begin < own_begin:
        other = begin + own[FIRST_KEY] // SEGMENT - entry_at(plan_at, begin)[FIRST_KEY] // SEGMENT
        pieces = np.int64(entry_at(plan_at, begin)[PIECES])
        if begin <= other < begin + pieces and _may_join(entry_at(plan_at, other), own, limit, tables):
            return np.int64(other), begin
        begin += pieces
    return np.int64(-1), own_begin


@helper
def _may_join(first, own, limit, tables):
    if not 0 < first[MEMBERS] < limit or first[TOKENS] != own[TOKENS]:
        return False
    if first[FIRST_KEY] != own[FIRST_KEY] or first[END_KEY] != own[END_KEY]:
        return False
    block, num_blocks = own[FIRST_KEY] // tables.block_size, SEGMENT // tables.block_size
    ours = carray(pointer(tables.at + 4 * (own[SEQ] * tables.width + block)), (num_blocks,), np.int32)
    theirs = carray(pointer(tables.at + 4 * (first[SEQ] * tables.width + block)), (num_blocks,), np.int32)
    for i in range(num_blocks):  # noqa: SIM110 numba has no all()
        if ours[i] != theirs[i]:
            return False
    return True


@helper
def entry_at(plan_at, index):
    return carray(pointer(plan_at + 4 * ENTRY * index), (ENTRY,), np.int32)


@helper
def _enter(plan_at, num, seq, first, tokens, first_key, end_key, piece, pieces):
    entry = entry_at(plan_at, num)
    entry[SEQ], entry[FIRST_TOKEN], entry[TOKENS] = seq, first, tokens
    entry[FIRST_KEY], entry[END_KEY], entry[PIECE], entry[PIECES] = first_key, end_key, piece, pieces
    entry[NEXT], entry[MEMBERS] = -1, 0
