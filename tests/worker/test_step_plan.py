"""The step plan on the wire: one int32 buffer that says of itself what it is and how long."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.step_plan import (
    HEADER_LENGTH,
    GraphKey,
    Int32Array,
    PlanKind,
    StepPlan,
    pack_plan,
    plan_length,
    unpack_plan,
)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Arrays are of random numbers: drawn one by one these would take most of the time."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))

    def array(*shape: int) -> Int32Array:
        return rng.integers(-(2**31), 2**31, shape, np.int32)

    seqs, tokens, updates, blocks, copies, logits, *reads = draw(st.tuples(*[st.integers(0, 4)] * 8))
    return StepPlan(
        kind=draw(st.sampled_from(PlanKind)),
        step=draw(st.integers(0, 2**31 - 1)),
        slots=array(seqs),
        num_new_tokens=array(seqs),
        num_computed_tokens=array(seqs),
        token_ids=array(tokens),
        tokens_from_step=draw(st.none() | st.integers(0, 2**31 - 1)),
        table_updates=array(updates, 3),
        table_blocks=array(blocks),
        copies=array(copies, 2),
        logit_indices=array(logits),
        scored=array(reads[0], 4),
        pooled=array(reads[1], 2),
        share_sampled=draw(st.booleans()),
        graph=draw(st.none() | st.builds(GraphKey, st.integers(1, 512), st.integers(1, 2**31 - 1))),
    )


def assert_equal(a: StepPlan, b: StepPlan) -> None:
    for field in fields(StepPlan):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if isinstance(x, np.ndarray):
            assert y.dtype == np.int32
            np.testing.assert_array_equal(x, y)
            assert x.shape == y.shape
        else:
            assert x == y
            assert type(x) is type(y)


@given(plans())
def test_a_plan_comes_back_as_it_was(plan: StepPlan) -> None:
    buffer = pack_plan(plan)
    assert buffer.dtype == np.int32
    assert_equal(unpack_plan(buffer), plan)


@given(plans(), st.integers(0, 9))
def test_the_header_says_where_a_plan_ends(plan: StepPlan, num_more: int) -> None:
    buffer = pack_plan(plan)
    assert plan_length(buffer[:HEADER_LENGTH]) == buffer.size
    assert_equal(unpack_plan(np.concatenate([buffer, np.full(num_more, 99, np.int32)])), plan)


@given(plans(), st.data())
def test_a_plan_cut_short_is_refused(plan: StepPlan, data: st.DataObject) -> None:
    buffer = pack_plan(plan)
    with pytest.raises(ValueError, match="step plan"):
        unpack_plan(buffer[: data.draw(st.integers(0, buffer.size - 1))])


@given(plans(), st.sampled_from([*range(6, 12), 14, 15]), st.integers(-3, 3).filter(bool))
def test_counts_that_contradict_the_length_are_refused(plan: StepPlan, field: int, change: int) -> None:
    buffer = pack_plan(plan)
    buffer[field] += change
    with pytest.raises(ValueError, match="not a whole step plan"):
        unpack_plan(buffer)


def test_another_version_is_refused_with_both_numbers() -> None:
    buffer = pack_plan(StepPlan(PlanKind.HEARTBEAT))
    buffer[0] += 1
    with pytest.raises(ValueError, match="magic 0xc7a0004, expected 0xc7a0003"):
        unpack_plan(buffer)


def test_a_heartbeat_is_a_header_alone() -> None:
    assert pack_plan(StepPlan(PlanKind.HEARTBEAT)).size == HEADER_LENGTH


def test_unpacking_copies_nothing() -> None:
    buffer = pack_plan(StepPlan(PlanKind.STEP, token_ids=np.arange(5, dtype=np.int32)))
    assert np.shares_memory(unpack_plan(buffer).token_ids, buffer)
