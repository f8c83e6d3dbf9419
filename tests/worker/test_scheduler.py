"""The scheduler: who is admitted, and who gets how many tokens of a step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_bench import SchedulerBench, tokens_of

from octavo.worker.errors import ContextLengthExceeded, InvalidRequest
from octavo.worker.head_room import HeadRoom
from octavo.worker.plan_builder import ScheduledStep
from octavo.worker.policies import SCHEDULING_POLICIES, make_queue
from octavo.worker.sequence import Sequence, SequenceStatus

# ---- admission ----


def test_sequences_are_admitted_in_the_order_of_their_arrival() -> None:
    bench = SchedulerBench(max_num_seqs=1)
    first, second, third = (bench.add(range(3)) for _ in range(3))
    assert bench.step().sampled == (first,)
    bench.finish(first)
    assert bench.step().sampled == (second,)
    bench.finish(second)
    assert bench.step().sampled == (third,)


def test_a_lower_priority_value_goes_first() -> None:
    bench = SchedulerBench(max_num_seqs=1)
    late, early, urgent = bench.add(range(3), priority=1), bench.add(range(3)), bench.add(range(3), priority=-1)
    order = []
    for _ in range(3):
        (sequence,) = bench.step().sampled
        order.append(sequence)
        bench.finish(sequence)
    assert order == [urgent, early, late]


def test_the_first_in_line_is_not_overtaken_by_a_shorter_one() -> None:
    bench = SchedulerBench(num_blocks=8)
    running = bench.add(range(20))
    bench.step()
    long, short = bench.add(range(100, 116)), bench.add(range(3))
    assert tokens_of(bench.step()) == {"0": 1}
    bench.finish(running)
    assert bench.step().sampled == (long, short)


def test_a_sequence_is_admitted_only_if_all_its_tokens_fit() -> None:
    """Also when its first chunk alone would."""
    bench = SchedulerBench(num_blocks=8, budget=8)
    bench.add(range(8))
    bench.step()
    waiting = bench.add(range(100, 128))
    bench.step()
    assert waiting.status is SequenceStatus.WAITING


def test_no_more_run_than_there_are_slots_and_slots_are_used_again() -> None:
    bench = SchedulerBench(max_num_seqs=2)
    first, second, third = (bench.add(range(3)) for _ in range(3))
    assert bench.step().sampled == (first, second)
    slot = first.slot
    bench.finish(first)
    plan = bench.step().plan
    assert third.slot == slot
    assert plan.table_updates.tolist()[-1][:2] == [slot, 0]  # its whole table, not the rest of another's


def test_what_ended_while_it_waited_is_never_admitted() -> None:
    bench = SchedulerBench(max_num_seqs=1)
    bench.add(range(3))
    waiting = bench.add(range(3))
    bench.step()
    bench.finish(waiting)
    bench.finish(waiting)  # harmless
    assert bench.scheduler.num_waiting == 0


@pytest.mark.parametrize("num_running", [0, 1])
def test_a_sequence_that_had_output_elsewhere_is_computed_with_it(num_running: int) -> None:
    bench = SchedulerBench()
    for _ in range(num_running):
        bench.add(range(50, 53))
    bench.add(range(3), output=(7, 8))
    assert bench.step().plan.token_ids.tolist()[-5:] == [0, 1, 2, 7, 8]


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    scheduler = SchedulerBench(num_blocks=8).scheduler
    scheduler.check_fits(24, 8)
    with pytest.raises(ContextLengthExceeded, match=r"60 tokens and max_tokens is 5: together 65, .* 64 tokens"):
        scheduler.check_fits(60, 5)
    with pytest.raises(ContextLengthExceeded, match="33 tokens need 9 KV blocks of 4 tokens, but the pool has 8"):
        scheduler.check_fits(25, 8)


@pytest.mark.parametrize(("width", "max_tokens"), [(2, 8), (4, 4)])
def test_beams_must_all_fit_beside_each_other(width: int, max_tokens: int) -> None:
    """They share the full blocks of the prompt at least."""
    scheduler = SchedulerBench(num_blocks=8).scheduler
    scheduler.check_fits(16, max_tokens, beam_width=width)
    needed = 4 + width * (max_tokens // 4 + 1)
    with pytest.raises(ContextLengthExceeded, match=f"for each of {width} beams need {needed} KV blocks .* has 8"):
        scheduler.check_fits(16, max_tokens + 1, beam_width=width)


def test_more_beams_than_can_run_are_refused_with_the_numbers() -> None:
    scheduler = SchedulerBench(max_num_seqs=2).scheduler
    scheduler.check_fits(4, 4, beam_width=2)
    with pytest.raises(InvalidRequest, match="beam_width is 3, but --max-num-seqs is 2"):
        scheduler.check_fits(4, 4, beam_width=3)


def test_branches_that_do_not_fit_beside_each_other_are_not_refused_but_take_turns() -> None:
    bench = SchedulerBench(num_blocks=3)
    bench.scheduler.check_fits(8, 4)
    bench.add(range(8), branches=2, max_tokens=4)
    ended = 0
    while bench.scheduler.has_work:
        for sequence in bench.step().sampled:
            if sequence.num_output_tokens == 4:
                bench.finish(sequence)
                ended += 1
    assert ended == 2


# ---- what is kept free ----


def test_a_prompt_is_admitted_only_beside_what_prompts_under_way_still_need() -> None:
    bench = SchedulerBench(num_blocks=8, budget=16)
    long = bench.add(range(20))
    short = bench.add(range(100, 102))
    bench.step()
    assert (len(long.block_table), short.status) == (4, SequenceStatus.RUNNING)
    bench.finish(short)
    too_large, fits = bench.add(range(200, 216)), bench.add(range(300, 302))
    bench.step()
    assert (too_large.status, fits.status) == (SequenceStatus.WAITING, SequenceStatus.WAITING)  # nobody overtakes
    bench.finish(too_large)
    bench.step()
    assert fits.status is SequenceStatus.RUNNING


def test_the_promise_is_kept_also_while_others_decode() -> None:
    """A prompt in chunks never preempts anybody whom it was admitted beside, if nobody grows."""
    bench = SchedulerBench(num_blocks=9, budget=6)
    first, second = bench.add(range(12)), bench.add(range(100, 114))
    while first.num_uncomputed_tokens > 1 or second.num_uncomputed_tokens > 1 or not second.was_admitted:
        bench.step()
    assert bench.counters.num_preemptions == 0


def test_head_room_keeps_others_out_while_what_runs_is_expected_to_grow() -> None:
    head_room = HeadRoom(4)
    for _ in range(50):
        head_room.note_finished(16)
    bench = SchedulerBench(num_blocks=12, head_room=head_room)
    running = bench.run_alone(range(3))
    kept = bench.scheduler.num_head_room_blocks
    assert kept == -(-head_room.tokens(1, 4, 19) // 4) > 1
    waiting = bench.add(range(100, 100 + 4 * (12 - 1 - kept) + 1))
    bench.step()
    assert waiting not in bench.scheduler.running
    bench.finish(running)
    bench.step()
    assert waiting in bench.scheduler.running  # with nothing running, the pool is all that counts


def test_head_room_learns_from_sequences_that_ended_by_themselves() -> None:
    head_room = HeadRoom(4)
    bench = SchedulerBench(head_room=head_room)
    bench.abort(bench.run_alone(range(3)))
    assert head_room.mean_residual_tokens == 0.0
    bench.finish(bench.run_alone(range(3)))
    assert head_room.mean_residual_tokens == 0.5


# ---- prompts beside each other ----


def test_a_short_prompt_passes_a_long_one_within_half_of_its_budget() -> None:
    bench = SchedulerBench(budget=8)
    long = bench.add(range(40))
    bench.step()
    short = bench.add(range(100, 104))
    step = bench.step()
    assert step.scheduled == {long: 4, short: 4}
    assert step.sampled == (short,)


def test_short_prompts_that_do_not_fit_into_that_half_go_on_beside_the_long_one() -> None:
    bench = SchedulerBench(budget=8)
    long = bench.add(range(40))
    bench.step()
    short = bench.add(range(100, 107))
    assert bench.step().scheduled == {long: 4, short: 4}
    assert bench.step().scheduled == {long: 4, short: 3} | {long: 5}  # what is left of the half is the long one's


def test_a_long_prompt_does_not_lose_its_half_however_many_short_ones_come() -> None:
    bench = SchedulerBench(budget=8)
    long = bench.add(range(60))
    num_steps = 0
    while long.num_uncomputed_tokens > 8:
        for sequence in [bench.add(range(100 * i, 100 * i + 2)) for i in (1, 2, 3, 4)]:
            assert sequence.num_prompt_tokens * 2 < 8
        before = long.num_computed_tokens
        for sequence in bench.step().sampled:
            bench.finish(sequence)
        num_steps += 1
        assert long.num_computed_tokens - before >= 3  # streams that decode go before all prompts
    assert num_steps < 20


def test_what_is_not_much_shorter_waits() -> None:
    bench = SchedulerBench(budget=8)
    long, other = bench.add(range(24)), bench.add(range(100, 113))
    assert bench.step().scheduled == {long: 8}
    assert bench.step().scheduled == {long: 8}
    assert bench.step().scheduled == {long: 8}
    assert tokens_of(bench.step()) == {"0": 1, "1": 7}
    assert other.num_computed_tokens == 7


def test_what_is_expected_to_be_cached_makes_a_prompt_short() -> None:
    bench = SchedulerBench(budget=8)
    bench.finish(bench.run_alone([*range(100, 108)]))
    long = bench.add(range(40))
    bench.step()
    cached = bench.add([*range(100, 108), *range(50, 72)], expected_cached_tokens=8)
    bench.step()
    assert cached.status is SequenceStatus.WAITING  # 22 are left to compute, of the long one 32
    bench.finish(cached)
    cached = bench.add([*range(100, 108), *range(50, 60)], expected_cached_tokens=8)
    assert bench.step().scheduled == {long: 4, cached: 4}


# ---- what can be seen ----


def test_queued_are_requests_of_which_nothing_was_admitted() -> None:
    bench = SchedulerBench(max_num_seqs=1)
    scheduler = bench.scheduler
    several, waiting = bench.add(range(5), branches=3), bench.add(range(100, 107))
    assert (scheduler.num_queued_requests, scheduler.num_queued_tokens) == (2, 12)
    bench.step()  # two branches wait, but their request is under way
    assert scheduler.num_waiting == 3
    assert (scheduler.num_queued_requests, scheduler.num_queued_tokens) == (1, 7)
    assert not scheduler.is_queued(several.request)
    assert scheduler.is_queued(waiting.request)
    bench.abort(waiting)
    assert (scheduler.num_queued_requests, scheduler.num_queued_tokens) == (0, 0)


def test_a_preempted_sequence_is_not_queued_again() -> None:
    bench = SchedulerBench(max_num_seqs=1)
    less_urgent = bench.run_alone(range(3), priority=1)
    bench.run_alone(range(10, 13))
    assert less_urgent.status is SequenceStatus.WAITING
    assert bench.scheduler.num_queued_requests == 0


def test_a_request_with_resumed_branches_is_queued_until_its_last_one_has_gone_or_one_was_admitted() -> None:
    bench = SchedulerBench(max_num_seqs=1)
    bench.run_alone(range(50, 53))
    scheduler, first = bench.scheduler, bench.add(range(5), output=(7,))
    second = Sequence.start(first.request, [1], (8, 8), arrival=99, now=0.0)
    scheduler.add(second)
    assert (scheduler.num_queued_requests, scheduler.num_queued_tokens) == (1, 5)
    bench.abort(first)
    assert (scheduler.num_queued_requests, scheduler.num_queued_tokens) == (1, 5)
    bench.abort(second)
    assert (scheduler.num_queued_requests, scheduler.num_queued_tokens) == (0, 0)


PROMPTS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(-1, 1), st.sampled_from([1, 1, 1, 3])),
    min_size=1,
    max_size=8,
)


@given(PROMPTS, st.integers(10, 24), st.integers(1, 4), st.integers(2, 16), st.booleans())
def test_whatever_waits_every_step_computes_something_and_everything_ends(
    prompts: list[tuple[int, int, int, int]], num_blocks: int, max_num_seqs: int, budget: int, plans_ahead: bool
) -> None:
    """Prompts of a few families, at three priorities, with branches; three tokens of output each."""
    bench = SchedulerBench(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget, plans_ahead=plans_ahead, head_room=HeadRoom(4)
    )
    num_left = 0
    for length, family, priority, branches in prompts:
        bench.add(range(100 * family, 100 * family + length), priority=priority, branches=branches, max_tokens=3)
        num_left += branches
    under_way: list[ScheduledStep] = []
    while bench.scheduler.has_work:
        step = bench.scheduler.plan()
        bench.scheduler.check()
        assert step is not None or under_way
        if step is not None:
            assert 0 < step.plan.token_ids.size <= budget
            under_way.append(step)
        if step is None or len(under_way) > plans_ahead:
            done = under_way.pop(0)
            bench.end(done)
            ended = [s for s in done.sampled if s.status is not SequenceStatus.FINISHED and s.num_output_tokens >= 3]
            num_left -= len([s for s in ended if s.num_pending_tokens == 0])
            bench.finish(*[s for s in ended if s.num_pending_tokens == 0])
    assert num_left == 0
    for step in under_way:
        bench.end(step)
    assert bench.num_free_blocks == num_blocks


# ---- the end ----


def test_finishing_frees_blocks_and_slot_at_once_from_any_state() -> None:
    bench = SchedulerBench(budget=8)
    decoding, in_chunks, waiting = bench.add(range(4)), bench.add(range(100, 130)), bench.add(range(3))
    bench.step()
    for sequence in (waiting, in_chunks, decoding):
        bench.finish(sequence)
    assert bench.scheduler.pool.num_free_blocks == 32
    assert not bench.scheduler.has_work
    assert bench.scheduler.plan() is None


def test_prefill_work_to_be_done_is_known_at_any_time() -> None:
    bench = SchedulerBench(budget=8)
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


def test_what_was_aborted_while_it_waited_is_not_kept() -> None:
    """Whatever stands before it in the line."""
    queue = make_queue("priority")
    bench = SchedulerBench(max_num_seqs=1, queue=queue)
    bench.run_alone(range(3))
    waiting = bench.add(range(3))
    for _ in range(100):
        bench.abort(bench.add(range(3), priority=1))
    assert list(queue) == [waiting]
    assert (bench.scheduler.num_waiting, bench.scheduler.num_queued_requests) == (1, 1)


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
def test_every_policy_is_obeyed_and_told_what_was_served(policy: str) -> None:
    queue = make_queue(policy)
    bench = SchedulerBench(max_num_seqs=1, budget=4, queue=queue)
    sequences = [bench.add(range(10 * i, 10 * i + 3 + i)) for i in range(3)]
    while bench.scheduler.has_work:
        before = queue.first()
        num_running = bench.scheduler.num_running
        step = bench.step()
        assert num_running or list(step.scheduled) == [before]
        bench.finish(*[sequence for sequence in step.sampled if sequence.num_output_tokens == 2])
    assert [sequence.num_output_tokens for sequence in sequences] == [2, 2, 2]


# ---- urgency ----


def test_an_urgent_prompt_does_not_wait_for_a_long_one_under_way() -> None:
    bench = SchedulerBench(budget=16)
    long = bench.add(range(60), priority=10)
    bench.step()
    urgent = bench.add(range(100, 140))
    step = bench.step()
    assert step.scheduled == {long: 1, urgent: 15}
    assert bench.step().scheduled == {urgent: 16}


def test_who_computes_a_prefix_that_an_urgent_one_waits_for_is_as_urgent() -> None:
    bench = SchedulerBench(budget=8)
    leader = bench.add(range(60), priority=10)
    bench.step()
    urgent = bench.add([*range(50), 91])
    bench.step()
    assert urgent.follows is leader
    other = bench.add(range(100, 160), priority=5)
    assert leader in bench.step().scheduled
    assert other not in bench.scheduler.running


def test_many_branches_do_not_keep_a_prompt_waiting_for_blocks_that_they_cannot_use_yet() -> None:
    bench = SchedulerBench(num_blocks=16, max_num_seqs=4)
    bench.run_alone(range(3))
    many = bench.add(range(100, 103), branches=40)
    bench.step()
    assert many in bench.scheduler.running
