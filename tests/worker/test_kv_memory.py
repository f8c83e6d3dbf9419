"""KV memory: what sequences share, what they copy before they write, and what others find."""

from __future__ import annotations

import pytest
from scheduler_bench import BLOCK_SIZE, DRAWN, HASHER, SchedulerBench, tokens_of

from octavo.worker.kv_memory import KvMemory, Prefix
from octavo.worker.messages import BlocksCleared, BlocksStored, Request, SamplingParams
from octavo.worker.plan_builder import PlanBuilder
from octavo.worker.routing_hash import RoutingHasher, pack_hashes
from octavo.worker.sequence import Sequence, SequenceStatus

# ---- prefixes that are found ----


def test_an_uncached_prefix_that_two_ask_for_in_one_step_is_computed_once() -> None:
    bench = SchedulerBench()
    first, second = bench.add([*range(12), 20]), bench.add([*range(12), 21])
    step = bench.plan()
    assert tokens_of(step) == {"0": 13, "1": 1}
    assert second.block_table[:3] == first.block_table[:3]
    assert second.block_table[3] != first.block_table[3]
    assert second.num_cached_tokens == 12
    assert first.num_cached_tokens == 0


def test_only_the_blocks_that_the_step_fills_are_shared_in_it() -> None:
    bench = SchedulerBench(budget=9)
    bench.add(range(20))
    second = bench.add(range(20))
    bench.step()  # 9 of the first: its second block is full, its third is not
    assert second.status is SequenceStatus.WAITING
    assert tokens_of(bench.step()) == {"0": 9}
    assert tokens_of(bench.step()) == {"0": 2, "1": 4}
    assert second.num_cached_tokens == 16


def test_a_prompt_that_is_cached_whole_computes_its_last_token_in_a_copy_of_the_last_block() -> None:
    """The logits of that token are needed, and a block that others find is not written to."""
    bench = SchedulerBench()
    first = bench.run_alone(range(8))
    cached = first.block_table[:2]
    bench.finish(first)
    again = bench.add(range(8))
    step = bench.step()
    assert tokens_of(step) == {"1": 1}
    assert step.plan.num_computed_tokens.tolist() == [7]
    assert step.sampled == (again,)
    assert again.num_cached_tokens == 7
    assert again.block_table[0] == cached[0]
    assert step.plan.copies.tolist() == [[cached[1], again.block_table[1]]]
    assert step.plan.table_blocks.tolist() == again.block_table
    assert bench.counters.num_copied_blocks == 1


def test_the_copy_of_a_block_that_was_found_is_found_too() -> None:
    bench = SchedulerBench()
    bench.finish(bench.run_alone(range(8)))
    again = bench.run_alone(range(8))
    assert bench.scheduler.cache.num_blocks == 3
    bench.step()
    assert again.block_table[1] != bench.run_alone([*range(8), 50]).block_table[1]  # the copy stored first is taken


def test_a_prompt_whose_last_block_this_very_step_fills_computes_that_block_again() -> None:
    """It could be shared, but not copied: copies are made before anything is written."""
    bench = SchedulerBench()
    bench.add(range(8))
    bench.add(range(8))
    step = bench.step()
    assert tokens_of(step) == {"0": 8, "1": 4}
    assert step.plan.copies.size == 0
    bench.add(range(8))
    assert tokens_of(bench.step()) == {"0": 1, "1": 1, "2": 1}


def test_a_prompt_one_token_longer_than_what_is_cached_computes_that_token() -> None:
    bench = SchedulerBench()
    bench.finish(bench.run_alone(range(8)))
    bench.add(range(9))
    assert tokens_of(bench.step()) == {"1": 1}


def test_what_is_computed_behind_a_found_prefix_is_found_with_it() -> None:
    bench = SchedulerBench()
    for num_tokens in (9, 13, 17):
        bench.finish(bench.run_alone(range(num_tokens)))
    assert bench.run_alone(range(30)).num_cached_tokens == 16


def test_output_is_found_again_too() -> None:
    bench = SchedulerBench()
    sequence = bench.add(range(4))
    for _ in range(6):
        bench.step()
    bench.finish(sequence)
    bench.add([0, 1, 2, 3, 9, 9, 9, 9, 9])
    assert tokens_of(bench.step()) == {"1": 1}


