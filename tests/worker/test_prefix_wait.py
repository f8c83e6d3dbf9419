"""Waiting for a prefix: what two have in common and nobody has computed yet is computed once."""

from __future__ import annotations

import pytest
from scheduler_bench import SchedulerBench

from octavo.worker.messages import FinishReason
from octavo.worker.sequence import Sequence, SequenceStatus


def leader_and_follower(
    num_common: int = 20, *, num_prompt_tokens: int = 100, salt: str | None = None, use_prefix_cache: bool = True
) -> tuple[SchedulerBench, Sequence, Sequence]:
    """Eight tokens of a long prompt are computed; a short one that begins like it has arrived and was looked at."""
    bench = SchedulerBench(budget=8)
    leader = bench.add(range(num_prompt_tokens))
    bench.step()
    follower = bench.add([*range(num_common), 90], salt=salt, use_prefix_cache=use_prefix_cache)
    bench.step()
    return bench, leader, follower


def test_who_would_compute_what_another_one_is_about_to_waits_for_it() -> None:
    bench, leader, follower = leader_and_follower()
    assert (follower.status, follower.follows) == (SequenceStatus.WAITING, leader)
    assert leader.num_computed_tokens == 16  # the share that was left for the short one is its own again
    assert bench.scheduler.num_waiting == 1
    assert bench.counters.num_prefix_waits == 1


def test_it_goes_on_when_all_that_both_have_in_common_is_there_and_computes_nothing_of_that() -> None:
    bench, leader, follower = leader_and_follower()
    assert bench.step().scheduled == {leader: 8}  # up to 24
    assert follower.follows is None
    assert bench.step().scheduled == {leader: 7, follower: 1}
    assert follower.block_table[:5] == leader.block_table[:5]
    assert follower.num_cached_tokens == 20


def test_a_prefix_that_is_cached_up_to_where_they_part_is_waited_for_by_nobody() -> None:
    bench, leader, follower = leader_and_follower(num_common=12)
    assert follower.status is SequenceStatus.RUNNING
    assert follower.num_cached_tokens == 12
    assert leader.followers == []
    assert bench.counters.num_prefix_waits == 0


@pytest.mark.parametrize(("salt", "use_prefix_cache"), [("salt", True), (None, False)])
def test_who_may_not_share_does_not_wait(salt: str | None, use_prefix_cache: bool) -> None:
    bench, _, follower = leader_and_follower(salt=salt, use_prefix_cache=use_prefix_cache)
    assert follower.status is SequenceStatus.RUNNING
    assert bench.counters.num_prefix_waits == 0


def test_without_a_cache_nobody_waits_for_a_prefix() -> None:
    bench = SchedulerBench(budget=8, caching=False)
    bench.add(range(40))
    bench.step()
    other = bench.add([*range(12), 90])
    bench.step()
    assert other.status is SequenceStatus.RUNNING


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_when_the_one_that_computes_it_ends_the_others_do_it_themselves(reason: FinishReason) -> None:
    bench, leader, follower = leader_and_follower()
    bench.scheduler.finish(leader, reason)
    bench.scheduler.check()
    assert follower.follows is None
    assert bench.step().scheduled == {follower: 5}  # 16 tokens are there


def test_when_the_one_that_computes_it_is_preempted_the_others_are_in_the_queue_again() -> None:
    bench, leader, follower = leader_and_follower()
    bench.scheduler._preempt(leader)
    bench.scheduler.check()
    assert follower.follows is None
    assert bench.scheduler.num_waiting == 2
    bench.step()
    assert SequenceStatus.RUNNING in (leader.status, follower.status)


def test_one_that_ends_while_it_waits_for_a_prefix_leaves_nothing_behind() -> None:
    bench, leader, follower = leader_and_follower()
    bench.abort(follower)
    assert (leader.followers, bench.scheduler.num_waiting) == ([], 0)
    bench.abort(leader)
    assert not bench.scheduler.has_work


def test_a_reset_of_the_cache_lets_all_go_on() -> None:
    bench, leader, follower = leader_and_follower()
    bench.scheduler.reset_prefix_cache()
    bench.scheduler.check()
    assert follower.follows is None
    assert bench.step().scheduled == {leader: 4, follower: 4}  # nothing is found, and nothing waited for


def test_each_goes_on_where_it_parts() -> None:
    bench = SchedulerBench(budget=8)
    leader = bench.add(range(100))
    bench.step()
    early, late = bench.add([*range(16), 90]), bench.add([*range(24), 91])
    bench.step()
    assert bench.counters.num_prefix_waits == 2
    assert (leader.num_computed_tokens, early.follows, late.follows) == (16, None, leader)
    bench.step()
    assert (early.status, late.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    bench.step()
    assert (leader.num_computed_tokens, late.follows) == (30, None)
    bench.step()
    assert late.status is SequenceStatus.RUNNING
    assert late.num_cached_tokens == 24


def test_what_has_one_token_left_to_compute_passes_a_long_prompt_however_long_it_is_itself() -> None:
    """It was short beside the long prompt when it began to wait; meanwhile the long one has less to compute."""
    bench = SchedulerBench(budget=8)
    leader = bench.add(range(80))
    bench.step()
    follower = bench.add([*range(32), 91])
    bench.step()
    assert follower.follows is leader
    while follower.follows is leader:
        bench.step()
    bench.step()
    assert leader.num_uncomputed_tokens > 30
    assert follower.was_admitted


def test_those_who_waited_for_one_that_stopped_still_compute_it_only_once() -> None:
    bench, leader, first = leader_and_follower()
    second = bench.add([*range(20), 91])
    bench.abort(leader)
    assert bench.step().scheduled == {first: 5, second: 1}


def test_check_notices_a_follower_that_its_leader_does_not_know() -> None:
    bench, leader, _ = leader_and_follower()
    leader.followers.clear()
    with pytest.raises(RuntimeError):
        bench.scheduler.check()


def test_a_sequence_that_waits_for_a_prefix_does_not_keep_others_waiting() -> None:
    bench, leader, follower = leader_and_follower(num_common=28)
    other = bench.add(range(200, 203))
    assert bench.step().scheduled == {leader: 5, other: 3}
    assert follower.status is SequenceStatus.WAITING
