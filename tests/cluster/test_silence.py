"""Silence is the other's fault only as far as we were there to listen."""

from __future__ import annotations

from octavo.cluster.silence import Silence


class Watch:
    """Looks at a clock of its own: ``looks(3)`` in time, ``looks(3, 5.0)`` five seconds apart."""

    def __init__(self, limit_s: float = 3.0, period_s: float = 0.5) -> None:
        self.now = 0.0
        self.period_s = period_s
        self.silence = Silence(limit_s, period_s, clock=lambda: self.now)

    def looks(self, count: int, every_s: float | None = None) -> list[bool]:
        found = []
        for _ in range(count):
            self.now += every_s or self.period_s
            found.append(self.silence.lasts_too_long())
        return found


def test_silence_is_too_long_at_its_limit() -> None:
    assert Watch().looks(6) == [False] * 5 + [True]


def test_a_word_ends_it() -> None:
    watch = Watch()
    assert not any(watch.looks(5))
    watch.silence.is_over()
    assert watch.looks(6) == [False] * 5 + [True]


def test_one_long_stop_of_ours_counts_for_little() -> None:
    assert not any(Watch().looks(1, 60.0))


def test_always_late_it_is_found_in_the_end() -> None:
    found = Watch().looks(60, 1.5)
    assert found.index(True) == 59
