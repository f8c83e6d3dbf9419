"""What threads do with a plan of attention (cpu_attention_plan.py): the tasks, and the merging of segments."""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic

from .cpu_attention_in_place import in_place
from .cpu_attention_packed import packed
from .cpu_attention_plan import (
    END_KEY,
    FIRST_KEY,
    FIRST_OF_TASK,
    FIRST_TOKEN,
    MEMBERS,
    NEXT,
    PIECE,
    PIECES,
    SEQ,
    SHORT_QUERY,
    TOKENS,
    Scratch,
    entry_at,
)
from .cpu_attention_softmax import TILE, power_of_two
from .cpu_attention_tiles import Batch, Buffers, Rows, finish_rows, place_buffers, start_rows
from .cpu_numba import compile_callback, fingerprint, helper, pointer
from .cpu_team import note_done, take
from .cpu_vectors import LANES, ROWS

_f32 = np.float32

_WORK_ARGUMENTS = (
    types.NamedTuple([types.int64] * 15 + [types.float64] * 3, Batch),
    types.NamedUniTuple(types.int64, len(Scratch._fields), Scratch),
    types.int64,
    types.int64,
    types.int64,
)


@helper
def _rows_of(batch, entry, head):
    seq, first = np.int64(entry[SEQ]), np.int64(entry[FIRST_TOKEN])
    lens = carray(pointer(batch.lens_at), (batch.num_seqs,), np.int32)
    starts = carray(pointer(batch.starts_at), (batch.num_seqs + 1,), np.int32)
    position = np.int64(lens[seq]) - np.int64(starts[seq + 1] - starts[seq]) + first
    table_at = batch.tables_at + 4 * seq * batch.max_blocks
    token = np.int64(starts[seq]) + first
    return Rows(
        table_at, head, token, np.int64(entry[TOKENS]), position, np.int64(entry[FIRST_KEY]), np.int64(entry[END_KEY])
    )


@helper
def _partial_of(scratch, task, own, head_dim):
    """A thread's own buffers, but for sums: attended, total and bound lie in a task's partial, one after the other."""
    at, rows = scratch.partials_at + 4 * scratch.partial * task, scratch.partial // (head_dim + 1 + LANES)
    total = at + 4 * rows * head_dim
    bound = total + 4 * rows * LANES
    return Buffers(own.query, at, bound, total, own.scores, own.k_scale, own.v_scale, own.tile, own.transposed)


@helper
def _entry_in_task(batch, scratch, index, place, head, own, group, head_dim):
    """The rows of an entry in a task of several, and its buffers: its query is the ``place``-th of the thread's own."""
    rows = _rows_of(batch, entry_at(scratch.plan_at, index), head)
    partial = _partial_of(scratch, index * batch.num_kv_heads + head, own, head_dim)
    room = -(-rows.num_tokens * group // ROWS) * ROWS
    return rows, Buffers(own.query + 4 * place * room * head_dim, *partial[1:])


@helper
def _start_together(batch, scratch, index, head, own, group, head_dim):
    place = np.int64(0)
    while index >= 0:
        rows, buffers = _entry_in_task(batch, scratch, index, place, head, own, group, head_dim)
        start_rows(batch, rows, buffers, group, head_dim)
        index, place = np.int64(entry_at(scratch.plan_at, index)[NEXT]), place + 1


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
            head = task % batch.num_kv_heads
            index = np.int64(entry_at(scratch.plan_at, task // batch.num_kv_heads)[FIRST_OF_TASK])
            entry = entry_at(scratch.plan_at, index)
            rows = _rows_of(batch, entry, head)
            whole = entry[PIECES] == 1
            buffers = own if whole else _partial_of(scratch, index * batch.num_kv_heads + head, own, width)
            if entry[MEMBERS] > 1:
                _start_together(batch, scratch, index, head, own, height, width)
                for start in range(rows.first_key, rows.end_key, TILE):
                    each, place = index, np.int64(0)
                    while each >= 0:
                        rows, buffers = _entry_in_task(batch, scratch, each, place, head, own, height, width)
                        tile = Rows(*rows[:5], start, start + TILE)  # type: ignore[call-arg]
                        in_place(batch, tile, buffers, group, head_dim, kind)
                        each, place = np.int64(entry_at(scratch.plan_at, each)[NEXT]), place + 1
            else:
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
    entry = entry_at(scratch.plan_at, index)
    if entry[PIECE] > 0 or entry[PIECES] == 1:
        return
    own = place_buffers(scratch.buffers_at, scratch.num_rows, group, head_dim)
    for head in range(batch.num_kv_heads):
        task = index * batch.num_kv_heads + head
        rows = _rows_of(batch, entry, head)
        first = _partial_of(scratch, task, own, head_dim)
        for piece in range(1, entry[PIECES]):
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
