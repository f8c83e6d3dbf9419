"""The plan of a step: what the ranks are told, and what a later plan may refer to."""

from __future__ import annotations

import numpy as np
from scheduler_bench import DRAWN, SchedulerBench, tokens_of

from octavo.worker.messages import FinishReason
from octavo.worker.plan_builder import PlanBuilder, ScheduledStep
from octavo.worker.sequence import Sequence

# ---- one step after the other ----


def test_nothing_to_do_is_no_step() -> None:
    assert SchedulerBench().scheduler.plan() is None


def test_a_prompt_is_one_step_and_then_each_token_is_one() -> None:
    bench = SchedulerBench()
    sequence = bench.add(range(6))
    plan = bench.step().plan
    assert plan.token_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert plan.num_computed_tokens.tolist() == [0]
    assert plan.logit_indices.tolist() == [5]
    assert plan.table_updates.tolist() == [[sequence.slot, 0, 2]]
    assert plan.table_blocks.tolist() == sequence.block_table
    plan = bench.step().plan
    assert plan.token_ids.tolist() == [9]
    assert plan.num_computed_tokens.tolist() == [6]
    assert plan.table_updates.size == 0  # the ranks know the table


def test_a_block_is_taken_when_a_token_needs_it_and_sent_once() -> None:
    bench = SchedulerBench()
    sequence = bench.add(range(4))
    bench.step()
    assert len(sequence.block_table) == 1
    plan = bench.step().plan
    assert plan.table_updates.tolist() == [[sequence.slot, 1, 1]]
    assert plan.table_blocks.tolist() == sequence.block_table[1:]


def test_a_long_prompt_is_computed_in_chunks_and_draws_at_its_end() -> None:
    bench = SchedulerBench(budget=4)
    bench.add(range(10))
    steps = [bench.step() for _ in range(3)]
    assert [step.plan.token_ids.tolist() for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(step.sampled) for step in steps] == [0, 0, 1]
    assert [step.num_prefill_tokens for step in steps] == [4, 4, 1]


def test_running_streams_go_first_and_a_prompt_gets_the_rest_of_the_budget() -> None:
    bench = SchedulerBench(budget=6)
    bench.add(range(3))
    bench.add(range(10, 13))
    bench.step()
    bench.add(range(20, 40))
    assert tokens_of(bench.step()) == {"0": 1, "1": 1, "2": 4}
    assert tokens_of(bench.step()) == {"0": 1, "1": 1, "2": 4}


def test_the_plan_is_in_the_order_of_scheduling_and_its_logits_too() -> None:
    bench = SchedulerBench(budget=8)
    first, second = bench.add(range(3)), bench.add(range(10, 30))
    step = bench.plan()
    assert step.scheduled == {first: 3, second: 5}
    assert step.sampled == (first,)
    assert step.plan.logit_indices.tolist() == [2]
    assert step.plan.num_new_tokens.tolist() == [3, 5]


def test_step_numbers_start_anew_before_they_outgrow_int32() -> None:
    bench = SchedulerBench()
    bench.add(range(3))
    bench.scheduler._num_steps = 2**31 - 2
    assert [bench.step().plan.step for _ in range(2)] == [2**31 - 1, 0]


def test_tables_of_a_plan_are_int32_even_when_they_are_empty() -> None:
    bench = SchedulerBench()
    bench.add(range(3))
    bench.step()
    plan = bench.step().plan
    assert {array.dtype for array in (plan.table_updates, plan.table_blocks, plan.slots)} == {np.dtype(np.int32)}
    assert plan.table_updates.shape == (0, 3)


def test_a_sequence_that_is_taken_out_leaves_neither_tokens_nor_copies() -> None:
    bench = SchedulerBench()
    kept, removed = bench.add(range(3)), bench.add(range(10, 13))
    for sequence in (kept, removed):
        sequence.slot, sequence.num_computed_tokens = 0, 3
    builder = PlanBuilder()
    builder.add(kept, 3)
    builder.copy(removed, 5, 6)
    builder.add(removed, 1)
    builder.add(removed, 2)
    assert builder.remove(removed) == 3
    assert builder.remove(removed) == 0
    assert (builder.num_tokens, list(builder), builder.num_copies) == (3, [kept], 0)
    assert list(builder.sources) == [5]  # a reference that is still to be released
    assert builder.build(1, {}, plans_ahead=False).plan.token_ids.tolist() == [0, 1, 2]


# ---- planned ahead ----