def test_another_salt_finds_nothing() -> None:
    bench = SchedulerBench()
    bench.add(range(9), salt="a")
    bench.add(range(9), salt="b")
    bench.add(range(9))
    assert tokens_of(bench.step()) == {"0": 9, "1": 9, "2": 9}


def test_without_caching_nothing_is_shared_and_nothing_told() -> None:
    bench = SchedulerBench(caching=False)
    bench.add(range(9))
    bench.add(range(9))
    assert tokens_of(bench.step()) == {"0": 9, "1": 9}
    assert bench.scheduler.drain_events() == ()


def test_a_found_prefix_is_not_evicted_for_the_rest_of_its_own_prompt() -> None:
    bench = SchedulerBench(num_blocks=5)
    bench.finish(bench.run_alone(range(8)))
    sequence = bench.add([*range(8), *range(50, 62)])
    step = bench.step()
    assert tokens_of(step) == {"1": 12}
    assert len(set(sequence.block_table)) == 5


def test_events_carry_the_gateways_hashes_and_go_on_with_them() -> None:
    bench = SchedulerBench()
    tokens = [*range(6), 9, 9, 9, 9, 9, 9]
    sequence = bench.add(tokens[:6])
    for _ in range(7):
        bench.step()
    expected = HASHER.hash_blocks(tokens).tolist()
    assert bench.stored_hashes() == expected
    bench.finish(sequence)
    request = Request(
        "r", "g", "m", tuple(range(100, 109)), pack_hashes((11, 22)), SamplingParams(max_tokens=1, seed=0)
    )
    bench.scheduler.add(Sequence.start(request, [0], (), arrival=99, now=0.0))
    bench.step()
    assert bench.stored_hashes() == [11, 22]


# ---- what may not be shared ----


def test_who_opted_out_takes_nothing_from_the_cache_and_leaves_nothing_there() -> None:
    bench = SchedulerBench()
    bench.finish(bench.run_alone(range(9)))
    bench.scheduler.drain_events()
    alone = bench.run_alone(range(9), use_prefix_cache=False)
    assert alone.num_cached_tokens == 0
    bench.finish(alone)
    bench.finish(bench.run_alone(range(100, 109), use_prefix_cache=False))
    assert bench.scheduler.drain_events() == ()
    assert bench.run_alone(range(100, 109)).num_cached_tokens == 0


def test_a_reset_forgets_everything_findable_and_tells_it() -> None:
    bench = SchedulerBench()
    bench.finish(bench.run_alone(range(9)))
    assert bench.scheduler.reset_prefix_cache() == 2
    bench.scheduler.check()
    assert bench.scheduler.drain_events() == (BlocksCleared(),)
    assert bench.scheduler.cache.snapshot() == ()
    assert bench.num_free_blocks == 32
    assert bench.scheduler.pool.num_cached_blocks == 0
    assert bench.run_alone(range(9)).num_cached_tokens == 0


def test_what_runs_through_a_reset_goes_on_and_stores_nothing_more() -> None:
    bench = SchedulerBench(budget=8)
    decoding = bench.add(range(7))
    bench.step()
    in_chunks = bench.add(range(100, 120))
    bench.step()
    table = decoding.block_table[:]
    bench.scheduler.reset_prefix_cache()
    bench.scheduler.drain_events()
    for _ in range(8):
        bench.step()
    assert decoding.block_table[: len(table)] == table
    assert (decoding.num_computed_tokens, in_chunks.num_computed_tokens) == (16, 26)
    assert bench.scheduler.drain_events() == ()
    assert bench.run_alone(range(5)).num_cached_tokens == 0
    assert bench.scheduler.drain_events() == (BlocksStored(None, pack_hashes(HASHER.hash_blocks(range(4)))),)


# ---- fork ----


def fork_of(num_branches: int, num_prompt_tokens: int, **limits: int | bool) -> tuple[SchedulerBench, list[Sequence]]:
    """Branches of one prompt after the step that has computed it."""
    bench = SchedulerBench(**limits)  # type: ignore[arg-type]
    first = bench.add(range(num_prompt_tokens), branches=num_branches)
    step = bench.step()
    assert step.sampled == (first, *step.forks)
    return bench, list(step.sampled)


