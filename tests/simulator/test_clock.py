"""What is due comes in order."""

from __future__ import annotations

import pytest

from octavo.router.simulator.clock import Clock, Rank


def test_calls_come_by_time_then_rank_then_turn() -> None:
    clock, seen = Clock(), list[str]()
    for name, time_s, rank in [
        ("late", 2.0, Rank.STEP),
        ("arrival", 1.0, Rank.ARRIVAL),
        ("first report", 1.0, Rank.REPORT),
        ("second report", 1.0, Rank.REPORT),
        ("step", 1.0, Rank.STEP),
    ]:
        clock.at(time_s, rank, lambda name=name: seen.append(f"{name} at {clock.now:g}"))  # type: ignore[misc]
    while len(clock):
        clock.advance()
    assert seen == ["step at 1", "first report at 1", "second report at 1", "arrival at 1", "late at 2"]


@pytest.mark.parametrize("time_s", [0.5, float("nan")])
def test_nothing_comes_in_the_past(time_s: float) -> None:
    clock = Clock()
    clock.at(1.0, Rank.STEP, lambda: None)
    clock.advance()
    with pytest.raises(ValueError, match=r"it is 1\.0 s already"):
        clock.at(time_s, Rank.STEP, lambda: None)