def ahead(*, num_prompt_tokens: int = 3, max_tokens: int = 20) -> tuple[SchedulerBench, Sequence, ScheduledStep]:
    """A prompt's step is under way."""
    bench = SchedulerBench(plans_ahead=True)
    sequence = bench.add(range(num_prompt_tokens), max_tokens=max_tokens)
    return bench, sequence, bench.plan()


def test_a_token_that_the_step_under_way_samples_is_named_by_its_row() -> None:
    bench = SchedulerBench(plans_ahead=True)
    bench.add(range(3))
    bench.add(range(10, 13))
    first = bench.plan()
    assert first.plan.tokens_from_step is None
    assert first.plan.share_sampled
    second = bench.plan().plan
    assert second.token_ids.tolist() == [-1, -2]
    assert second.tokens_from_step == first.plan.step
    assert second.num_computed_tokens.tolist() == [3, 3]


def test_rows_are_those_of_the_step_before_and_not_of_the_plan_s_order() -> None:
    bench = SchedulerBench(plans_ahead=True, budget=8)
    in_chunks, decoding = bench.add(range(13)), bench.add(range(100, 102))
    first = bench.plan()
    assert tokens_of(first) == {"0": 6, "1": 2}
    assert first.sampled == (decoding,)
    second = bench.plan()  # decodes go first
    assert second.scheduled == {decoding: 1, in_chunks: 7}
    assert second.plan.token_ids.tolist() == [-1, *range(6, 13)]
    assert second.sampled == (decoding, in_chunks)
    bench.end(first)
    assert bench.plan().plan.token_ids.tolist() == [-2, -1]


def test_what_is_known_by_then_is_named_itself() -> None:
    bench, sequence, first = ahead()
    bench.end(first)
    assert bench.plan().plan.token_ids.tolist() == [DRAWN]
    assert sequence.num_pending_tokens == 1


def test_no_more_tokens_are_planned_than_a_sequence_may_have() -> None:
    """Of ``max_tokens`` tokens the last needs not be computed, so it is the last but one that is planned ahead."""
    bench, sequence, first = ahead(max_tokens=2)
    second = bench.plan()
    assert second.plan.token_ids.tolist() == [-1]
    assert bench.scheduler.plan() is None
    bench.end(first)
    assert bench.scheduler.plan() is None
    bench.end(second)
    assert sequence.num_output_tokens == 2


def test_a_sequence_of_one_token_is_not_planned_ahead() -> None:
    bench, _, first = ahead(max_tokens=1)
    assert not first.plan.share_sampled
    assert bench.scheduler.plan() is None


def test_branches_are_planned_ahead_from_the_step_that_forks_them() -> None:
    bench = SchedulerBench(plans_ahead=True)
    bench.add(range(6), branches=3)
    first, second = bench.plan(), bench.plan()
    assert second.plan.token_ids.tolist() == [-1, -2, -3]
    assert len(second.plan.copies) == 2
    bench.end(first)
    bench.end(second)
    assert [sequence.num_output_tokens for sequence in second.sampled] == [2, 2, 2]


def test_a_beam_is_not_planned_ahead() -> None:
    bench = SchedulerBench(plans_ahead=True)
    bench.add(range(3), beam_width=2)
    assert not bench.plan().plan.share_sampled
    assert bench.scheduler.plan() is None


def test_a_block_whose_last_token_is_not_known_yet_is_found_one_step_later() -> None:
    bench, _, first = ahead(num_prompt_tokens=7)
    second = bench.plan()
    assert len(bench.stored_hashes()) == 1
    bench.end(first)
    assert bench.stored_hashes() == []
    bench.end(second)
    bench.plan()
    assert len(bench.stored_hashes()) == 1


def test_what_ended_is_not_planned_again_and_its_pending_token_is_for_nobody() -> None:
    bench, sequence, first = ahead()
    second = bench.plan()
    bench.end(first)
    bench.scheduler.finish(sequence, FinishReason.STOP)
    bench.end(second)
    assert sequence.token_ids.tolist() == [0, 1, 2, DRAWN]
    assert bench.scheduler.plan() is None


def test_the_number_on_the_wire_of_the_step_before_goes_round_too() -> None:
    bench = SchedulerBench(plans_ahead=True)
    bench.add(range(3))
    bench.scheduler._num_steps = 2**31 - 2
    first, second = bench.plan(), bench.plan()
    assert (first.plan.step, second.plan.step) == (2**31 - 1, 0)
    assert (first.number, second.number) == (2**31 - 1, 2**31)
    assert second.plan.tokens_from_step == 2**31 - 1
