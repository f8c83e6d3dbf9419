"""What every process says of itself, and every rank of its GPU."""

from __future__ import annotations

import asyncio

import prometheus_client
import pytest
from fake_nvml import GIB, Nvml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from octavo.worker.gpu_metrics import GpuMetrics
from octavo.worker.histogram import SECONDS, Histogram
from octavo.worker.process_metrics import LAG_PERIOD_S, LoopLag, ProcessMetrics, render
from octavo.worker.rank_metrics import RankMetrics


def values(text: str) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_a_process_tells_its_time_memory_and_files() -> None:
    told = values(render(ProcessMetrics({"role": "router"}, LoopLag())))
    assert told["octavo_process_cpu_seconds_total"] > 0.0
    assert told["octavo_process_resident_memory_bytes"] > 2**20
    assert told["octavo_process_open_fds"] >= 3
    assert told["octavo_process_start_time_seconds"] > 1e9
    assert told["octavo_event_loop_lag_seconds_count"] == 0


async def test_a_loop_that_is_held_up_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    lag, now = LoopLag(), [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])

    async def sleep(seconds: float) -> None:
        now[0] += seconds + 2.0
        if now[0] > 5.0:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await lag.run()
    assert (sum(lag.seconds.counts), lag.seconds.sum) == (2, pytest.approx(4.0))
    assert LAG_PERIOD_S < 2.0


def test_a_gpu_s_numbers_are_told_in_plain_units_as_far_as_they_are_known() -> None:
    assert values(render(GpuMetrics("abc", {"rank": "0"}, Nvml()))) == {
        "octavo_gpu_memory_used_bytes": 60 * GIB,
        "octavo_gpu_memory_total_bytes": 80 * GIB,
        "octavo_gpu_power_watts": 350.5,
        "octavo_gpu_utilization_ratio": 0.93,
        "octavo_gpu_temperature_celsius": 61,
        "octavo_gpu_energy_joules_total": 2000,
    }


def test_of_a_gpu_that_nvml_does_not_know_nothing_is_told() -> None:
    assert render(GpuMetrics("abc", {"rank": "0"}, Nvml(knows_gpu=False))) == ""


async def test_every_series_of_a_rank_says_which_one_it_is() -> None:
    text = await RankMetrics("m", "group-1", 3).text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines
    assert all('group="group-1"' in line and 'rank="3"' in line and 'model_name="m"' in line for line in lines)


@given(st.lists(st.floats(0.0, 200.0), max_size=20), st.text(max_size=8))
def test_a_histogram_s_text_is_that_of_the_client_library(values: list[float], model: str) -> None:
    registry = CollectorRegistry()
    theirs = prometheus_client.Histogram(
        "seconds", "Of something.", ["model_name", "group"], registry=registry, buckets=SECONDS
    )
    ours = Histogram(SECONDS)
    child = theirs.labels(model, "a")
    for value in values:
        child.observe(value)
        ours.add(value)
    labels = {"model_name": model, "group": "a"}
    told = [line for line in generate_latest(registry).decode().split("\n") if "_created" not in line]
    assert ours.text("seconds", "Of something.", labels).split("\n") == told
