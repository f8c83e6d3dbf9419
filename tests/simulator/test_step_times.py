"""How long a step takes, by data sheets and by measurement."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.router.simulator.hardware import SETUPS
from octavo.router.simulator.step_times import StepShape, StepTimes, fit, load_fitted, shape_of
from octavo.worker.errors import ConfigurationError
from octavo.worker.step_plan import PlanKind, StepPlan


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def random_steps(rng: random.Random, times: StepTimes, count: int = 60) -> list[list[float]]:
    shapes = [
        StepShape(rng.choice([0, 64, 2048]), rng.randrange(10**6), rng.randrange(1, 200), rng.randrange(10**5))
        for _ in range(count)
    ]
    return [[*shape, times.step_s(shape)] for shape in shapes]


def test_the_shape_of_a_step_is_read_from_its_plan() -> None:
    plan = StepPlan(
        PlanKind.STEP,
        num_new_tokens=int32(1, 3, 1),
        num_computed_tokens=int32(10, 100, 7),
        token_ids=int32(0, 0, 0, 0, 0),
    )
    assert shape_of(plan) == StepShape(3, 100 + 101 + 102, 2, (10 + 1) + 100 + (7 + 1))
    decodes = StepPlan(
        PlanKind.STEP, num_new_tokens=int32(1, 1), num_computed_tokens=int32(10, 7), token_ids=int32(0, 0)
    )
    assert shape_of(decodes) == StepShape(0, 0, 2, 19)


@pytest.mark.parametrize("setup", SETUPS)
def test_consecutive_decodes_are_single_ones_to_the_last_bit(setup: str) -> None:
    times = SETUPS[setup].step_times()
    together = times.decode_steps_s(7, 5000, 100).tolist()
    assert together == [times.step_s(StepShape(0, 0, 7, 5000 + 7 * number)) for number in range(100)]


def test_the_defaults_are_where_the_data_sheets_put_them() -> None:
    """A decode of 8B reads 15 GB of weights, at 80 % of 3.35 TB/s in 5.6 ms; 1,000 tokens of prompt are 15 TFLOP."""
    times = SETUPS["h100-8b"].step_times()
    assert times.step_s(StepShape(0, 0, 1, 0)) == pytest.approx(0.001 + 0.0056, rel=0.01)
    assert times.step_s(StepShape(1000, 0, 0, 0)) == pytest.approx(0.001 + 0.0253, rel=0.01)
    assert SETUPS["h100-8b"].model.kv_bytes_per_token == 131_072
    assert SETUPS["h200-8b"].step_times().weights_s < times.weights_s
    assert SETUPS["h200-70b-tp2"].num_kv_tokens() > 300_000


def test_a_fit_finds_the_coefficients() -> None:
    times = StepTimes(0.004, 0.0, 2e-5, 3e-10, 5e-8)
    fitted = fit(random_steps(random.Random(0), times))
    assert fitted.overhead_s == pytest.approx(times.overhead_s)
    assert fitted.token_s == pytest.approx(times.token_s)
    assert fitted.context_s == pytest.approx(times.context_s)
    assert fitted.kv_s == pytest.approx(times.kv_s)


def test_a_fit_is_not_negative() -> None:
    rng = random.Random(1)
    steps = random_steps(rng, StepTimes(0.004, 0.0, 2e-5, 3e-10, 0.0))
    for step in steps:
        step[4] *= rng.uniform(0.5, 1.5)
        step[4] = max(1e-4, step[4] - 1e-8 * step[3])
    fitted = fit(steps)
    assert min(fitted.overhead_s, fitted.token_s, fitted.context_s, fitted.kv_s) >= 0.0


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def create(text: str) -> Path:
        path = tmp_path / "steps.txt"
        path.write_text(text)
        return path

    return create


def test_the_last_line_of_a_benchmark_is_fitted(write: Callable[[str], Path]) -> None:
    times = StepTimes(0.004, 0.0, 2e-5, 3e-10, 5e-8)
    path = write("a table\n" + json.dumps({"steps": random_steps(random.Random(2), times)}) + "\n")
    assert load_fitted(path).token_s == pytest.approx(times.token_s)


GOOD_ROW = [1, 0, 1, 1, 0.5]
MISTAKES = {
    "": "the last line is not JSON",
    "{}": "must have a list 'steps' of 8 or more rows",
    json.dumps({"steps": [GOOD_ROW] * 7}): "must have a list 'steps' of 8 or more rows",
    json.dumps({"steps": [GOOD_ROW] * 8 + [[1, 0, 1, 1]]}): r"steps\[8\] must be finite numbers",
    json.dumps({"steps": [GOOD_ROW] * 8 + [[1, 0, 1, 1, 0.0]]}): r"steps\[8\] must be finite numbers",
    json.dumps({"steps": [GOOD_ROW] * 8 + [[-1, 0, 1, 1, 0.5]]}): r"steps\[8\] must be finite numbers",
    json.dumps({"steps": [GOOD_ROW] * 8 + [[True, 0, 1, 1, 0.5]]}): r"steps\[8\] must be finite numbers",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_what_cannot_be_fitted_is_named(write: Callable[[str], Path], text: str) -> None:
    with pytest.raises(ConfigurationError, match=MISTAKES[text]):
        load_fitted(write(text))
