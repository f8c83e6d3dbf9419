"""Open and closed loops against a server that answers, refuses, breaks off and stalls."""

from __future__ import annotations

from collections import Counter

import pytest
from load_plays import play, scripts
from scripted_api import Reply, ScriptedApi, Seen

from octavo.cluster.load.generator import INTERRUPTED, Generator, Plan


def closed(count: int, concurrency: int, num_turns: int = 1) -> Plan:
    return Plan(scripts(count, num_turns), None, concurrency)


def test_every_request_is_counted_once(api: ScriptedApi) -> None:
    """Whatever becomes of it."""
    replies = [
        Reply(),
        Reply(status=429),
        Reply(is_cut=True),
        Reply(error="broken"),
        Reply(words=()),
        Reply(has_usage=False),
    ]
    api.reply = lambda seen, number: replies[number % len(replies)]
    run = play(api, closed(60, 7))
    assert sorted(sample.script for sample in run.samples) == list(range(60))
    assert Counter(sample.error for sample in run.samples) == {
        None: 30,
        "http 429": 10,
        "cut off": 10,
        "error in the stream": 10,
    }
    assert run.num_unsent == 0


def test_a_closed_loop_has_no_more_under_way_than_it_may(api: ScriptedApi) -> None:
    api.hold()
    run = play(api, closed(40, 5), at=5, then=lambda generator: api.release())
    assert api.most_open == 5
    assert len(run.good()) == 40


def test_an_open_loop_does_not_wait_for_answers(api: ScriptedApi) -> None:
    api.hold()
    run = play(api, Plan(scripts(30), iter([0.0] * 30)), at=30, then=lambda generator: api.release())
    assert api.most_open == 30
    assert len(run.good()) == 30


def test_waiting_for_a_server_that_stalls_counts_from_when_requests_were_due(api: ScriptedApi) -> None:
    """Coordinated omission: all that are due during the stall wait for its end, and no time of it is left out."""
    api.hold()
    due = [number / 100 for number in range(20)]

    run = play(api, Plan(scripts(20), iter(due)), at=20, then=lambda generator: api.release())
    first_answer_s = min(sample.token_times_s[0] for sample in run.samples)
    assert first_answer_s >= due[-1]
    assert [sample.due_s for sample in sorted(run.samples, key=lambda sample: sample.script)] == due
    assert all(sample.ttft_s >= due[-1] - sample.due_s for sample in run.samples)


def test_what_the_bound_holds_back_counts_from_its_arrival_and_is_not_the_generators_delay(api: ScriptedApi) -> None:
    api.hold()
    run = play(api, Plan(scripts(10), iter([0.0] * 10), max_concurrency=2), at=2, then=lambda generator: api.release())
    assert api.most_open == 2
    held = sorted(run.samples, key=lambda sample: sample.sent_s)[2:]
    ends_s = sorted(sample.token_times_s[-1] for sample in run.samples)
    for number, sample in enumerate(held):
        assert sample.due_s == 0.0
        assert sample.sent_s >= sample.free_s >= ends_s[number]
        assert sample.ttft_s == sample.token_times_s[0]


def test_a_turn_goes_out_with_the_real_answer_to_the_last(api: ScriptedApi) -> None:
    api.reply = lambda seen, number: Reply(words=(f" answer-{number}", " more"))
    run = play(api, closed(4, 3, num_turns=3))
    by_script: dict[str, list[Seen]] = {}
    for seen in api.seen:
        by_script.setdefault(seen.text.split()[0], []).append(seen)
    assert len(by_script) == 4
    for name, turns in by_script.items():
        prompt = ""
        for number, seen in enumerate(turns):
            prompt += f"{' ' if prompt else ''}{name} turn-{number}"
            assert seen.text == prompt
            prompt += f" answer-{api.seen.index(seen)} more"
    assert len(run.good()) == 12


def test_no_turn_of_a_conversation_is_sent_after_one_that_failed(api: ScriptedApi) -> None:
    api.reply = lambda seen, number: Reply(status=500 if seen.text.count("turn") == 2 else 200)
    run = play(api, closed(3, 3, num_turns=4))
    assert Counter(sample.turn for sample in run.samples) == {0: 3, 1: 3}
    assert run.num_unsent == 6


def test_nothing_is_sent_after_the_duration(api: ScriptedApi) -> None:
    plan = Plan(scripts(10), iter([0.0, 0.01, 5.0, 6.0]), duration_s=4.0)
    run = play(api, plan)
    assert [sample.script for sample in run.samples] == [0, 1]


def test_what_is_under_way_when_it_is_ended_is_noted_as_interrupted(api: ScriptedApi) -> None:
    api.hold()
    run = play(api, closed(9, 3, num_turns=2), at=3, then=Generator.stop)
    assert [sample.error for sample in run.samples] == [INTERRUPTED] * 3
    assert run.num_unsent == 3


def test_what_the_bound_held_back_when_it_is_ended_was_not_sent(api: ScriptedApi) -> None:
    api.hold()
    run = play(api, Plan(scripts(9), iter([0.0] * 9), max_concurrency=2), at=2, then=Generator.stop)
    assert [sample.error for sample in run.samples] == [INTERRUPTED] * 2
    assert len(api.seen) == 2


@pytest.mark.parametrize("has_usage", [True, False])
def test_tokens_are_those_that_the_server_counts_else_pieces_of_text(api: ScriptedApi, has_usage: bool) -> None:
    api.reply = lambda seen, number: Reply(words=("a", " b"), has_usage=has_usage, num_cached_tokens=7, group="g1")
    (sample,) = play(api, closed(1, 1)).samples
    assert sample.num_tokens == 2
    assert sample.num_output_tokens == (2 if has_usage else None)
    assert sample.num_cached_tokens == (7 if has_usage else None)
    assert sample.group == "g1"
