"""Preemption: who gives way when memory runs out or somebody more urgent comes, and what is lost by it."""

from __future__ import annotations

from collections.abc import Collection

from scheduler_bench import DRAWN, HASHER, SchedulerBench

from octavo.worker.block_pool import BlockPool
from octavo.worker.head_room import HeadRoom
from octavo.worker.plan_builder import ScheduledStep
from octavo.worker.preemption import MOST_PREEMPTIONS, LeastWorkLost, frees_anything
from octavo.worker.sequence import Sequence, SequenceStatus

# ---- memory runs out ----


def two_that_fill_the_pool() -> tuple[SchedulerBench, Sequence, Sequence]:
    """Four blocks, two sequences with two full blocks each after this step."""
    bench = SchedulerBench(num_blocks=4)
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
    bench = SchedulerBench(num_blocks=4)
    first, second = bench.add(range(7)), bench.add(range(100, 107), priority=-1)
    bench.step()
    bench.step()
    bench.step()
    assert first.status is SequenceStatus.WAITING
    assert second.status is SequenceStatus.RUNNING


def test_nothing_is_admitted_in_a_step_that_preempts_for_memory() -> None:
    bench, first, second = two_that_fill_the_pool()
    third = bench.add([1])
    step = bench.step()
    assert step.sampled == (first,)
    assert {second.status, third.status} == {SequenceStatus.WAITING}


class FirstGivesWay:
    """A policy that preempts the sequence which was planned before all others."""

    def choose(self, running: Collection[Sequence], pool: BlockPool) -> Sequence:
        return next(iter(running))


def test_a_sequence_preempted_in_the_step_it_was_planned_in_leaves_nothing_that_was_not_written() -> None:
    bench = SchedulerBench(num_blocks=6, victim=FirstGivesWay())
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
    bench = SchedulerBench(num_blocks=5, budget=10, victim=FirstGivesWay())
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
    assert second.num_preemptions == 1
    assert set(bench.stored_hashes()) <= right


def test_what_is_computed_again_is_counted_when_it_is() -> None:
    """Without what was only planned, and without what is found again."""
    bench, first, second = two_that_fill_the_pool()
    computed = second.num_computed_tokens
    bench.step()
    assert (second.num_given_up_tokens, bench.counters.num_recomputed_tokens) == (computed, 0)
    bench.finish(first)
    step = bench.step()
    assert bench.counters.num_recomputed_tokens == computed - (second.num_computed_tokens - step.scheduled[second])


def test_a_preempted_sequence_is_the_first_to_come_back() -> None:
    bench, first, second = two_that_fill_the_pool()
    third = bench.add([1])
    bench.step()
    bench.finish(first)
    assert bench.step().sampled == (second, third)


def test_two_sequences_that_need_the_whole_pool_both_get_to_their_end() -> None:
    bench = SchedulerBench(num_blocks=4, budget=3)
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


# ---- victims ----


def holding(bench: SchedulerBench, table: list[int], *, priority: int = 0, num_preemptions: int = 0) -> Sequence:
    """A sequence with references to the blocks of ``table``."""
    sequence = bench.add(range(4 * len(table)), priority=priority)
    sequence.block_table, sequence.num_preemptions = table, num_preemptions
    return sequence


def victims(bench: SchedulerBench, running: list[Sequence]) -> list[Sequence]:
    """In the order in which they would be chosen, one after the other."""
    running, order = running[:], []
    while running:
        victim = LeastWorkLost().choose(running, bench.scheduler.pool)
        running.remove(victim)
        bench.scheduler.pool.release_all(victim.block_table)
        order.append(victim)
    return order


def blocks(bench: SchedulerBench, count: int) -> list[int]:
    return [bench.scheduler.pool.allocate() for _ in range(count)]


def shared(bench: SchedulerBench, table: list[int]) -> list[int]:
    for block in table:
        bench.scheduler.pool.share(block)
    return table


def test_the_least_urgent_goes_first_then_the_least_work_then_the_latest() -> None:
    bench = SchedulerBench()
    urgent = holding(bench, blocks(bench, 1), priority=-1)
    large = holding(bench, blocks(bench, 4), priority=1)
    early, late = holding(bench, blocks(bench, 2)), holding(bench, blocks(bench, 2))
    small = holding(bench, blocks(bench, 1))
    assert victims(bench, [urgent, large, early, late, small]) == [large, small, late, early, urgent]


def test_work_in_blocks_that_others_hold_too_is_not_lost() -> None:
    bench = SchedulerBench()
    prefix = blocks(bench, 4)
    owner = holding(bench, [*prefix, *blocks(bench, 2)])
    guest = holding(bench, [*shared(bench, prefix), *blocks(bench, 1)])
    medium = holding(bench, blocks(bench, 3))
    # When the guest has gone, the prefix is the owner's alone.
    assert victims(bench, [owner, guest, medium]) == [guest, medium, owner]


