"""Blocks assumed for requests under way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.router.predictions import Predictions

hashes = st.lists(st.integers(1, 6), max_size=5, unique=True)
steps = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["assume", "drop", "move"]), st.integers(0, 2), hashes))


@given(steps)
def test_a_block_is_assumed_as_long_as_one_request_stands_for_it(
    sequence: list[tuple[int, str, int, list[int]]],
) -> None:
    predictions = Predictions(100.0)
    standing: dict[str, tuple[int, list[int]]] = {}
    for number, action, slot, values in sequence:
        name = str(number)
        if action == "assume":
            predictions.assume(name, slot, values, 0.0)
            standing[name] = (slot, values)
        elif action == "drop":
            predictions.drop(name)
            standing.pop(name, None)
        else:
            predictions.move_slot(slot, slot + 3)
            standing = {key: (old + 3 if old == slot else old, held) for key, (old, held) in standing.items()}
        predictions.check()
        for value in range(1, 7):
            expected = {slot for slot, held in standing.values() if value in held}
            assert predictions.mask_of(value) == sum(1 << slot for slot in expected)


def test_the_time_limit_drops_the_oldest() -> None:
    predictions = Predictions(10.0)
    predictions.assume("old", 0, [1, 2], now=0.0)
    predictions.assume("new", 1, [1, 3], now=5.0)
    predictions.expire(10.0)
    assert [predictions.mask_of(value) for value in (1, 2, 3)] == [2, 0, 2]
    predictions.expire(15.0)
    assert predictions.num_blocks == 0


def test_a_slot_that_is_gone_holds_nothing() -> None:
    predictions = Predictions(10.0)
    predictions.assume("a", 0, [1], now=0.0)
    predictions.assume("b", 0, [1], now=0.0)
    predictions.assume("c", 1, [1], now=0.0)
    predictions.drop_slot(0)
    assert predictions.mask_of(1) == 2
    predictions.check()
