"""How much prefill a step has beside streams, and what that does to the streams' pauses."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_bench import HASHER, SchedulerBench

from octavo.worker.errors import ConfigurationError
from octavo.worker.scheduler import Scheduler
from octavo.worker.speed import LEAST_MEASURED_TOKENS, SpeedMeter
from octavo.worker.token_budget import FixedBudget, LatencyBudget

MOST = 8192

MakeMachine: TypeAlias = Callable[[float, int], tuple["Machine", float]]
"""Noise and seed → a machine, and a target for it."""


@dataclass
class Machine:
    """Time of a step = a + b * decodes + c * prefill tokens + d * prefill tokens * their context, each ± ``noise``."""

    a: float
    b: float
    c: float
    d: float
    noise: float
    rng: random.Random

    def step_s(self, num_prefill_tokens: int, num_decodes: int, num_context_tokens: float = 0.0) -> float:
        seconds = self.a + self.b * num_decodes + num_prefill_tokens * (self.c + self.d * num_context_tokens)
        return seconds * (1.0 + self.rng.uniform(-self.noise, self.noise))


def cpu(noise: float = 0.0, seed: int = 0) -> tuple[Machine, float]:
    """2,000 tokens/s, half of that at 6,000 tokens of context; target 100 ms."""
    return Machine(0.020, 0.0005, 1 / 2000, 1 / 2000 / 6000, noise, random.Random(seed)), 0.100


def gpu(noise: float = 0.0, seed: int = 0) -> tuple[Machine, float]:
    """50,000 tokens/s, half of that at 6,000 tokens of context; target 20 ms."""
    return Machine(0.003, 0.00005, 1 / 50000, 1 / 50000 / 6000, noise, random.Random(seed)), 0.020


def warm(machine: Machine, num_decodes: int) -> SpeedMeter:
    """It has computed a short prompt and decoded."""
    speed = SpeedMeter()
    speed.note(200, 0, machine.step_s(200, 0, 100.0), 100.0)
    for _ in range(10):
        speed.note(0, num_decodes, machine.step_s(0, num_decodes))
    return speed


def prefill(
    machine: Machine, target_s: float, speed: SpeedMeter, *, num_prompt: int, num_decodes: int, num_cached: int = 0
) -> list[float]:
    """Durations of the steps that compute a prompt beside ``num_decodes`` streams.

    As steps are planned ahead, how long one takes is known when the next but one is planned.
    """
    budget = LatencyBudget(MOST, target_s, speed, least=16)
    durations: list[float] = []
    under_way: tuple[int, int, float, float] | None = None
    while num_cached < num_prompt:
        num_tokens = min(budget.num_prefill_tokens(num_decodes, num_cached), num_prompt - num_cached)
        assert num_tokens > 0
        if under_way is not None:
            speed.note(*under_way)
        context = num_cached + num_tokens / 2
        durations.append(machine.step_s(num_tokens, num_decodes, context))
        under_way = num_tokens, num_decodes, durations[-1], context
        num_cached += num_tokens
    if under_way is not None:
        speed.note(*under_way)
    return durations


# ---- fixed ----


def test_what_the_decodes_leave() -> None:
    assert [FixedBudget(100).num_prefill_tokens(num, 0) for num in (0, 30, 100, 130)] == [100, 70, 0, 0]


# ---- by latency ----


def test_the_target_is_a_time() -> None:
    with pytest.raises(ConfigurationError, match=r"target_itl_s is 0\.0; it must be above 0"):
        LatencyBudget(MOST, 0.0, SpeedMeter(), least=16)


def test_without_streams_nobody_waits_for_the_step() -> None:
    assert LatencyBudget(MOST, 0.001, SpeedMeter(), least=16).num_prefill_tokens(0, 0) == MOST


def test_as_much_as_fits_beside_the_decodes() -> None:
    speed = SpeedMeter()
    speed.note(0, 8, 0.030)
    speed.note(100, 8, 0.130)
    assert LatencyBudget(MOST, 0.100, speed, least=16).num_prefill_tokens(8, 0) == pytest.approx(60, abs=1)


def test_little_while_nothing_is_measured() -> None:
    budget = LatencyBudget(MOST, 10.0, SpeedMeter(), least=16)
    assert budget.num_prefill_tokens(1, 0) == 64
    assert LatencyBudget(48, 10.0, SpeedMeter(), least=16).num_prefill_tokens(8, 0) == 40


def test_prefill_goes_on_where_the_decodes_alone_need_more_than_the_target() -> None:
    speed = SpeedMeter()
    speed.note(100, 0, 0.100)
    speed.note(0, 8, 0.200)
    assert LatencyBudget(MOST, 0.100, speed, least=32).num_prefill_tokens(8, 0) == 32
    assert LatencyBudget(MOST, 0.100, speed, least=1).num_prefill_tokens(8, 0) == LEAST_MEASURED_TOKENS
    assert LatencyBudget(20, 0.100, speed, least=32).num_prefill_tokens(8, 0) == 12


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 64), st.floats(1e-4, 1.0)), max_size=10),
    st.integers(1, 300),
    st.integers(0, 64),
)
def test_never_more_than_the_step_may_have(steps: list[tuple[int, int, float]], most: int, num_decodes: int) -> None:
    speed = SpeedMeter()
    for step in steps:
        speed.note(*step)
    num_tokens = LatencyBudget(most, 0.05, speed, least=16).num_prefill_tokens(num_decodes, 0)
    assert min(max(most - num_decodes, 0), 16) <= num_tokens <= max(most - num_decodes, 0)


WORST = {0.0: 1.25, 0.1: 1.5, 0.3: 2.0}
"""Noise → bound of a step's time, as a multiple of the target."""


