"""When a round of the engine's thread counts as one that does not end."""

from __future__ import annotations

from octavo.worker.step_watch import FIRST_DEADLINE_S, FIRST_STEPS, LEAST_DEADLINE_S, TIMES_SLOWEST, StepWatch


def after_steps(count: int, step_s: float, largest_step_s: float = 0.0) -> tuple[StepWatch, float]:
    """A watch after so many rounds of one step each, and the time by then."""
    watch, now = StepWatch(0.0), 0.0
    for _ in range(count):
        now += step_s
        watch.note_step(largest_step_s)
        watch.came_round(now)
    return watch, now


def test_the_first_steps_may_compile_kernels() -> None:
    watch, _ = after_steps(FIRST_STEPS - 1, 0.01)
    assert watch.deadline_s == FIRST_DEADLINE_S


def test_rounds_of_an_idle_engine_are_no_steps() -> None:
    watch = StepWatch(0.0)
    for second in range(10 * FIRST_STEPS):
        watch.came_round(float(second))
    assert watch.deadline_s == FIRST_DEADLINE_S


def test_quick_steps_have_the_least_deadline() -> None:
    watch, _ = after_steps(FIRST_STEPS, 0.01)
    assert watch.deadline_s == LEAST_DEADLINE_S


def test_the_age_is_that_of_the_round_under_way() -> None:
    watch = StepWatch(2.0)
    watch.came_round(5.0)
    assert watch.age_s(12.0) == 7.0


def test_where_steps_are_slow_or_would_be_the_deadline_follows() -> None:
    slow, _ = after_steps(FIRST_STEPS, 20.0)
    assert slow.deadline_s == TIMES_SLOWEST * 20.0
    promised, _ = after_steps(FIRST_STEPS, 0.5, largest_step_s=30.0)
    assert promised.deadline_s == TIMES_SLOWEST * 30.0


def test_one_slow_step_is_forgotten_in_time() -> None:
    watch, now = after_steps(FIRST_STEPS, 100.0)
    for _ in range(10_000):
        now += 0.01
        watch.came_round(now)
    assert watch.deadline_s == LEAST_DEADLINE_S


def test_a_deadline_that_was_set_holds_from_the_first_step() -> None:
    assert StepWatch(0.0, deadline_s=5.0).deadline_s == 5.0
