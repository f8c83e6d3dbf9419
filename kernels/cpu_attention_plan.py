"""How a call's attention is cut into tasks, which threads take one after another, and what was cut put together.

A task is some tokens of one sequence for one KV head. A sequence of many new tokens is cut into blocks of tokens, each
against all keys it sees. One of few is cut into segments of its keys (flash-decoding, Dao et al. 2023), at positions
that depend on nothing else, and merged in order: what comes out does not depend on the batch or on the number of
threads.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from .cpu_attention_in_place import in_place
from .cpu_attention_packed import packed
from .cpu_attention_softmax import power_of_two
from .cpu_attention_tiles import (
    LINE,
    Batch,
    Buffers,
    Rows,
    buffer_floats,
    finish_rows,
    place_buffers,
    round_up,
    start_rows,
)
from .cpu_numba import Kernel, compile_callback, compile_kernel, fingerprint, helper, pointer
from .cpu_program import BatchSizes
from .cpu_team import note_done, take
from .cpu_vectors import LANES, ROWS

SHORT_QUERY = 8
"""Most new tokens of a sequence whose K and V are read where they lie."""

SEGMENT = 512
"""Keys of a task of such a sequence: with 64 float32 each, 256 KiB, which take some ten µs."""

PACKED_ROWS = 384
"""Rows of a task of many tokens: packing a tile costs some ten rows' work, and with 64 float32 each they and their sums
take 200 KiB of a second-level cache."""

ENTRY = 7
"""int32 of the plan for a task of every KV head: sequence, first token, tokens, first key, end key, piece, pieces."""

_f32 = np.float32


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


def scratch_sizes(
    num_tokens: int, max_query_len: int, num_seqs: int, max_seq_len: int, num_kv_heads: int, group: int, head_dim: int
) -> Sizes:
    """Pages of it that are not written take no memory."""
    block = tokens_of_block(group)
    num_rows = min(max_query_len, block) * group
    entries = num_seqs * (-(-max_seq_len // SEGMENT) + 1) + num_tokens // block
    num_partial_rows = round_up(min(max_query_len, SHORT_QUERY) * group, ROWS)
    return Sizes(
        num_rows,
        round_up(entries * ENTRY, LINE),
        buffer_floats(num_rows, group, head_dim),
        round_up(num_partial_rows * (head_dim + 1 + LANES), LINE),
        entries * num_kv_heads,
    )


class Scratch(NamedTuple):
    """Addresses and sizes of a call's scratch memory; see ``Sizes``. The last of ``Planned``."""

    num_rows: Any
    plan_at: Any
    buffers_at: Any
    buffers: Any
    partials_at: Any
    partial: Any


_WORK_ARGUMENTS = (
    types.NamedTuple([types.int64] * 15 + [types.float64] * 3, Batch),
    types.NamedUniTuple(types.int64, len(Scratch._fields), Scratch),
    types.int64,
    types.int64,
    types.int64,
)


def _build_make_plan() -> Kernel:
    sources = fingerprint(__file__)

    def make_plan(lens_at, starts_at, num_seqs, window, plan_at, block):
        """Returns the number of entries, and the most pieces of a sequence. The longest tasks come first."""
        _ = sources  # for the cache's key
        lens = carray(pointer(lens_at), (num_seqs,), np.int32)
        starts = carray(pointer(starts_at), (num_seqs + 1,), np.int32)
        num, most = np.int64(0), np.int64(1)
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
        return num, most

    return compile_kernel(make_plan, parallel=False)


_MAKE_PLAN = _build_make_plan()


class Planned(NamedTuple):
    """Words of a call for attention to read after the number of rows: addresses and sizes."""

    tables_at: Any
    lens_at: Any
    starts_at: Any
    num_seqs: Any
    max_blocks: Any
    num_entries: Any
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
    num_kv_heads: int
    group: int
    """Query heads of a KV head."""
    head_dim: int
    window: int

    def plan(self, sizes: BatchSizes, threads: int) -> tuple[Planned, Tensor]:
        of = scratch_sizes(
            sizes.num_tokens,
            sizes.max_query_len,
            sizes.num_seqs,
            sizes.max_seq_len,
            self.num_kv_heads,
            self.group,
            self.head_dim,
        )
        memory = torch.empty(of.plan + threads * of.buffers + of.num_partials * of.partial)
        plan_at = memory.data_ptr()
        buffers_at = plan_at + 4 * of.plan
        partials_at = buffers_at + 4 * threads * of.buffers
        block = tokens_of_block(self.group)
        entries: Any = _MAKE_PLAN(self.lens_at, self.starts_at, sizes.num_seqs, self.window, plan_at, block)
        batch = self.tables_at, self.lens_at, self.starts_at, sizes.num_seqs, sizes.table_width
        scratch = of.num_rows, plan_at, buffers_at, of.buffers, partials_at, of.partial
        return Planned._make((*batch, *entries, *scratch)), memory


@helper
def _entry(plan_at, index):
    return carray(pointer(plan_at + 4 * ENTRY * index), (ENTRY,), np.int32)


@helper
def _enter(plan_at, num, seq, first, tokens, first_key, end_key, piece, pieces):
    entry = _entry(plan_at, num)
    entry[0], entry[1], entry[2] = seq, first, tokens
    entry[3], entry[4], entry[5], entry[6] = first_key, end_key, piece, pieces