def test_one_that_would_free_nothing_is_never_chosen_before_one_that_would() -> None:
    bench = SchedulerBench()
    table = blocks(bench, 2)
    least_urgent, twin = holding(bench, table, priority=5), holding(bench, shared(bench, table[:]), priority=5)
    urgent = holding(bench, blocks(bench, 3), priority=-5)
    assert not frees_anything(twin, bench.scheduler.pool)
    assert LeastWorkLost().choose([least_urgent, twin, urgent], bench.scheduler.pool) is urgent
    assert LeastWorkLost().choose([least_urgent, twin], bench.scheduler.pool) is twin  # then the other one can go on


def test_who_was_preempted_too_often_is_spared_while_there_is_another() -> None:
    bench = SchedulerBench()
    often = holding(bench, blocks(bench, 1), num_preemptions=MOST_PREEMPTIONS)
    large = holding(bench, blocks(bench, 4), num_preemptions=MOST_PREEMPTIONS - 1)
    urgent = holding(bench, blocks(bench, 1), priority=-1)
    assert victims(bench, [often, large, urgent]) == [large, urgent, often]


# ---- somebody more urgent waits ----


def test_a_more_urgent_request_takes_the_slot_of_a_less_urgent_one() -> None:
    bench = SchedulerBench(max_num_seqs=2)
    first, second = bench.run_alone(range(3)), bench.run_alone(range(10, 13), priority=1)
    urgent = bench.add(range(20, 23), priority=-1)
    assert bench.step().sampled == (first, urgent)
    assert second.status is SequenceStatus.WAITING
    bench.finish(urgent)
    assert bench.step().sampled == (first, second)


def test_a_more_urgent_request_takes_as_much_memory_as_it_needs_and_no_more() -> None:
    bench = SchedulerBench(num_blocks=6)
    running = [bench.run_alone(range(100 * i, 100 * i + 5), priority=1) for i in range(3)]
    urgent = bench.add(range(900, 906))
    assert bench.step().sampled == (*running[:2], urgent)
    assert running[2].num_preemptions == 1


def test_nobody_gives_way_to_an_equal() -> None:
    bench = SchedulerBench(max_num_seqs=1)
    running = bench.run_alone(range(3), priority=1)
    waiting = bench.add(range(10, 13), priority=1)
    bench.step()
    assert (running.num_preemptions, waiting.status) == (0, SequenceStatus.WAITING)


def test_nobody_gives_way_where_it_would_not_be_enough() -> None:
    bench = SchedulerBench(num_blocks=6)
    less_urgent, urgent = bench.run_alone(range(5), priority=1), bench.run_alone(range(100, 114))
    waiting = bench.add(range(200, 216))
    bench.step()
    assert (less_urgent.num_preemptions, waiting.status) == (0, SequenceStatus.WAITING)
    bench.finish(urgent)
    bench.step()
    assert (less_urgent.num_preemptions, waiting.status) == (0, SequenceStatus.RUNNING)


def test_what_gave_way_too_often_does_so_no_more() -> None:
    bench = SchedulerBench(max_num_seqs=1)
    patient = bench.run_alone(range(3), priority=1)
    for number in range(1, MOST_PREEMPTIONS + 1):
        urgent = bench.add(range(10, 13))
        bench.step()
        assert (patient.status, patient.num_preemptions) == (SequenceStatus.WAITING, number)
        bench.finish(urgent)
        bench.step()
    urgent = bench.add(range(10, 13))
    bench.step()
    assert (patient.status, urgent.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)


def test_nobody_gives_way_who_would_be_first_again() -> None:
    """With aging, priority alone does not decide who is served next."""
    bench = SchedulerBench(num_blocks=8)
    old = bench.run_alone(range(16), priority=1)
    late = bench.add(range(100, 124))
    bench.abort(late)
    late = Sequence.start(late.request, [0], (), arrival=9, now=61.0)
    bench.scheduler.add(late)
    bench.step()
    assert (old.num_preemptions, late.status) == (0, SequenceStatus.WAITING)


def test_blocks_that_only_those_share_who_give_way_are_freed_too() -> None:
    bench = SchedulerBench(num_blocks=12)
    bench.add(range(40), branches=2, priority=5)
    bench.step()
    urgent = bench.add(range(100, 132))
    bench.step()
    assert urgent.status is SequenceStatus.RUNNING


def test_who_waits_for_a_prefix_that_another_one_computes_needs_no_way() -> None:
    bench = SchedulerBench(budget=8, max_num_seqs=2)
    leader, other = bench.add(range(30), priority=0), bench.add(range(100, 102), priority=1)
    bench.step()
    assert other.status is SequenceStatus.RUNNING
    bench.add([*range(12), 50], priority=-1)
    bench.step()
    assert (leader.num_preemptions, other.num_preemptions) == (0, 0)


# ---- steps under way ----


def two_planned_ahead(num_blocks: int) -> tuple[SchedulerBench, Sequence, Sequence, ScheduledStep]:
    """Two sequences with a block each of the prompt; the step under way fills the second block of both."""
    bench = SchedulerBench(num_blocks=num_blocks, plans_ahead=True)
    first, second = bench.add(range(8)), bench.add(range(100, 108))
    return bench, first, second, bench.plan()


