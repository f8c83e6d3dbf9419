"""How the threads of a rank run kernels together, one at once or, recorded, all of a model's layers in one go.

A *launch* is a compiled function and its arguments, 64-bit words. Every member of the team calls it, takes tasks from
the launch's tally until none is left, and goes on to the next launch when all tasks are done, whoever did them: one
that comes late, because something else had its processor, passes what the others did without it. Only one that loses
its processor in the middle of a task, or with one reserved, is waited for.

    def work(words_at, call_at, tally_at, member, team):        compiled by ``compile_work``
        x_at, width = words(words_at, 2)                        the same in each call
        rows = words(call_at, 1)[0]                             changes from call to call
        first, last = take(tally_at, rows, at_once)
        while first < last:
            ... rows first to last ...
            note_done(tally_at, first, last)
            first, last = take(tally_at, rows, at_once)
        return rows                                             how many tasks there are

The number of tasks must follow from what does not change while the call runs.
"""

# Kernels are compiled by their own type systems.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from .cpu_llvm import I64, load, pause, plus
from .cpu_numba import Kernel, compile_callback, compile_kernel, fingerprint, helper, pointer

LAUNCH_WORDS = 32
"""Of a launch in memory: the function's address, where in the call's words its own begin, its arguments."""
TALLY_WORDS = 8
"""Of a launch: tasks taken, tasks done; in a cache line of their own."""

ELEMENTS_AT_ONCE = 8192
"""Elementwise work below this is not divided: it takes a member about a µs."""

SPINS = 4096
"""A member that waits looks so many times, some 60 µs, before it offers its processor to others between looks."""

_WORK = types.int64(*[types.int64] * 5)


def compile_work(function: Callable[..., int], *, exact: bool = False) -> Any:
    """Compiles now, or loads from the cache. Keep what is returned: its ``address`` is what a launch needs.

    ``exact``: every operation is done and rounded as it is written.
    """
    return compile_callback(function, _WORK, exact=exact)


@intrinsic(prefer_literal=True)
def words(typing_context: Any, at: Any, N: Any) -> Any:
    """A tuple of the N words, int64, at an address."""
    count = N.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = [load(builder, plus(builder, arguments[0], 8 * index), I64) for index in range(count)]
        return context.make_tuple(builder, signature.return_type, values)

    return types.UniTuple(types.int64, count)(at, N), generate


@intrinsic
def float_of_word(typing_context: Any, word: Any) -> Any:
    """The float64 whose bits a word has; see ``word_of_float``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


def word_of_float(number: float) -> int:
    """A float64's bits."""
    return int(np.float64(number).view(np.int64))


@intrinsic
def _add_to(typing_context: Any, counter_at: Any, number: Any) -> Any:
    """Adds to the int64 at an address, at once for all threads; gives what was there."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], I64.as_pointer()), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@helper
def take(tally_at, tasks, at_once):
    """The next tasks for a member, from the first up to the last, which is not among them; first >= last at the end."""
    first = _add_to(tally_at, np.int64(1)) * at_once
    return first, min(first + at_once, tasks)


@helper
def share_of(tasks, team):
    """Tasks to take at once, so that each member takes some eight times."""
    return max(1, tasks // (8 * team))


@helper
def takes_ahead(tasks, team):
    """Whether a member may reserve a task while it works on another, to know what to prefetch: where there are few, the
    others would be left without."""
    return tasks >= 8 * team


@helper
def rows_at_once(width):
    """Rows to take at once where their elements cost next to nothing: with fewer, taking them would cost more."""
    return max(1, ELEMENTS_AT_ONCE // width)


@helper
def note_done(tally_at, first, last):
    _add_to(tally_at + 8, last - first)


@intrinsic
def await_done(typing_context: Any, tally_at: Any, tasks: Any) -> Any:
    """Returns when so many tasks are done: looks again and again, later with others on this processor in between."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        done = builder.inttoptr(plus(builder, arguments[0], 8), I64.as_pointer())
        offer = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.IntType(32), []), "sched_yield")
        looks = cgutils.alloca_once_value(builder, I64(0))
        look, wait, end = (builder.append_basic_block(name) for name in ("look", "wait", "end"))
        builder.branch(look)
        builder.position_at_end(look)
        is_done = builder.icmp_signed(">=", builder.load_atomic(done, "acquire", 8), arguments[1])
        builder.cbranch(is_done, end, wait)
        builder.position_at_end(wait)
        builder.store(builder.add(builder.load(looks), I64(1)), looks)
        with builder.if_else(builder.icmp_signed("<", builder.load(looks), I64(SPINS))) as (early, late):
            with early:
                pause(builder)
            with late:
                builder.call(offer, [])
        builder.branch(look)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def _call(typing_context: Any, work_at: Any, words_at: Any, call_at: Any, tally_at: Any, member: Any, team: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = builder.inttoptr(arguments[0], ir.FunctionType(I64, [I64] * 5).as_pointer())
        return builder.call(function, arguments[1:])

    return types.int64(*[types.int64] * 6), generate


@helper
def _clear(at, num_words):
    carray(pointer(at), (num_words,), np.int64)[:] = 0


@helper
def _follow(launches_at, num_launches, call_at, tallies_at, member, team):
    for index in range(num_launches):
        at, tally_at = launches_at + 8 * LAUNCH_WORDS * index, tallies_at + 8 * TALLY_WORDS * index
        work_at, own = words(at, 2)
        tasks = _call(work_at, at + 16, call_at + 8 * own, tally_at, member, team)
        await_done(tally_at, tasks)


def _build_run(parallel: bool) -> Kernel:
    sources = fingerprint(__file__)

    def run(launches_at, num_launches, call_at, tallies_at, threads):
        _ = sources  # for the cache's key
        _clear(tallies_at, num_launches * TALLY_WORDS)
        team = threads if parallel else 1
        for member in prange(team):
            _follow(launches_at, num_launches, call_at, tallies_at, np.int64(member), team)

    return compile_kernel(run, parallel=parallel)


RUN_LAUNCHES = {parallel: _build_run(parallel) for parallel in (False, True)}
