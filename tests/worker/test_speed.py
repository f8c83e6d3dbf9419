"""What is learned from the durations of steps, and what is expected of the next one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.worker.speed import LEAST_MEASURED_TOKENS, SpeedMeter


def cost_s(num_prefill_tokens: int, num_decoded: int) -> float:
    """20 ms for a step, 0.5 ms for a sequence, 1 ms for a token of prefill."""
    return 0.020 + 0.0005 * num_decoded + 0.001 * num_prefill_tokens


def meter(*steps: tuple[int, int], num_times: int = 1) -> SpeedMeter:
    speed = SpeedMeter()
    for _ in range(num_times):
        for num_prefill_tokens, num_decoded in steps:
            speed.note(num_prefill_tokens, num_decoded, cost_s(num_prefill_tokens, num_decoded))
    return speed


def test_nothing_is_known_at_first() -> None:
    speed = SpeedMeter()
    assert (speed.prefill_tokens_per_s, speed.decode_step_s, speed.knows_both) == (0.0, 0.0, False)
    assert [speed.expected_step_s(*step) for step in [(0, 0), (10, 0), (0, 10), (10, 10)]] == [0.0] * 4


def test_half_of_it_is_not_enough_for_a_step_that_does_both() -> None:
    assert meter((100, 0)).expected_step_s(10, 1) == 0.0
    assert meter((0, 1)).expected_step_s(10, 1) == 0.0


def test_a_prompt_alone() -> None:
    speed = meter((100, 0))
    assert speed.prefill_tokens_per_s == pytest.approx(100 / 0.120)
    assert speed.expected_step_s(50, 0) == pytest.approx(0.060)


def test_steps_that_only_decode() -> None:
    speed = meter((0, 8), num_times=3)
    assert speed.decode_step_s == speed.expected_step_s(0, 8) == pytest.approx(0.024)


def test_what_the_decodes_take_is_not_prefill() -> None:
    speed = meter((0, 8), (100, 8), num_times=3)
    assert speed.prefill_tokens_per_s == pytest.approx(1000)
    assert speed.expected_step_s(200, 8) == pytest.approx(0.224)


@pytest.mark.parametrize("sizes", [(1, 64), (4, 16, 32), (2, 3, 100, 120)])
@pytest.mark.parametrize("num_decoded", [1, 3, 8, 20, 40, 64, 90])
def test_the_number_of_sequences_matters(sizes: tuple[int, ...], num_decoded: int) -> None:
    """Whatever was measured last: a mean of all would be far off for a batch of another size."""
    speed = meter(*((0, size) for size in sizes), num_times=20)
    assert speed.expected_step_s(0, num_decoded) == pytest.approx(cost_s(0, num_decoded), rel=0.02)


def test_of_one_size_alone_nothing_is_inferred_about_others() -> None:
    speed = meter((0, 8))
    assert speed.expected_step_s(0, 1) == speed.expected_step_s(0, 64) == pytest.approx(0.024)


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.001, 1.0)), min_size=1, max_size=20), st.integers(1, 299))
def test_noise_makes_no_nonsense(steps: list[tuple[int, float]], num_decoded: int) -> None:
    """A larger batch takes at least as long, and a batch of twice the size not more than twice as long."""
    speed = SpeedMeter()
    for num, duration_s in steps:
        speed.note(0, num, duration_s)
    shortest, longest = min(s for _, s in steps), max(s for _, s in steps)
    expected = speed.expected_step_s(0, num_decoded)
    assert shortest * min(1.0, num_decoded / 300) * 0.99 <= expected <= longest * max(1.0, num_decoded) * 1.01


def test_decodes_not_measured_alone_yet_are_judged_by_the_first_step_that_does_both() -> None:
    speed = SpeedMeter()
    speed.note(100, 0, 0.100)
    speed.note(50, 8, 0.075)
    assert speed.knows_both
    assert speed.expected_step_s(0, 8) == pytest.approx(0.025)
    assert speed.prefill_tokens_per_s == pytest.approx(1000)
    assert speed.decode_step_s == 0.0
    speed.note(0, 8, 0.030)
    assert speed.decode_step_s == speed.expected_step_s(0, 8) == pytest.approx(0.030)


@pytest.mark.parametrize("factor", [2.5, 1 / 2.5])
def test_prefill_that_becomes_slower_or_faster_is_followed_alike(factor: float) -> None:
    speed = meter((0, 8), (100, 8), num_times=30)
    far = factor - 1.0
    for num_steps, followed in [(7, 0.5), (15, 0.9)]:
        for _ in range(num_steps):
            speed.note(100, 8, 0.024 + 0.100 * factor)
        assert speed.expected_step_s(100, 8) == pytest.approx(0.024 + 0.100 * (1.0 + followed * far), rel=0.03)
    assert speed.prefill_tokens_per_s == pytest.approx(1000 / factor, rel=0.15)


def test_a_step_that_another_process_interrupted_counts_three_times_what_it_should_have_taken() -> None:
    interrupted, thrice = (meter((0, 8), (100, 8), num_times=30) for _ in range(2))
    interrupted.note(100, 8, 5.0)
    thrice.note(100, 8, 0.024 + 0.300)
    assert interrupted.expected_step_s(100, 8) == pytest.approx(thrice.expected_step_s(100, 8))
    assert interrupted.expected_step_s(100, 8) < 1.2 * cost_s(100, 8)


def test_a_few_tokens_say_nothing_about_the_rate() -> None:
    speed = meter((100, 0))
    speed.note(LEAST_MEASURED_TOKENS - 1, 0, 1.0)
    assert speed.prefill_tokens_per_s == pytest.approx(100 / 0.120)


def test_decodes_that_seem_to_take_the_whole_step_leave_something_for_prefill() -> None:
    speed = meter((0, 8))
    speed.note(20, 8, 0.020)  # shorter than the decodes alone
    assert speed.prefill_tokens_per_s == pytest.approx(20 / (0.05 * 0.020))


@pytest.mark.parametrize("step", [(0, 1, 0.0), (0, 1, -1.0), (100, 1, 0.0), (0, 0, 1.0)])
def test_a_step_without_duration_or_tokens_is_no_measurement(step: tuple[int, int, float]) -> None:
    speed = SpeedMeter()
    speed.note(*step)
    assert (speed.prefill_tokens_per_s, speed.decode_step_s) == (0.0, 0.0)


# ---- the context of prefill ----


def token_s(context: float) -> float:
    """1 ms; twice that with 6,000 tokens before it."""
    return 0.001 * (1.0 + context / 6000)


def compute_prompt(
    speed: SpeedMeter, num_tokens: int, *, chunk: int = 100, begin: int = 0, noise: float = 0.0, seed: int = 0
) -> None:
    """The steps that compute a prompt of which ``begin`` tokens are cached."""
    rng = random.Random(seed)
    for start in range(begin, num_tokens, chunk):
        context = start + chunk / 2
        speed.note(chunk, 0, chunk * token_s(context) * (1.0 + rng.uniform(-noise, noise)), context)


def slope_of(speed: SpeedMeter) -> float:
    return (speed.expected_step_s(100, 0, 20_000) - speed.expected_step_s(100, 0, 10_000)) / 100 / 10_000


SLOPE = token_s(1) - token_s(0)


def test_what_context_costs_is_learned_from_one_long_prompt() -> None:
    speed = SpeedMeter()
    compute_prompt(speed, 8000)
    for context in (0, 4000, 8000, 30_000):
        assert speed.expected_step_s(100, 0, context) == pytest.approx(100 * token_s(context), rel=0.1)


def test_of_one_context_alone_nothing_is_inferred_about_others() -> None:
    speed = SpeedMeter()
    for _ in range(20):
        speed.note(100, 0, 0.1, 50)
    assert speed.expected_step_s(100, 0, 30_000) == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(10))
def test_what_was_learned_outlives_many_short_prompts(seed: int) -> None:
    speed = SpeedMeter()
    for _ in range(3):
        compute_prompt(speed, 6000)
    for index in range(500):
        compute_prompt(speed, 300, chunk=150, noise=0.3, seed=1000 * seed + index)
    assert slope_of(speed) == pytest.approx(SLOPE, rel=0.3)


@pytest.mark.parametrize("seed", range(10))
def test_noise_within_a_prompt_does_not_hide_the_slope(seed: int) -> None:
    speed = SpeedMeter()
    for index in range(3):
        compute_prompt(speed, 6000, noise=0.3, seed=3 * seed + index)
    assert 0.4 * SLOPE < slope_of(speed) < 1.8 * SLOPE


def test_on_a_machine_that_becomes_slower_all_contexts_are() -> None:
    """Seen at one context alone."""
    speed = SpeedMeter()
    compute_prompt(speed, 6000)
    for factor in (1, 2):
        for _ in range(40):
            speed.note(100, 0, factor * 100 * token_s(50), 50)
    assert speed.expected_step_s(100, 0, 30_000) == pytest.approx(2 * 100 * token_s(30_000), rel=0.1)


def test_the_rate_is_what_was_measured_at_whatever_context() -> None:
    speed = SpeedMeter()
    for _ in range(60):
        speed.note(100, 0, 0.200, 6000)
    assert speed.prefill_tokens_per_s == pytest.approx(500)


@given(
    st.lists(st.tuples(st.integers(16, 300), st.floats(0.001, 1.0), st.floats(0, 1e5)), min_size=1, max_size=20),
    st.floats(1e-4, 10.0),
    st.integers(0, 100_000),
)
def test_no_prefill_is_free_and_no_context_makes_it_cheaper(
    steps: list[tuple[int, float, float]], time_s: float, context: int
) -> None:
    speed = SpeedMeter()
    for num_tokens, duration_s, step_context in steps:
        speed.note(num_tokens, 0, duration_s, step_context)
    assert 0.0 < speed.expected_step_s(100, 0, 0) <= speed.expected_step_s(100, 0, context)
    assert speed.expected_step_s(100, 0, 0) >= 0.099 * 100 / speed.prefill_tokens_per_s
    num_tokens = speed.num_prefill_tokens_in(time_s, context)
    assert speed.expected_step_s(num_tokens, 0, context + num_tokens / 2) <= 1.001 * time_s
    assert speed.expected_step_s(num_tokens + 1, 0, context + (num_tokens + 1) / 2) >= 0.999 * time_s


def test_no_tokens_fit_into_no_time() -> None:
    assert SpeedMeter().num_prefill_tokens_in(1.0, 0) == 0
    assert [meter((100, 0)).num_prefill_tokens_in(time_s, 0) for time_s in (0.0, -1.0)] == [0, 0]
