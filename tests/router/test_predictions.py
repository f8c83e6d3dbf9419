"""Blocks assumed for requests under way."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.router.index import PrefixIndex
from octavo.router.predictions import Predictions
from octavo.worker.routing_hash import HashArray

SLOTS = (0, 1, 47, 48)
MOVED = tuple(slot + 100 for slot in SLOTS)
VALUES = range(7)
hashes = st.lists(st.sampled_from(VALUES), max_size=5, unique=True)
actions = st.sampled_from(["assume", "drop", "move"])
steps = st.lists(st.tuples(st.integers(0, 4), actions, st.sampled_from(SLOTS), hashes))


def array(values: list[int]) -> HashArray:
    return np.array(values, np.uint64)


def holders(predictions: Predictions, value: int) -> set[int]:
    return {slot for slot in (*SLOTS, *MOVED) if predictions.may_hold(slot, value)}


@given(steps)
def test_a_block_is_assumed_as_long_as_one_request_stands_for_it(
    sequence: list[tuple[int, str, int, list[int]]],
) -> None:
    predictions = Predictions(100.0)
    standing: dict[str, tuple[int, list[int]]] = {}
    for number, action, slot, values in sequence:
        name = str(number)
        if action == "assume":
            predictions.assume(name, slot, array(values), 0.0)
            standing[name] = (slot, values)
        elif action == "drop":
            predictions.drop(name)
            standing.pop(name, None)
        else:
            predictions.move_slot(slot, slot + 100)
            standing = {key: (old + 100 if old == slot else old, held) for key, (old, held) in standing.items()}
        predictions.check()
        for value in VALUES:
            assert holders(predictions, value) == {slot for slot, held in standing.values() if value in held}


def test_the_time_limit_drops_the_oldest() -> None:
    predictions = Predictions(10.0)
    predictions.assume("old", 0, array([1, 2]), now=0.0)
    predictions.assume("new", 1, array([1, 3]), now=5.0)
    predictions.expire(10.0)
    assert [holders(predictions, value) for value in (1, 2, 3)] == [{1}, set(), {1}]
    predictions.expire(15.0)
    assert predictions.num_blocks == 0


def test_a_slot_that_is_gone_holds_nothing() -> None:
    predictions = Predictions(10.0)
    predictions.assume("a", 0, array([1]), now=0.0)
    predictions.assume("b", 0, array([1]), now=0.0)
    predictions.assume("c", 1, array([1]), now=0.0)
    predictions.drop_slot(0)
    assert holders(predictions, 1) == {1}
    predictions.check()


def test_a_prompt_matches_as_far_as_it_is_confirmed_or_assumed() -> None:
    index, predictions = PrefixIndex(1 << 20), Predictions(10.0)
    first, second = index.add_slot(), index.add_slot()
    prompt = np.random.default_rng(0).integers(0, 2**64, 2000, dtype=np.uint64)
    index.stored(first, prompt[:700])
    predictions.assume("a", first, prompt[700:1900], 0.0)
    predictions.assume("b", second, prompt[:100], 0.0)
    predictions.check()
    assert index.match(prompt, None, predictions) == [(1900, 1), (100, 2)]
    assert index.match(prompt) == [(700, 1)]


def test_memory_is_given_back_when_requests_are_done() -> None:
    predictions = Predictions(10.0)
    for number in range(40):
        prompt = np.random.default_rng(number).integers(0, 2**64, 4096, dtype=np.uint64)
        predictions.assume(str(number), number, prompt, 0.0)
    most = predictions.num_bytes
    predictions.expire(20.0)
    for _ in range(200):
        predictions.expire(20.0)
    assert len(predictions) == predictions.num_blocks == 0
    assert predictions.num_bytes < most / 100