@helper
def _rows_of(batch, entry, head):
    seq, first = np.int64(entry[0]), np.int64(entry[1])
    lens = carray(pointer(batch.lens_at), (batch.num_seqs,), np.int32)
    starts = carray(pointer(batch.starts_at), (batch.num_seqs + 1,), np.int32)
    position = np.int64(lens[seq]) - np.int64(starts[seq + 1] - starts[seq]) + first
    table_at = batch.tables_at + 4 * seq * batch.max_blocks
    token = np.int64(starts[seq]) + first
    return Rows(table_at, head, token, np.int64(entry[2]), position, np.int64(entry[3]), np.int64(entry[4]))


@helper
def _partial_of(scratch, task, own, head_dim):
    """A thread's own buffers, but for sums: attended, total and bound lie in a task's partial, one after the other."""
    at, rows = scratch.partials_at + 4 * scratch.partial * task, scratch.partial // (head_dim + 1 + LANES)
    total = at + 4 * rows * head_dim
    bound = total + 4 * rows * LANES
    return Buffers(own.query, at, bound, total, own.scores, own.k_scale, own.v_scale, own.tile, own.transposed)


@functools.cache
def build_work(head_dim: int, group: int, kind: str) -> Any:
    """What each thread does: takes tasks until there are no more. ``address`` is what ``call_work`` calls.

    Sizes are literals in it: they decide what registers hold. ``np.int64`` makes plain numbers of them.
    """
    sources = fingerprint(__file__)

    def work(batch, scratch, member, num_tasks, tally_at):
        _ = sources  # for the cache's key
        # No literals for what need not know them: it is compiled once, not for each model's sizes.
        width, height = np.int64(head_dim), np.int64(group)
        own = place_buffers(scratch.buffers_at + 4 * scratch.buffers * member, scratch.num_rows, height, width)
        task, _ = take(tally_at, num_tasks, 1)
        while task < num_tasks:
            entry = _entry(scratch.plan_at, task // batch.num_kv_heads)
            rows = _rows_of(batch, entry, task % batch.num_kv_heads)
            whole = entry[6] == 1
            buffers = own if whole else _partial_of(scratch, task, own, width)
            start_rows(batch, rows, buffers, height, width)
            if rows.num_tokens <= SHORT_QUERY:
                in_place(batch, rows, buffers, group, head_dim, kind)
            else:
                packed(batch, rows, buffers, group, head_dim, kind)
            if whole:
                finish_rows(batch, rows, buffers, height, width)
            note_done(tally_at, task, task + 1)
            task, _ = take(tally_at, num_tasks, 1)

    return compile_callback(work, types.void(*_WORK_ARGUMENTS))


@intrinsic
def call_work(
    typing_context: Any, work_at: Any, batch: Any, scratch: Any, member: Any, num_tasks: Any, tally_at: Any
) -> Any:
    """Of ``build_work``. By address: whoever calls is compiled once for all models, and work once for all callers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = [argument.type for argument in arguments[1:]]
        function_type = ir.FunctionType(context.get_value_type(signature.return_type), kinds)
        return builder.call(builder.inttoptr(arguments[0], function_type.as_pointer()), arguments[1:])

    return types.void(types.int64, *_WORK_ARGUMENTS), generate


@helper
def merge(batch, scratch, index, group, head_dim):
    """Puts the segments of a sequence, whose first one is an entry's, together in order, for each head."""
    entry = _entry(scratch.plan_at, index)
    if entry[5] > 0 or entry[6] == 1:
        return
    own = place_buffers(scratch.buffers_at, scratch.num_rows, group, head_dim)
    for head in range(batch.num_kv_heads):
        task = index * batch.num_kv_heads + head
        rows = _rows_of(batch, entry, head)
        first = _partial_of(scratch, task, own, head_dim)
        for piece in range(1, entry[6]):
            other = _partial_of(scratch, task + piece * batch.num_kv_heads, own, head_dim)
            for row in range(rows.num_tokens * group):
                _add_partial(first, other, row, head_dim)
        finish_rows(batch, rows, first, group, head_dim)


@helper
def _add_partial(first, other, row, head_dim):
    bound = carray(pointer(first.bound + 4 * row), (1,), _f32)
    other_bound = carray(pointer(other.bound + 4 * row), (1,), _f32)
    new_bound = max(bound[0], other_bound[0])
    factor, other_factor = power_of_two(bound[0] - new_bound), power_of_two(other_bound[0] - new_bound)
    bound[0] = new_bound
    total = carray(pointer(first.total + 4 * row * LANES), (LANES,), _f32)
    other_total = carray(pointer(other.total + 4 * row * LANES), (LANES,), _f32)
    for lane in range(LANES):
        total[lane] = total[lane] * factor + other_total[lane] * other_factor
    attended = carray(pointer(first.attended + 4 * row * head_dim), (head_dim,), _f32)
    other_attended = carray(pointer(other.attended + 4 * row * head_dim), (head_dim,), _f32)
    for d in range(head_dim):
        attended[d] = attended[d] * factor + other_attended[d] * other_factor