def judge(durations: list[float], target_s: float, noise: float) -> None:
    assert max(durations) < WORST[noise] * target_s
    steady = durations[3:-1]  # after a cold start, before the rest of the prompt
    assert sum(steady) / len(steady) > 0.7 * target_s


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", WORST)
@pytest.mark.parametrize("make", [cpu, gpu])
@pytest.mark.parametrize("is_warm", [True, False])
def test_streams_keep_their_pace_while_long_prompts_are_computed(
    make: MakeMachine, noise: float, seed: int, is_warm: bool
) -> None:
    """The second one begins where the first one did, at half of the cost of a token that was measured last."""
    machine, target_s = make(noise, seed)
    speed = warm(machine, 8) if is_warm else SpeedMeter()
    for _ in range(2):
        judge(prefill(machine, target_s, speed, num_prompt=6000, num_decodes=8), target_s, noise)


def test_a_whole_prompt_in_one_step_would_break_the_target_by_far() -> None:
    machine, target_s = cpu()
    assert machine.step_s(6000, 8, 3000) > 40 * target_s


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", WORST)
@pytest.mark.parametrize("make", [cpu, gpu])
def test_a_cached_context_far_longer_than_any_before_is_met_in_the_first_step(
    make: MakeMachine, noise: float, seed: int
) -> None:
    """A token after 30,000 costs six times as much as one at the beginning, three times as much as any measured."""
    machine, target_s = make(noise, seed)
    speed = warm(machine, 8)
    for _ in range(4):
        prefill(machine, target_s, speed, num_prompt=6000, num_decodes=8)
    durations = prefill(machine, target_s, speed, num_prompt=36000, num_decodes=8, num_cached=30000)
    judge(durations, target_s, noise)
    if not noise:
        assert durations[0] > 0.8 * target_s