def test_nobody_is_preempted_while_a_step_under_way_gives_back_what_is_missing() -> None:
    bench, first, second, step = two_planned_ahead(num_blocks=4)
    bench.abort(second)  # its blocks may still be written to
    assert (bench.num_free_blocks, bench.scheduler.pool.num_fenced_blocks) == (0, 2)
    assert bench.scheduler.plan() is None
    assert bench.counters.num_preemptions == 0
    bench.end(step)
    assert bench.plan().sampled == (first,)


def test_a_fenced_block_is_counted_on_once() -> None:
    """Two lack a block and one comes back: one waits for it, the other one gives way."""
    bench = SchedulerBench(num_blocks=5, plans_ahead=True)
    first, second, third = bench.add(range(8)), bench.add(range(100, 108)), bench.add(range(200, 203))
    step = bench.plan()
    bench.abort(third)
    assert bench.scheduler.pool.num_fenced_blocks == 1
    assert bench.scheduler.plan() is None
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    bench.end(step)
    assert bench.plan().sampled == (first,)


def test_one_preemption_while_a_step_is_under_way_brings_no_cascade() -> None:
    bench = SchedulerBench(num_blocks=6, plans_ahead=True)
    sequences = [bench.add(range(100 * i, 100 * i + 8)) for i in range(3)]
    step = bench.plan()
    assert bench.scheduler.plan() is None  # one gave way; what it held is enough for the two others
    assert [sequence.num_preemptions for sequence in sequences] == [0, 0, 1]
    bench.scheduler.check()
    bench.end(step)
    assert bench.plan().sampled == tuple(sequences[:2])


def test_a_copy_that_is_not_made_lets_go_of_its_source_also_when_nothing_else_is_planned() -> None:
    """One block for three copies, and what gives way gives it back only when the step under way is over."""
    bench = SchedulerBench(num_blocks=3, plans_ahead=True)
    bench.add(range(6), branches=3)
    step = bench.plan()
    assert bench.scheduler.plan() is None
    bench.scheduler.check()
    assert bench.counters.num_preemptions > 0
    bench.end(step)
    assert len(bench.plan().sampled) >= 1


# ---- a stand-still ----


def two_searches_that_fill_the_pool() -> tuple[SchedulerBench, list[Sequence], list[Sequence]]:
    """Of each search one beam is computed and holds half of the pool; the other one waits for memory."""
    bench = SchedulerBench(num_blocks=6)
    first, second = bench.add(range(8), beam_width=2), bench.add(range(100, 108), beam_width=2)
    bench.scheduler.complete(bench.plan())
    searches = [[beam, bench.scheduler.fork(beam, 1)] for beam in (first, second)]
    for beam in (*searches[0], *searches[1]):
        beam.append(DRAWN)
    bench.scheduler.complete(bench.plan())
    assert [[beam.status for beam in search] for search in searches] == [
        [SequenceStatus.RUNNING, SequenceStatus.WAITING],
        [SequenceStatus.WAITING, SequenceStatus.RUNNING],
    ]
    assert bench.num_free_blocks == 0
    return bench, searches[0], searches[1]


def test_when_nothing_can_go_on_a_search_gives_way_to_the_one_that_is_served_first() -> None:
    bench, first, second = two_searches_that_fill_the_pool()
    assert bench.plan().sampled == (first[1],)
    assert [beam.status for beam in second] == [SequenceStatus.WAITING] * 2


def test_the_one_that_gave_way_goes_on_when_there_is_memory() -> None:
    bench, first, second = two_searches_that_fill_the_pool()
    bench.scheduler.complete(bench.plan())
    bench.finish(*first)
    assert bench.plan().sampled == tuple(second)


def test_a_search_that_has_the_pool_for_itself_gets_all_its_beams_back() -> None:
    """It fits, as ``check_fits`` has it, but not with room to spare: the first beam would come and go for ever."""
    bench = SchedulerBench(num_blocks=4, head_room=HeadRoom(4))
    bench.scheduler.check_fits(8, 4, beam_width=2)
    first = bench.add(range(8), beam_width=2, max_tokens=4)
    bench.scheduler.complete(bench.plan())
    second = bench.scheduler.fork(first, 1)
    first.append(DRAWN)
    second.append(DRAWN)
    bench.scheduler._preempt(second)  # for something more urgent, which has gone
    for _ in range(6):
        bench.scheduler.complete(bench.plan())
        if second.status is SequenceStatus.RUNNING:
            break
    assert (first.status, second.status) == (SequenceStatus.RUNNING, SequenceStatus.RUNNING)


def test_nothing_stands_still_while_a_step_is_under_way() -> None:
    bench = SchedulerBench(num_blocks=6)
    beams = [bench.add(range(8), beam_width=2), bench.add(range(100, 108), beam_width=2)]
    bench.plan()
    bench.add(range(200, 212))
    assert bench.scheduler.plan() is None
    assert [beam.num_preemptions for beam in beams] == [0, 0]
