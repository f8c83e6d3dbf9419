"""What the router knows of a group's blocks, whatever happens to the messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.router.knowledge import KnowledgeState
from octavo.router.router import Router
from octavo.worker.messages import BlocksStored, KVEvents, RequestProgress
from octavo.worker.routing_hash import HASH_BYTES, unpack_hashes

PROMPTS = [[group * 100 + i for i in range(24)] for group in range(4)]
PROMPTS += [PROMPTS[0][:12] + PROMPTS[1][12:], PROMPTS[0][:20] + PROMPTS[2][20:]]


def knowledge(router: Router, group: str = "a") -> Any:
    return router.pools["m"].groups[group].knowledge


def depth(router: Router, hashes: bytes, group: str = "a") -> int:
    steps = router.index.match(unpack_hashes(hashes), 1 << knowledge(router, group).slot)
    return steps[0][0] if steps else 0


def assert_exact(router: Router, leader: Any, asker: Any) -> None:
    assert knowledge(router).state is KnowledgeState.EXACT
    for tokens in PROMPTS:
        hashes = asker.query(tokens).routing_hashes
        values = unpack_hashes(hashes).tolist()
        expected = next((i for i, value in enumerate(values) if value not in leader.parents), len(values))
        assert depth(router, hashes) == expected


def test_a_group_that_tells_from_the_first_message_is_exact(new_router: Any, new_leader: Any, asker: Any) -> None:
    router, leader = new_router(), new_leader()
    leader.compute(asker.query(PROMPTS[0]))
    assert router.report(leader.report(), 0.0) is False
    assert_exact(router, leader, asker)


def test_a_group_whose_past_is_unknown_is_asked_for_a_snapshot(new_router: Any, new_leader: Any, asker: Any) -> None:
    leader = new_leader()
    leader.compute(asker.query(PROMPTS[0]))
    leader.report()
    router = new_router()
    assert router.report(leader.report(), 0.0) is True
    assert knowledge(router).state is KnowledgeState.BLIND
    leader.tell_snapshot()
    leader.compute(asker.query(PROMPTS[1]))
    assert router.report(leader.report(), 0.1) is False
    assert_exact(router, leader, asker)


def test_a_lost_message_makes_stale_and_a_snapshot_exact(new_router: Any, new_leader: Any, asker: Any) -> None:
    router, leader = new_router(), new_leader()
    leader.compute(asker.query(PROMPTS[0]))
    router.report(leader.report(), 0.0)
    leader.compute(asker.query(PROMPTS[1]))
    leader.messages.clear()
    leader.compute(asker.query(PROMPTS[2]))
    assert router.report(leader.report(), 0.5) is True
    assert knowledge(router).state is KnowledgeState.STALE
    assert router.counters.event_gaps == 1
    leader.tell_snapshot()
    router.report(leader.report(), 1.0)
    assert_exact(router, leader, asker)


def test_a_block_behind_an_unknown_parent_makes_stale(new_router: Any, new_leader: Any, asker: Any) -> None:
    router, leader = new_router(), new_leader()
    hashes = asker.query(PROMPTS[0]).routing_hashes
    parent = unpack_hashes(hashes).tolist()[2]
    leader.tell(BlocksStored(parent, hashes[3 * HASH_BYTES :]))
    assert router.report(leader.report(), 0.0) is True
    assert knowledge(router).state is KnowledgeState.STALE


def test_parts_of_two_snapshots_do_not_make_one(new_router: Any, new_leader: Any, asker: Any) -> None:
    router, leader = new_router(), new_leader()
    leader.compute(asker.query(PROMPTS[0]))
    first = KVEvents(1, 0, leader.messages.pop().events, is_snapshot=True, part=0, num_parts=2)
    leader.evict(2)
    leader.messages = [first, KVEvents(1, leader.last_number, (), is_snapshot=True, part=1, num_parts=2)]
    router.report(leader.report(), 0.0)
    assert knowledge(router).state is KnowledgeState.BLIND
    leader.tell_snapshot()
    leader.messages.append(dataclasses.replace(leader.messages[0], sequence_number=9, part=1, num_parts=2))
    assert router.report(leader.report(), 5.0) is True
    assert knowledge(router).state is KnowledgeState.STALE


def test_a_message_that_cannot_be_is_left_out_and_makes_stale(new_router: Any, new_leader: Any, asker: Any) -> None:
    """Nothing else of the report is disturbed."""
    router, leader = new_router(), new_leader()
    leader.compute(asker.query(PROMPTS[0]))
    leader.messages.append(KVEvents(1, 1, (BlocksStored(None, bytes(8)), BlocksStored(None, bytes(13)))))
    leader.num_running = 3
    assert router.report(leader.report(), 0.0) is True
    assert router.pools["m"].groups["a"].report.num_running == 3
    assert knowledge(router).state is KnowledgeState.STALE
    assert router.counters.event_messages_malformed == 1
    assert depth(router, bytes(8)) == 0
    assert depth(router, asker.query(PROMPTS[0]).routing_hashes) == 6


def test_messages_of_another_generation_change_nothing(new_router: Any, new_leader: Any, asker: Any) -> None:
    router, leader = new_router(), new_leader(generation=5)
    hashes = asker.query(PROMPTS[0]).routing_hashes
    leader.messages.append(KVEvents(4, 0, (BlocksStored(None, hashes),)))
    router.report(leader.report(), 0.0)
    assert depth(router, hashes) == 0


def test_a_group_that_lies_is_found_out(new_router: Any, new_leader: Any, asker: Any) -> None:
    """It says that it holds a prompt, but its prefill finds nothing of it in the cache."""
    router, leader = new_router(), new_leader()
    query = asker.query(PROMPTS[0])
    leader.tell(BlocksStored(None, query.routing_hashes))
    router.report(leader.report(), 0.0)
    assert asker.ask(router, query, 0.1).expected_cached_tokens == 20
    leader.progress.append(RequestProgress(query.request_id, True, False, num_cached_tokens=0))
    assert router.report(leader.report(), 0.2) is True
    assert knowledge(router).state is KnowledgeState.STALE
    assert router.counters.outcomes["contradiction"] == 1
    assert knowledge(router).confidence < 1


def test_eviction_meanwhile_explains_a_smaller_hit(new_router: Any, new_leader: Any, asker: Any) -> None:
    router, leader = new_router(), new_leader()
    leader.compute(asker.query(PROMPTS[0]))
    router.report(leader.report(), 0.0)
    query = asker.query(PROMPTS[0])
    asker.ask(router, query, 0.1)
    leader.evict(4)
    leader.compute(query)
    router.report(leader.report(), 0.2)
    assert knowledge(router).state is KnowledgeState.EXACT
    assert router.counters.outcomes == {"less": 1}
    assert_exact(router, leader, asker)


FATES = st.lists(st.sampled_from(["kept", "lost", "twice", "late"]), max_size=12)
ACTIONS = st.lists(st.tuples(st.sampled_from(["compute", "evict", "clear", "report"]), st.integers(0, 5)), max_size=30)


@given(ACTIONS, FATES)
@settings(max_examples=150, deadline=None)
def test_lost_repeated_and_reordered_messages_end_exact(
    new_router: Any, new_leader: Callable[..., Any], asker: Any, actions: list[tuple[str, int]], fates: list[str]
) -> None:
    router, leader, now = new_router(), new_leader(capacity=14), 0.0
    pending, late = list(fates), []
    for action, number in actions:
        if action == "compute":
            leader.compute(asker.query(PROMPTS[number]))
        elif action == "evict":
            leader.evict(min(number, len(leader.parents)))
        elif action == "clear":
            leader.clear()
        else:
            now += 0.4
            delivered = []
            for message in leader.messages:
                fate = pending.pop() if pending else "kept"
                delivered += {"kept": [message], "lost": [], "twice": [message, message], "late": []}[fate]
                late += [message] if fate == "late" else []
            leader.messages = delivered + ([late.pop()] if len(late) > 1 else [])
            if router.report(leader.report(), now):
                leader.tell_snapshot()
            router.check()
    leader.messages += late
    leader.compute(asker.query(PROMPTS[0]))
    leader.evict(1)  # At least one message is new, so that a loss just before it shows.
    for _ in range(3):
        now += 2.0
        leader.report_to(router, now)
    router.check()
    assert_exact(router, leader, asker)
