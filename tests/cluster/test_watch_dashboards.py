"""The dashboard and the alert rules speak of what is really exported: each metric, each label, each counter."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_nvml import Nvml
from promql import Exported, PromQLError, result_labels

from octavo.cluster.api.metrics import merge_metrics
from octavo.cluster.api.model_metrics import ModelsMetrics
from octavo.cluster.api.request_meter import RequestMeter
from octavo.cluster.api.service import GenerationRequest, Route
from octavo.cluster.watch.vllm_names import VLLM_NAMES, vllm_lines
from octavo.router.actor import RouterCore
from octavo.router.config import RouterConfig
from octavo.router.router import Router
from octavo.worker.engine import Engine
from octavo.worker.gpu_metrics import GpuMetrics
from octavo.worker.messages import (
    FinishReason,
    GroupReport,
    Request,
    RequestProgress,
    RouteQueries,
    RouteQuery,
    SamplingParams,
)
from octavo.worker.metrics import metrics_text
from octavo.worker.process_metrics import render
from octavo.worker.rank_metrics import RankMetrics
from octavo.worker.routing_hash import RoutingHasher
from octavo.worker.sampling_row import SamplingRow, StepResult
from octavo.worker.scheduler import Scheduler, SchedulerLimits
from octavo.worker.step_plan import StepPlan

MONITORING = Path(__file__).parents[2] / "k8s" / "monitoring"
PARAMS = SamplingParams(max_tokens=2, seed=0)
SERIES = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? \S+$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="')


class Model:
    def launch(self, plan: StepPlan, rows: list[SamplingRow]) -> Future[StepResult]:
        step: Future[StepResult] = Future()
        step.set_result(StepResult([0] * len(rows)))
        return step


def of_a_group() -> str:
    scheduler = Scheduler(SchedulerLimits(8, 4, 1, 64, 32), RoutingHasher(bytes(16), 4))
    engine = Engine(scheduler, Model(), clock=lambda: 0.0, emit=lambda gateway, update: None)
    engine.submit(Request("r", "g", "m", (1, 2, 3), b"", PARAMS))
    while engine.step():
        pass
    gpu = GpuMetrics("abc", {"model_name": "m", "group": "a", "rank": "0"}, Nvml(knows_limit=True))
    rank = asyncio.run(RankMetrics("m", "a", 0).text())
    return metrics_text(engine, "m", "a", {}) + rank + render(gpu)


def report(*progress: RequestProgress) -> GroupReport:
    return GroupReport("m", "a", 1, 4, 8, 8, 4, 0, 0, 0, 100.0, 0.01, False, progress)


def of_a_router() -> str:
    router = Router(RouterConfig(), random.Random(0))
    router.report(report(), 0.0)
    router.route(RouteQueries("g", (RouteQuery("r", "m", b"", 3, 2),)), 0.0)
    router.report(report(RequestProgress("r", True, True, ttft_s=0.1)), 0.1)
    router.counters.failures["route"] += 1
    core = RouterCore(router=router)
    return asyncio.run(core.cluster_metrics())["router"]


class Placed:
    route = Route("a", 0, "cold", 0.1)


def of_a_gateway() -> str:
    metrics = ModelsMetrics(["m"], "g")
    metrics.http_answer("m", "/v1/completions", 200)
    meter = RequestMeter(metrics["m"], GenerationRequest("r", "m", (1, 2, 3), PARAMS), time.perf_counter())
    meter.placed(Placed())  # type: ignore[arg-type]
    meter.tokens(0, 1, 0, (0.1, 0.2))
    meter.end(FinishReason.LENGTH)
    return metrics.text()


@pytest.fixture(scope="module")
def text() -> str:
    return merge_metrics([of_a_group(), of_a_router(), of_a_gateway()])


@pytest.fixture(scope="module")
def exported(text: str) -> Exported:
    labels_of: dict[str, frozenset[str]] = {}
    for name, labels in SERIES.findall(text):
        labels_of[name] = labels_of.get(name, frozenset()) | frozenset(LABEL.findall(labels))
    return labels_of


def dashboard() -> Any:
    return json.loads((MONITORING / "octavo-dashboard.json").read_text())


def shown() -> Iterator[tuple[str, str, str]]:
    """(panel, expression, legend) of everything in the dashboard."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"], target["legendFormat"]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "octavo-rules.yaml").read_text())["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_dashboard_asks_for_what_there_is(exported: Exported) -> None:
    panels = list(shown())
    assert len(panels) > 60
    for panel, expression, legend in panels:
        labels = result_labels(expression, exported)
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= labels, f"{panel}: the legend names what is not there"


def test_the_dashboard_s_choices_are_labels_that_there_are(exported: Exported) -> None:
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert found is not None
            assert found[2] in result_labels(found[1], exported)


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert["alert"])
def test_an_alert_asks_for_what_there_is_and_speaks_of_what_it_found(alert: dict[str, Any], exported: Exported) -> None:
    labels = result_labels(alert["expr"], exported)
    assert set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])) <= labels
    assert alert["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize(
    "wrong",
    [
        "octavo_no_such_metric",
        'octavo_num_requests_running{gateway="g"}',
        "sum by (gateway) (octavo_num_requests_running)",
        "rate(octavo_num_requests_running[5m])",
        "rate(octavo_num_preemptions_total)",
        "octavo_num_preemptions_total[5m]",
        "histogram_quantile(0.5, sum by (group) (rate(octavo_engine_queue_time_seconds_bucket[5m])))",
        "octavo_num_requests_running / octavo_gateway_requests_in_flight",
        "sum(octavo_num_requests_running",
        "octavo_num_requests_running > 1 2",
    ],
)
def test_what_is_wrong_is_found(wrong: str, exported: Exported) -> None:
    with pytest.raises(PromQLError):
        result_labels(wrong, exported)


def test_every_name_of_vllm_stands_for_a_metric_that_there_is(text: str, exported: Exported) -> None:
    theirs = dict(SERIES.findall(vllm_lines(text)))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in theirs}
    told = {name for names in VLLM_NAMES.values() for name in names}
    assert told <= families | {name.removesuffix("_total") for name in families}
    for labels in theirs.values():
        assert {"model_name", "engine"} <= set(LABEL.findall(labels))
    merged = merge_metrics([text, vllm_lines(text)])
    assert merged.count("# TYPE vllm:num_requests_waiting gauge") == 1
    assert 'vllm:num_requests_waiting{engine="router",model_name="m"} 0.0' in merged
    assert 'vllm:request_success_total{finished_reason="length",engine="g",model_name="m"} 1.0' in merged
