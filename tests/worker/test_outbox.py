"""The outbox: nothing is lost on the way, and a gateway learns when something was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.messages import SequenceUpdate, TokenFrame
from octavo.worker.outbox import Outbox


class Clock:
    def __init__(self) -> None:
        self.now = 0.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outbox(clock: Clock) -> Outbox:
    return Outbox(7, now=lambda: clock.now)


def update(position: int) -> SequenceUpdate:
    return SequenceUpdate("r", 0, position, (position,))


def positions(frame: TokenFrame) -> list[int]:
    return [update.position for update in frame.updates]


def test_a_frame_has_everything_since_what_was_acknowledged(outbox: Outbox) -> None:
    outbox.put("g", update(0))
    outbox.put("g", update(1))
    frame = outbox.take("g", 0)
    assert (frame.generation, frame.last_number, positions(frame)) == (7, 2, [0, 1])
    outbox.put("g", update(2))
    assert positions(outbox.take("g", 2)) == [2]


def test_a_lost_answer_is_repeated_exactly(outbox: Outbox) -> None:
    outbox.put("g", update(0))
    outbox.take("g", 0)
    outbox.put("g", update(1))
    lost = outbox.take("g", 1)
    assert outbox.take("g", 1) == lost
    outbox.put("g", update(2))
    assert positions(outbox.take("g", 1)) == [1, 2]


def test_gateways_have_nothing_to_do_with_each_other(outbox: Outbox) -> None:
    outbox.put("a", update(0))
    outbox.put("b", update(1))
    assert (positions(outbox.take("a", 0)), positions(outbox.take("b", 0))) == ([0], [1])
    assert outbox.take("c", 0) == TokenFrame(7, 0, ())


def test_there_is_news_until_it_is_acknowledged(outbox: Outbox) -> None:
    assert not outbox.has_news("g", 0)
    outbox.put("g", update(0))
    assert outbox.has_news("g", 0)
    outbox.take("g", 0)
    assert outbox.has_news("g", 0)
    assert not outbox.has_news("g", 1)


def test_it_is_empty_when_everything_is_acknowledged(outbox: Outbox) -> None:
    assert outbox.is_empty
    outbox.put("g", update(0))
    outbox.take("g", 0)
    assert not outbox.is_empty
    outbox.take("g", 1)
    assert outbox.is_empty


def test_a_gateway_that_begins_to_poll_anew_gets_what_it_has_not_acknowledged(outbox: Outbox) -> None:
    for position in range(3):
        outbox.put("g", update(position))
    outbox.take("g", 0)
    outbox.take("g", 2)
    assert outbox.take("g", 0) == TokenFrame(7, 3, (update(2),))


# ---- gateways that fall silent ----


def test_a_silent_gateway_is_forgotten_and_named_once(outbox: Outbox, clock: Clock) -> None:
    outbox.put("silent", update(0))
    outbox.touch("heard of")
    clock.now = 9.0
    outbox.take("polling", 0)
    outbox.touch("heard of")
    clock.now = 15.5
    assert outbox.drop_silent(15.0) == ["silent"]
    assert outbox.drop_silent(15.0) == []
    assert outbox.is_empty


@pytest.mark.parametrize("num_since", [0, 1, 2, 3, 9])
def test_a_forgotten_mailbox_is_noticed_and_swallows_nothing(outbox: Outbox, clock: Clock, num_since: int) -> None:
    """However many updates came since: fewer, as many, or more than the gateway had acknowledged."""
    for position in range(2):
        outbox.put("g", update(position))
    assert outbox.take("g", 0).last_number == 2
    clock.now = 20.0
    outbox.drop_silent(15.0)
    for position in range(10, 10 + num_since):
        outbox.put("g", update(position))
    assert outbox.has_news("g", 2)
    for _ in range(2):  # also when the answer is lost
        frame = outbox.take("g", 2)
        assert frame.last_number < 2
        assert frame.updates == ()
    assert positions(outbox.take("g", frame.last_number)) == list(range(10, 10 + num_since))
    assert not outbox.has_news("g", num_since)


def test_a_number_that_was_never_given_acknowledges_nothing(outbox: Outbox) -> None:
    outbox.put("g", update(0))
    outbox.take("g", 0)
    assert outbox.has_news("g", 5)
    assert outbox.take("g", 5).last_number < 5
    assert positions(outbox.take("g", 0)) == [0]


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=40))
def test_a_gateway_that_loses_answers_still_gets_every_update_once(rounds: list[tuple[int, bool]]) -> None:
    outbox, received, acknowledged, num_put = Outbox(1, now=lambda: 0.0), list[int](), 0, 0
    for num_new, answer_arrives in [*rounds, (0, True)]:
        for _ in range(num_new):
            outbox.put("g", update(num_put))
            num_put += 1
        frame = outbox.take("g", acknowledged)
        if answer_arrives:
            assert frame.last_number - len(frame.updates) == acknowledged
            received += positions(frame)
            acknowledged = frame.last_number
    assert received == list(range(num_put))