@pytest.mark.parametrize("caching", [True, False])
def test_branches_compute_their_prompt_once_and_draw_from_the_same_logits(caching: bool) -> None:
    bench = SchedulerBench(caching=caching)
    first = bench.add(range(6), branches=3)
    step = bench.step()
    assert tokens_of(step) == {"0": 6}
    assert [sequence.branch for sequence in step.sampled] == [0, 1, 2]
    assert step.plan.logit_indices.tolist() == [5, 5, 5]
    assert step.positions == (0, 0, 0)
    assert (step.num_prefill_tokens, step.num_decoded) == (5, 1)
    assert bench.counters.num_forks == 2
    assert {tuple(sequence.block_table) for sequence in step.sampled} == {tuple(first.block_table)}
    assert bench.scheduler.pool.num_held_blocks == 2


def test_all_branches_but_the_last_copy_a_partly_filled_block_before_they_write_to_it() -> None:
    bench, branches = fork_of(3, 6)
    shared = branches[0].block_table[:]
    step = bench.step()
    assert step.plan.copies.tolist() == [[shared[1], branch.block_table[1]] for branch in branches[:2]]
    assert branches[2].block_table == shared
    assert len({branch.block_table[1] for branch in branches}) == 3
    assert bench.scheduler.pool.num_held_blocks == 4  # the full block of the prompt is still one
    assert bench.step().plan.copies.size == 0


def test_branches_whose_prompt_ends_with_a_block_copy_nothing() -> None:
    bench, branches = fork_of(3, 8)
    step = bench.step()
    assert step.plan.copies.size == 0
    assert bench.scheduler.pool.num_held_blocks == 2 + 3
    assert {tuple(branch.block_table[:2]) for branch in branches} == {tuple(branches[0].block_table[:2])}


def test_the_slots_of_branches_get_the_whole_table_of_their_prompt() -> None:
    bench, branches = fork_of(2, 8)
    step = bench.step()
    first, second = branches
    assert step.plan.table_updates.tolist() == [[first.slot, 2, 1], [second.slot, 0, 3]]
    assert step.plan.table_blocks.tolist() == [first.block_table[2], *second.block_table]


def test_a_prompt_in_chunks_is_forked_where_it_ends() -> None:
    bench = SchedulerBench(budget=4)
    bench.add(range(7), branches=2)
    assert bench.step().forks == ()
    assert [sequence.branch for sequence in bench.step().forks] == [1]