def test_where_nothing_tells_what_context_costs_it_is_learned_in_two_steps() -> None:
    machine, target_s = cpu()
    durations = prefill(machine, target_s, warm(machine, 8), num_prompt=36000, num_decodes=8, num_cached=30000)
    assert durations[0] > 2 * target_s  # nothing could be known, also when the next one was planned
    assert max(durations[2:]) < 2 * target_s
    assert max(durations[8:]) < 1.1 * target_s


def test_a_step_that_was_interrupted_leaves_prefill_its_pace() -> None:
    machine, target_s = cpu()
    speed = warm(machine, 8)
    prefill(machine, target_s, speed, num_prompt=3000, num_decodes=8)
    speed.note(50, 8, 20 * target_s, 3000)
    durations = prefill(machine, target_s, speed, num_prompt=6000, num_decodes=8, num_cached=3000)
    assert min(durations[:-1]) > 0.7 * target_s


def test_more_streams_leave_less_for_prefill() -> None:
    machine, target_s = cpu()
    speed = warm(machine, 8)
    for num_decodes in (8, 16, 32, 64):
        speed.note(0, num_decodes, machine.step_s(0, num_decodes))
    budget = LatencyBudget(MOST, target_s, speed, least=16)
    tokens = [budget.num_prefill_tokens(num, 0) for num in (8, 16, 32, 64)]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] > tokens[-1] + 30


def test_more_context_leaves_less_for_prefill() -> None:
    machine, target_s = cpu()
    speed = warm(machine, 8)
    for _ in range(2):
        prefill(machine, target_s, speed, num_prompt=6000, num_decodes=8)
    budget = LatencyBudget(MOST, target_s, speed, least=16)
    for context in (0, 3000, 6000, 30_000):
        num_tokens = budget.num_prefill_tokens(8, context)
        assert machine.step_s(num_tokens, 8, context + num_tokens / 2) == pytest.approx(0.9 * target_s, rel=0.1)


# ---- what the scheduler says of a step ----


class ToldContexts:
    """Four tokens of prefill a step."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def num_prefill_tokens(self, num_decodes: int, num_context_tokens: int) -> int:
        self.told.append(num_context_tokens)
        return 4


def bench_with(budget: ToldContexts) -> SchedulerBench:
    bench = SchedulerBench()
    bench.scheduler = Scheduler(bench.scheduler.limits, HASHER, budget=budget)
    return bench


def test_the_budget_is_told_the_context_of_the_prompt_that_comes_first() -> None:
    budget = ToldContexts()
    bench = bench_with(budget)
    bench.add(range(10))
    contexts = [bench.step().prefill_context for _ in range(4)]
    assert budget.told == [0, 4, 8, 0]
    assert contexts == [2.0, 6.0, 8.5, 0.0]  # with half of the own chunk; the last token of the prompt is a decode


def test_of_a_waiting_prompt_it_is_told_what_is_likely_to_be_cached() -> None:
    budget = ToldContexts()
    bench = bench_with(budget)
    bench.add(range(10), expected_cached_tokens=8)
    bench.step()
    assert budget.told == [8]


def test_the_context_of_a_step_is_the_mean_over_its_tokens_of_prefill() -> None:
    bench = SchedulerBench(budget=8)
    stream, long = bench.run_alone(range(4)), bench.add(range(100, 120))
    assert bench.step().prefill_context == 3.5  # tokens 0 … 6; the stream's does not count
    bench.add(range(200, 203))
    step = bench.step()
    assert step.scheduled[stream] == 1
    shorter = step.num_prefill_tokens - step.scheduled[long]
    assert shorter == 2
    expected = step.scheduled[long] * (7 + step.scheduled[long] / 2) + shorter * shorter / 2
    assert step.prefill_context == pytest.approx(expected / step.num_prefill_tokens)


def test_branches_draw_from_one_row_that_is_no_prefill() -> None:
    bench = SchedulerBench()
    bench.add(range(5), branches=3)
    step = bench.step()
    assert (len(step.sampled), step.num_prefill_tokens, step.prefill_context) == (3, 4, 2.0)
