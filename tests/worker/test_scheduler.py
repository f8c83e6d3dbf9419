"""The scheduler: who is served, with how many tokens, in which blocks."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.worker.errors import ContextLengthExceeded
from octavo.worker.messages import Branch, FinishReason, Request, SamplingParams
from octavo.worker.plan_builder import ScheduledStep
from octavo.worker.policies import LeastWorkLost, Victim
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.sequence import Sequence, SequenceStatus

HASHER = RoutingHasher(bytes(16), 4)


class Bench:
    """A scheduler with blocks of 4 tokens, and what an engine does between its plans: every token drawn is a 9."""

    def __init__(
        self,
        *,
        num_blocks: int = 32,
        max_num_seqs: int = 8,
        budget: int = 64,
        caching: bool = True,
        victim: Victim | None = None,
    ) -> None:
        limits = SchedulerLimits(num_blocks, 4, max_num_seqs, budget, 64, caching)
        self.scheduler = Scheduler(limits, HASHER, victim=victim)
        self.num_added = 0

    def add(
        self, prompt: range | list[int], *, priority: int = 0, output: tuple[int, ...] = (), salt: str | None = None
    ) -> Sequence:
        sampling = SamplingParams(max_tokens=20, seed=0)
        request = Request(
            str(self.num_added), "g", "m", tuple(prompt), (), sampling, priority=priority, cache_salt=salt
        )
        sequence = Sequence.start(request, Branch(0, output), arrival=self.num_added, now=0.0)
        self.num_added += 1
        self.scheduler.add(sequence)
        return sequence

    def run_alone(self, prompt: range | list[int]) -> Sequence:
        """A sequence whose prompt is computed."""
        sequence = self.add(prompt)
        assert self.step().sampled == (sequence,)
        return sequence

    def step(self) -> ScheduledStep:
        """Plan, and append a token where one is drawn."""
        step = self.plan()
        for sequence in step.sampled:
            sequence.token_ids.append(9)
        return step

    def plan(self) -> ScheduledStep:
        step = self.scheduler.plan()
        assert step is not None
        self.scheduler.check()
        return step

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence, FinishReason.STOP)
        self.scheduler.check()


def tokens_of(step: ScheduledStep) -> dict[str, int]:
    """Request → tokens computed in the step."""
    return {sequence.request.request_id: num_tokens for sequence, num_tokens in step.scheduled.items()}


# ---- the plan ----


def test_nothing_to_do_is_no_step() -> None:
    assert Bench().scheduler.plan() is None


def test_a_prompt_is_one_step_and_then_each_token_is_one() -> None:
    bench = Bench()
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
    bench = Bench()
    sequence = bench.add(range(4))
    bench.step()
    assert len(sequence.block_table) == 1
    plan = bench.step().plan
    assert plan.table_updates.tolist() == [[sequence.slot, 1, 1]]
    assert plan.table_blocks.tolist() == sequence.block_table[1:]


def test_a_long_prompt_is_computed_in_chunks_and_draws_at_its_end() -> None:
    bench = Bench(budget=4)
    bench.add(range(10))
    steps = [bench.step() for _ in range(3)]
    assert [step.plan.token_ids.tolist() for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [len(step.sampled) for step in steps] == [0, 0, 1]
    assert [step.num_prefill_tokens for step in steps] == [4, 4, 1]


def test_running_streams_go_first_and_a_prompt_gets_the_rest_of_the_budget() -> None:
    bench = Bench(budget=6)
    bench.add(range(3))
    bench.add(range(10, 13))
    bench.step()
    bench.add(range(20, 40))
    assert tokens_of(bench.step()) == {"0": 1, "1": 1, "2": 4}
    assert tokens_of(bench.step()) == {"0": 1, "1": 1, "2": 4}


def test_the_plan_is_in_the_order_of_scheduling_and_its_logits_too() -> None:
    bench = Bench(budget=8)
    first, second = bench.add(range(3)), bench.add(range(10, 30))
    step = bench.plan()
    assert step.scheduled == {first: 3, second: 5}
    assert step.sampled == (first,)
    assert step.plan.logit_indices.tolist() == [2]
    assert step.plan.num_new_tokens.tolist() == [3, 5]


def test_step_numbers_start_anew_before_they_outgrow_int32() -> None:
    bench = Bench()
    bench.add(range(3))
    bench.scheduler._num_steps = 2**31 - 2
    assert [bench.step().plan.step for _ in range(2)] == [2**31 - 1, 0]


# ---- admission ----


def test_sequences_are_admitted_in_the_order_of_their_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    first, second, third = (bench.add(range(3)) for _ in range(3))
    assert bench.step().sampled == (first,)
    bench.finish(first)
    assert bench.step().sampled == (second,)
    bench.finish(second)
    assert bench.step().sampled == (third,)


def test_a_lower_priority_value_goes_first() -> None:
    bench = Bench(max_num_seqs=1)
    late, early, urgent = bench.add(range(3), priority=1), bench.add(range(3)), bench.add(range(3), priority=-1)
    order = []
    for _ in range(3):
        (sequence,) = bench.step().sampled
        order.append(sequence)
        bench.finish(sequence)
    assert order == [urgent, early, late]


def test_the_first_in_line_is_not_overtaken_by_a_shorter_one() -> None:
    bench = Bench(num_blocks=8)
    running = bench.add(range(20))
    bench.step()
    long, short = bench.add(range(100, 116)), bench.add(range(3))
    assert tokens_of(bench.step()) == {"0": 1}
    bench.finish(running)
    assert bench.step().sampled == (long, short)


def test_a_sequence_is_admitted_only_if_all_its_tokens_fit() -> None:
    """Also when its first chunk alone would."""
    bench = Bench(num_blocks=8, budget=8)
    bench.add(range(8))
    bench.step()
    waiting = bench.add(range(100, 128))
    bench.step()
    assert waiting.status is SequenceStatus.WAITING


def test_no_more_run_than_there_are_slots_and_slots_are_used_again() -> None:
    bench = Bench(max_num_seqs=2)
    first, second, third = (bench.add(range(3)) for _ in range(3))
    assert bench.step().sampled == (first, second)
    slot = first.slot
    bench.finish(first)
    plan = bench.step().plan
    assert third.slot == slot
    assert plan.table_updates.tolist()[-1][:2] == [slot, 0]  # its whole table, not the rest of another's


def test_what_ended_while_it_waited_is_never_admitted() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(range(3))
    waiting = bench.add(range(3))
    bench.step()
    bench.finish(waiting)
    bench.finish(waiting)  # harmless
    assert bench.scheduler.num_waiting == 0


@pytest.mark.parametrize("num_running", [0, 1])
def test_a_sequence_that_had_output_elsewhere_is_computed_with_it(num_running: int) -> None:
    bench = Bench()
    for _ in range(num_running):
        bench.add(range(50, 53))
    bench.add(range(3), output=(7, 8))
    assert bench.step().plan.token_ids.tolist()[-5:] == [0, 1, 2, 7, 8]


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = Bench(num_blocks=8).scheduler
    scheduler.check_fits(24, 8)
    with pytest.raises(ContextLengthExceeded, match=r"60 tokens and max_tokens is 5: together 65, .* 64 tokens"):
        scheduler.check_fits(60, 5)
    with pytest.raises(ContextLengthExceeded, match="33 tokens need 9 KV blocks of 4 tokens, but the pool has 8"):
        scheduler.check_fits(25, 8)


# ---- sharing ----


def test_an_uncached_prefix_that_two_ask_for_in_one_step_is_computed_once() -> None:
    bench = Bench()
    first, second = bench.add([*range(12), 20]), bench.add([*range(12), 21])
    step = bench.plan()
    assert tokens_of(step) == {"0": 13, "1": 1}
    assert second.block_table[:3] == first.block_table[:3]
    assert second.block_table[3] != first.block_table[3]
    assert second.num_cached_tokens == 12
    assert first.num_cached_tokens == 0


def test_only_the_blocks_that_the_step_fills_are_shared_in_it() -> None:
    bench = Bench(budget=9)
    bench.add(range(20))
    second = bench.add(range(20))
    bench.step()  # 9 of the first: its second block is full, its third is not
    assert second.status is SequenceStatus.WAITING
    assert tokens_of(bench.step()) == {"0": 9}
    assert tokens_of(bench.step()) == {"0": 2, "1": 4}
    assert second.num_cached_tokens == 16


def test_a_prompt_that_is_cached_whole_still_computes_its_last_block() -> None:
    """The logits of its last token are needed; blocks are shared whole."""
    bench = Bench()
    bench.finish(bench.run_alone(range(8)))
    again = bench.add(range(8))
    step = bench.step()
    assert tokens_of(step) == {"1": 4}
    assert step.sampled == (again,)
    assert again.num_cached_tokens == 4


def test_a_prompt_one_token_longer_than_what_is_cached_computes_that_token() -> None:
    bench = Bench()
    bench.finish(bench.run_alone(range(8)))
    bench.add(range(9))
    assert tokens_of(bench.step()) == {"1": 1}


def test_what_is_computed_behind_a_found_prefix_is_found_with_it() -> None:
    bench = Bench()
    for num_tokens in (9, 13, 17):
        bench.finish(bench.run_alone(range(num_tokens)))
    assert bench.run_alone(range(30)).num_cached_tokens == 16


def test_output_is_found_again_too() -> None:
    bench = Bench()
    sequence = bench.add(range(4))
    for _ in range(6):
        bench.step()
    bench.finish(sequence)
    bench.add([0, 1, 2, 3, 9, 9, 9, 9, 9])
    assert tokens_of(bench.step()) == {"1": 1}


def test_another_salt_finds_nothing() -> None:
    bench = Bench()
    bench.add(range(9), salt="a")
    bench.add(range(9), salt="b")
    bench.add(range(9))
    assert tokens_of(bench.step()) == {"0": 9, "1": 9, "2": 9}


def test_without_caching_nothing_is_shared_and_nothing_told() -> None:
    bench = Bench(caching=False)
    bench.add(range(9))
    bench.add(range(9))
    assert tokens_of(bench.step()) == {"0": 9, "1": 9}
    assert bench.scheduler.drain_events() == ()


def test_a_found_prefix_is_not_evicted_for_the_rest_of_its_own_prompt() -> None:
    bench = Bench(num_blocks=5)
    bench.finish(bench.run_alone(range(8)))
    sequence = bench.add([*range(8), *range(50, 62)])
    step = bench.step()
    assert tokens_of(step) == {"1": 12}
    assert len(set(sequence.block_table)) == 5


def test_events_carry_the_gateways_hashes_and_go_on_with_them() -> None:
    bench = Bench()
    tokens = [*range(6), 9, 9, 9, 9, 9, 9]
    sequence = bench.add(tokens[:6])
    for _ in range(7):
        bench.step()
    expected = HASHER.hash_blocks(tokens).tolist()
    assert [value for event in bench.scheduler.drain_events() for value in event.hashes] == expected
    bench.finish(sequence)
    request = Request("r", "g", "m", tuple(range(100, 109)), (11, 22), SamplingParams(max_tokens=1, seed=0))
    bench.scheduler.add(Sequence.start(request, Branch(0), arrival=99, now=0.0))
    bench.step()
    (event,) = bench.scheduler.drain_events()
    assert event.hashes == (11, 22)


# ---- memory runs out ----


def two_that_fill_the_pool() -> tuple[Bench, Sequence, Sequence]:
    """Four blocks, two sequences with two full blocks each after this step."""
    bench = Bench(num_blocks=4)
    first, second = bench.add(range(7)), bench.add(range(100, 107))
    bench.step()
    bench.step()
    assert bench.scheduler.pool.num_free_blocks == 0
    return bench, first, second


def test_the_latest_of_equals_gives_way_and_its_output_is_kept() -> None:
    bench, first, second = two_that_fill_the_pool()
    step = bench.step()
    assert step.sampled == (first,)
    assert second.status is SequenceStatus.WAITING
    assert (second.num_preemptions, bench.scheduler.counters.num_preemptions) == (1, 1)
    assert second.token_ids.tolist() == [*range(100, 107), 9, 9]
    bench.finish(first)
    step = bench.step()
    assert step.scheduled == {second: 5}  # its first block was still there
    assert step.plan.table_updates.tolist() == [[second.slot, 0, 3]]  # the ranks learn its whole table again
    assert second.num_cached_tokens == 0  # as it was when first admitted: what was reused of others


def test_the_least_urgent_gives_way_whatever_it_loses() -> None:
    bench = Bench(num_blocks=4)
    first, second = bench.add(range(7)), bench.add(range(100, 107), priority=-1)
    bench.step()
    bench.step()
    bench.step()
    assert first.status is SequenceStatus.WAITING
    assert second.status is SequenceStatus.RUNNING


def test_what_came_from_the_cache_or_is_not_computed_yet_is_not_lost() -> None:
    bench = Bench()
    computed, cached, begun = bench.add(range(20)), bench.add(range(100, 124)), bench.add(range(200, 240))
    for sequence, num_computed, num_cached in ((computed, 20, 0), (cached, 24, 16), (begun, 10, 0)):
        sequence.num_computed_tokens, sequence.num_cached_tokens = num_computed, num_cached
    assert LeastWorkLost().choose([computed, cached, begun]) is cached
    assert LeastWorkLost().choose([computed, begun]) is begun


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    bench, first, second = two_that_fill_the_pool()
    bench.add([1], priority=-1)
    step = bench.step()
    assert step.sampled == (first,)
    assert second.status is SequenceStatus.WAITING


class FirstGivesWay:
    """A policy that preempts the sequence which was planned before all others."""

    def choose(self, running: object) -> Sequence:
        return next(iter(running))  # type: ignore[call-overload, no-any-return]


def test_a_sequence_preempted_in_the_step_it_was_planned_in_leaves_nothing_that_was_not_written() -> None:
    bench = Bench(num_blocks=6, victim=FirstGivesWay())
    first, second = bench.add(range(7)), bench.add(range(100, 108))
    bench.step()
    first.token_ids.extend([9] * 3)  # as if 4 were to be computed: they fill its second block and begin a third
    second.token_ids.extend([9] * 4)  # 5 to be computed, in two blocks more, where one is left
    step = bench.step()
    assert step.scheduled == {second: 5}
    assert first.status is SequenceStatus.WAITING
    never_written = first.token_ids[:8].tolist()
    bench.finish(first)
    bench.finish(second)
    reader = bench.run_alone([*never_written, 1])
    assert reader.num_cached_tokens == 4


def test_the_budget_of_a_preempted_sequence_goes_to_others() -> None:
    bench = Bench(num_blocks=5, budget=10, victim=FirstGivesWay())
    first, second, third = bench.add(range(3)), bench.add(range(100, 104)), bench.add(range(200, 203))
    bench.step()
    first.token_ids.extend([9] * 3)  # 4 to be computed, in one block more
    second.token_ids.extend([9] * 4)  # 5 to be computed, in two blocks more, where one is left
    third.token_ids.extend([9] * 20)
    assert bench.step().scheduled == {second: 5, third: 5}


def test_what_is_told_of_a_preempted_sequence_has_the_right_hashes() -> None:
    bench, first, second = two_that_fill_the_pool()
    bench.step()
    bench.finish(first)
    for _ in range(4):
        bench.step()
    right = {value for sequence in (first, second) for value in HASHER.hash_blocks(sequence.token_ids).tolist()}
    told = {value for event in bench.scheduler.drain_events() for value in event.hashes}
    assert second.num_preemptions == 1
    assert told <= right


def test_preempted_work_is_counted_without_what_was_only_planned() -> None:
    bench, _, second = two_that_fill_the_pool()
    computed = second.num_computed_tokens
    bench.step()
    assert bench.scheduler.counters.num_recomputed_tokens == computed


def test_a_preempted_sequence_is_the_first_to_come_back() -> None:
    bench, first, second = two_that_fill_the_pool()
    third = bench.add([1])
    bench.step()
    bench.finish(first)
    assert bench.step().sampled == (second, third)


def test_two_sequences_that_need_the_whole_pool_both_get_to_their_end() -> None:
    bench = Bench(num_blocks=4, budget=3)
    for sequence in (bench.add(range(7)), bench.add(range(100, 107))):
        assert sequence.num_prompt_tokens == 7
    ended, num_steps = [], 0
    while bench.scheduler.has_work:
        for sequence in bench.step().sampled:
            if sequence.num_output_tokens == 9:
                bench.finish(sequence)
                ended.append(sequence.request.request_id)
        num_steps += 1
    assert sorted(ended) == ["0", "1"]
    assert bench.scheduler.counters.num_preemptions > 0
    assert bench.scheduler.pool.num_free_blocks == 4


# ---- the end ----


def test_finishing_frees_blocks_and_slot_at_once_from_any_state() -> None:
    bench = Bench(budget=8)
    decoding, in_chunks, waiting = bench.add(range(4)), bench.add(range(100, 130)), bench.add(range(3))
    bench.step()
    for sequence in (waiting, in_chunks, decoding):
        bench.finish(sequence)
    assert bench.scheduler.pool.num_free_blocks == 32
    assert not bench.scheduler.has_work
    assert bench.scheduler.plan() is None


def test_prefill_work_to_be_done_is_known_at_any_time() -> None:
    bench = Bench(budget=8)
    scheduler = bench.scheduler
    first, second = bench.add(range(12)), bench.add([*range(8), 50, 51])
    seen = [scheduler.num_uncomputed_prompt_tokens]
    for _ in range(3):
        bench.step()
        seen.append(scheduler.num_uncomputed_prompt_tokens)
    bench.finish(first)
    bench.finish(second)
    assert seen == [22, 14, 0, 0]  # in the second step 4 of the first, 2 of the second, and 8 of it were cached
    assert scheduler.num_uncomputed_prompt_tokens == 0


def test_tables_of_a_plan_are_int32_even_when_they_are_empty() -> None:
    bench = Bench()
    bench.add(range(3))
    bench.step()
    plan = bench.step().plan
    assert {array.dtype for array in (plan.table_updates, plan.table_blocks, plan.slots)} == {np.dtype(np.int32)}
    assert plan.table_updates.shape == (0, 3)


def test_what_was_aborted_while_it_waited_is_not_kept() -> None:
    """Whatever stands before it in the line."""
    bench = Bench(max_num_seqs=1)
    bench.run_alone(range(3))
    bench.add(range(3))
    for _ in range(100):
        bench.finish(bench.add(range(3), priority=1))
    assert len(bench.scheduler._waiting._heap) <= 3
    assert bench.scheduler.num_waiting == 1