@pytest.mark.parametrize("use_prefix_cache", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_a_branch_without_a_slot_waits_and_then_shares_the_full_blocks_of_the_prompt(
    caching: bool, use_prefix_cache: bool
) -> None:
    bench = SchedulerBench(max_num_seqs=2, caching=caching)
    first = bench.add(range(9), branches=3, use_prefix_cache=use_prefix_cache)
    step = bench.step()
    _, second, third = step.sampled
    assert third.status is SequenceStatus.WAITING
    assert third.token_ids.tolist() == [*range(9), DRAWN]
    bench.finish(second)
    assert bench.step().scheduled == {first: 1, third: 2}
    assert third.block_table[:2] == first.block_table[:2]
    assert bench.scheduler.num_waiting == 0


def test_without_a_cache_a_waiting_branch_takes_the_place_of_the_last_one_that_holds_the_prompt() -> None:
    bench, branches = fork_of(3, 9, max_num_seqs=1, caching=False)
    bench.finish(branches[0])
    assert [branch.status for branch in branches[1:]].count(SequenceStatus.RUNNING) == 1
    assert tokens_of(bench.step()) == {"0": 2}  # two full blocks of the prompt are there


def test_without_a_cache_nothing_is_left_when_the_last_branch_was_preempted() -> None:
    bench, branches = fork_of(2, 9, max_num_seqs=1, caching=False)
    bench.scheduler._preempt(branches[0])
    assert sum(tokens_of(bench.step()).values()) == 10


def test_a_branch_that_ends_leaves_the_others_what_they_share() -> None:
    bench, (first, second) = fork_of(2, 6)
    bench.abort(first)
    assert bench.step().plan.copies.size == 0  # the last one that names a block may write to it
    bench.finish(second)
    assert bench.num_free_blocks == 32


def test_copies_that_are_planned_keep_their_source_from_being_written_over_or_taken() -> None:
    """Two branches with one block in common and nothing else free: one copies it, the other one writes on."""
    bench, (first, second) = fork_of(2, 6, num_blocks=3)
    step = bench.step()
    assert step.scheduled == {first: 1, second: 1}
    ((source, destination),) = step.plan.copies.tolist()
    assert (source, destination) == (second.block_table[1], first.block_table[1])


def test_a_fork_of_a_fork_shares_what_all_have_in_common() -> None:
    bench, (first, second) = fork_of(2, 6)
    bench.step()
    third = bench.scheduler.fork(second, 2)
    bench.scheduler.check()
    assert third.block_table == second.block_table
    assert third.block_table[0] == first.block_table[0]
    assert third.token_ids is not second.token_ids
    assert third.num_computed_tokens == second.num_computed_tokens


def test_output_that_branches_have_in_common_is_found_by_others() -> None:
    bench, branches = fork_of(2, 6)
    for _ in range(3):
        bench.step()
    bench.finish(*branches)
    assert bench.run_alone([*range(6), DRAWN, DRAWN, 1]).num_cached_tokens == 8


# ---- by itself ----


def holder(tokens: range, branches: tuple[int, ...] = (0,)) -> Sequence:
    request = Request("r", "gateway", "model", tuple(tokens), b"", SamplingParams(max_tokens=9, seed=0))
    return Sequence.start(request, list(branches), (), arrival=0, now=0.0)


def test_nothing_changes_when_there_are_not_enough_blocks() -> None:
    memory, sequence = KvMemory(2, BLOCK_SIZE, HASHER, enable_prefix_caching=True), holder(range(12))
    memory.take(sequence, Prefix([]))
    assert not memory.allocate(sequence, 12, PlanBuilder())
    assert (sequence.block_table, memory.pool.num_free_blocks) == ([], 2)
    assert memory.allocate(sequence, 8, PlanBuilder())
    assert memory.pool.num_free_blocks == 0


def test_what_a_prefix_costs_is_what_nobody_holds_and_a_copy_if_it_is_whole() -> None:
    memory = KvMemory(8, BLOCK_SIZE, HASHER, enable_prefix_caching=True)
    first = holder(range(8))
    memory.take(first, Prefix([]))
    memory.allocate(first, 8, PlanBuilder())
    first.num_computed_tokens = 8
    memory.store_full_blocks(first)
    memory.begin_plan()
    longer, same = holder(range(9)), holder(range(8))
    assert memory.num_blocks_to_take(longer, memory.find_prefix(longer)) == 1
    assert memory.num_blocks_to_take(same, memory.find_prefix(same)) == 1  # the copy
    memory.release(first)
    assert memory.num_blocks_to_take(longer, memory.find_prefix(longer)) == 3
    assert memory.num_blocks_to_take(same, memory.find_prefix(same)) == 3


def test_a_block_of_one_token_is_copied_before_that_token_is_computed_again() -> None:
    memory = KvMemory(8, 1, RoutingHasher(bytes(16), 1), enable_prefix_caching=True)
    sequences = [holder(range(3)) for _ in range(3)]
    for sequence, num_tokens in zip(sequences, (3, 1, 1), strict=True):
        memory.begin_plan()
        memory.take(sequence, memory.find_prefix(sequence))
        assert memory.allocate(sequence, num_tokens, PlanBuilder())
        sequence.num_computed_tokens += num_tokens
        memory.store_full_blocks(sequence)
    tables = [sequence.block_table for sequence in sequences]
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3


def test_check_notices_a_sequence_that_could_write_into_the_block_of_another() -> None:
    memory = KvMemory(8, BLOCK_SIZE, HASHER, enable_prefix_caching=True)
    first, second = holder(range(6)), holder(range(6))
    memory.take(first, Prefix([]))
    memory.allocate(first, 6, PlanBuilder())
    first.num_computed_tokens = 6
    memory.fork(first, second)
    memory.check([first, second])
    second.may_share_tail = False
    with pytest.raises(RuntimeError, match="r, branch 0, could write into a block that another one holds or finds"):
        memory.check([first, second])


@pytest.mark.parametrize("caching", [True, False])
def test_a_prompt_is_computed_once_however_few_of_its_branches_run_at_once(caching: bool) -> None:
    """Six branches in two slots, which all end at the same time."""
    bench = SchedulerBench(max_num_seqs=2, caching=caching)
    bench.add(range(42), branches=6, max_tokens=3)
    num_prefilled = 0
    while bench.scheduler.has_work:
        step = bench.step()
        num_prefilled += step.num_prefill_tokens
        ended = [sequence for sequence in step.sampled if sequence.num_output_tokens == 3]
        bench.finish(*ended)
    assert num_prefilled <= 42 + 4 * 3  # the partly filled block of the prompt is computed again by those that wait
